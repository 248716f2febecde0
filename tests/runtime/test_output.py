"""Where outputs end and what a stream may show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_lm import greedy_reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_bundle import toy_bundle

from dsc.runtime import load
from dsc.runtime.output import Output

ALPHABET = "abcd"


class Letters:
    """Token i is the i-th letter; nothing is ever incomplete."""

    def push(self, token: int) -> str:
        return ALPHABET[token]

    def finish(self) -> str:
        return ""


def run(tokens, cuts, stop_ids=(), stops=()):
    output = Output(frozenset(stop_ids), stops, Letters())
    shown, start = "", 0
    for end in [*sorted(cuts), len(tokens)]:
        chunk = output.take(tokens[start:end])
        shown += chunk.text
        start = end
        if output.ended:
            return output, shown
    return output, shown + output.finish().text


@given(
    tokens=st.lists(st.integers(0, 3), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    stops=st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string_however_it_was_cut(tokens, cuts, stops):
    output, shown = run(tokens, [min(cut, len(tokens)) for cut in cuts], stops=stops)
    whole = "".join(ALPHABET[token] for token in tokens)
    completed = [n for n in range(1, len(whole) + 1) if any(stop in whole[:n] for stop in stops)]
    n_tokens = completed[0] if completed else len(tokens)
    cut_at = min((whole[:n_tokens].find(stop) for stop in stops if stop in whole[:n_tokens]), default=n_tokens)
    assert shown == output.text == whole[:cut_at]
    assert output.ids == tokens[:n_tokens]
    assert output.ended == bool(completed)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text():
    output, shown = run([0, 1, 3, 2], [1], stop_ids=[3])
    assert (output.ids, shown, output.ended) == ([0, 1, 3], "ab", True)


def test_what_was_held_back_for_a_stop_string_is_shown_when_a_stop_token_ends_it():
    output, shown = run([0, 1, 3], [], stop_ids=[3], stops=["bc"])
    assert shown == output.text == "ab"


def test_nothing_that_may_become_a_stop_string_is_shown_early():
    output = Output(frozenset(), ["bcd"], Letters())
    assert output.take([0, 1]).text == "a"
    assert output.take([2]).text == ""
    assert output.take([0]).text == "bca"


# --- with a real tokenizer: single bytes, so that a character needs several tokens

TEXT = "héllo wörld — ok. "
BYTES = sorted(set(TEXT.encode()))
VOCAB = len(BYTES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that goes on with TEXT for ever: the next byte is fixed by the position of the last one."""
    to_char = dict(zip(range(256), byte_characters(), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab={to_char[byte]: i for i, byte in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "chat_template.jinja": b"{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    bundle = toy_bundle(path, table, table, draft_kind="self", max_length=256, tokenizer=files)
    return load(bundle, verify="never"), table


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


SPECULATION = [
    "off",
    {"proposer": "self", "window": 5, "fallback": False},
    {"proposer": "ngram", "window": 5, "fallback": False},
]


@pytest.mark.parametrize("speculation", SPECULATION, ids=["off", "self", "ngram"])
def test_a_stream_never_shows_half_a_character(model, speculation):
    model, _ = model
    stream = model.stream("hé", 200, speculation=speculation)
    pieces = [str(chunk) for chunk in stream]
    text = model.bundle.codec.decode(stream.result.ids)
    assert "".join(pieces) == stream.result.text == text
    whole = text.rstrip("\ufffd")
    assert [piece for piece in pieces[:-1] if piece.endswith("\ufffd") and not whole.count("\ufffd")] == []


@pytest.mark.parametrize("speculation", SPECULATION, ids=["off", "self", "ngram"])
def test_a_stop_string_inside_a_block_cuts_there_and_the_conversation_goes_on(model, speculation):
    model, table = model
    prompt = model.encode("wo")
    plain = model.generate(prompt, 60, speculation="off")
    windows = (plain.text[i : i + 3] for i in range(8, len(plain.text)))
    stop = next(window for window in windows if "\ufffd" not in window)
    at = plain.text.index(stop)
    result = model.generate(prompt, 60, stop=stop, speculation=speculation)
    assert result.text == plain.text[:at]
    assert result.finish_reason == "stop"
    assert list(result.ids) == list(plain.ids[: len(result.ids)])
    assert stop in model.bundle.codec.decode(result.ids)
    assert stop not in model.bundle.codec.decode(result.ids[:-1])
    ids = [*prompt, *result.ids, *model.encode(" ok")]
    more = model.stream(ids, 20, speculation=speculation, reuse_cache=True).finish()
    assert list(more.ids) == greedy_reference(table, ids, 20)
    assert more.stats.cached_tokens == len(prompt) + len(result.ids) - 1


def test_a_conversation_is_a_fresh_run_on_its_messages(model):
    model, _ = model
    talk = model.conversation([{"role": "system", "content": "ok. "}])
    first = talk.send("hello", max_new_tokens=12)
    second = talk.send("world", max_new_tokens=12)
    assert second.stats.cached_tokens > 0
    messages = [
        {"role": "system", "content": "ok. "},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "world"},
    ]
    assert model.generate(messages, 12).ids == second.ids
    talk.rewind()
    assert talk.send("world", max_new_tokens=12).ids == second.ids
    talk.reset()
    assert talk.messages == []


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model):
    model, _ = model
    talk = model.conversation()
    talk.send("hello", max_new_tokens=5)
    before = list(talk.messages)
    with pytest.raises(Exception, match="at least 1 is required"):
        talk.send("world", max_new_tokens=0)
    assert talk.messages == before
    with pytest.raises(Exception, match="turns: at most 1 is allowed, got 2"):
        talk.rewind(2)
