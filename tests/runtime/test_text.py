from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_fallback, byte_level, files_of

from dsc.bundle_schema.errors import ConfigError, GenerationError
from dsc.runtime.output import Output
from dsc.runtime.text import TextCodec

CODECS = {"byte_level": TextCodec(files_of(byte_level())), "byte_fallback": TextCodec(files_of(byte_fallback()))}
TEXTS = st.text(
    st.sampled_from("ab the 12 é€🇪🇺👩‍👧\ufffd\n▁<|im_end|>") | st.characters(exclude_categories=["Cs"]), max_size=30
)


def streamed(codec, ids, skip=True):
    stream = codec.stream(skip_special_tokens=skip)
    pieces = [stream.push(token) for token in ids]
    return pieces, stream.finish()


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 280), max_size=40), skip=st.booleans())
def test_pieces_of_any_ids_join_to_the_whole_text(kind, ids, skip):
    codec = CODECS[kind]
    pieces, rest = streamed(codec, ids, skip)

    assert "".join(pieces) + rest == codec.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 280), max_size=40), n_read=st.integers(0, 40), skip=st.booleans())
def test_what_nobody_reads_comes_at_the_end(kind, ids, n_read, skip):
    codec = CODECS[kind]
    stream = codec.stream(skip_special_tokens=skip)
    read = [stream.push(token) for token in ids[:n_read]]
    for token in ids[n_read:]:
        stream.keep(token)

    assert "".join(read) + stream.finish() == codec.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=200)
@given(text=TEXTS)
def test_text_streams_in_whole_characters(kind, text):
    codec = CODECS[kind]
    ids = codec.encode(text)
    pieces, rest = streamed(codec, ids, skip=False)

    assert "".join(pieces) + rest == codec.decode(ids, skip_special_tokens=False) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_plain_text_comes_without_delay():
    codec = CODECS["byte_level"]
    ids = codec.encode("the hat")
    pieces, rest = streamed(codec, ids)

    assert all(pieces)
    assert rest == ""


def test_a_character_comes_with_its_last_byte():
    codec = CODECS["byte_level"]
    pieces, _ = streamed(codec, codec.encode("a€b"))

    assert pieces == ["a", "", "", "€", "b"]


def test_unknown_ids_and_skipped_tokens_leave_no_text():
    codec = CODECS["byte_fallback"]
    ids = [10**6, 1, *codec.encode(" a"), 2, *codec.encode("b")]
    pieces, rest = streamed(codec, ids)

    assert "".join(pieces) + rest == codec.decode(ids)


def test_special_tokens_are_read_or_not_as_asked():
    codec = CODECS["byte_level"]

    assert codec.encode("<|im_end|>") == [2]
    assert 2 not in codec.encode("<|im_end|>", parse_special_tokens=False)
    assert codec.decode(codec.encode("<|im_end|>", parse_special_tokens=False)) == "<|im_end|>"
    assert codec.encode("<|im_end|>") == [2]  # the other mode left no trace


def test_lone_surrogates_do_not_stop_encoding():
    codec = CODECS["byte_level"]

    assert codec.decode(codec.encode("a\ud800b")) == "a?b"


@settings(max_examples=200)
@given(
    text=st.text(st.sampled_from("ab€ 12"), max_size=20), stop=st.text(st.sampled_from("ab€ 1"), min_size=1, max_size=4)
)
def test_stop_strings_end_at_the_token_that_completes_them(text, stop):
    codec = CODECS["byte_level"]
    ids = codec.encode(text)
    output = Output(frozenset(), [stop], codec.stream())
    shown = ""
    for start in range(0, len(ids), 3):
        if not output.ended:
            shown += output.take(ids[start : start + 3]).text
    shown += output.finish().text

    at = text.find(stop)
    assert output.text == shown == (text if at < 0 else text[:at])
    if at >= 0:
        n_taken = len(output.ids)
        assert stop in codec.decode(ids[:n_taken])
        assert stop not in codec.decode(ids[: n_taken - 1])


CHATML = (
    "{%- for m in messages %}\n    {%- if m.role == 'x' %}\n{{ raise_exception('no role x') }}\n    {%- endif %}\n"
    "{{- bos_token + m['role'] + '\\n' + m['content'] }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '>' }}{% endif %}"
)


def test_template_gives_what_transformers_gives():
    from transformers import PreTrainedTokenizerFast

    messages = [{"role": "user", "content": "the <b> & 'q'"}, {"role": "assistant", "content": "12"}]
    template = (
        CHATML
        + "{{ messages[0] | tojson }}{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    template += "{% generation %}kept{% endgeneration %}"
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<|im_start|>")
    codec = TextCodec(files_of(byte_level(), template, bos_token={"content": "<|im_start|>"}))

    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert codec.render(messages) == expected
    assert codec.chat(messages) == reference.encode(expected, add_special_tokens=False)


def test_template_inside_the_configuration_one_or_several():
    one = TextCodec(files_of(byte_level(), chat_template="{{ messages[0].content }}"))
    several = TextCodec(
        files_of(
            byte_level(),
            chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
        )
    )

    assert one.render([{"role": "user", "content": "c"}]) == "c"
    assert several.render([]) == "d"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "has none"),
        ("{% for %}", "not valid"),
        (CHATML, "no role x"),
        ("{{ messages[7].content + 1 }}", "rendered"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rendered"),
        ("{% for i in range(10**9) %}{% endfor %}", "rendered"),
    ],
)
def test_missing_or_failing_templates_say_so(template, named):
    codec = TextCodec(files_of(byte_level(), template, bos_token="<|im_start|>"))

    with pytest.raises(GenerationError, match=named):
        codec.chat([{"role": "x", "content": "y"}])


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"\xff\xfe"},
        {**files_of(byte_level()), "tokenizer_config.json": b"[1"},
    ],
)
def test_broken_files_are_named(files):
    with pytest.raises(ConfigError, match=r"tokenizer(_config)?\.json"):
        TextCodec(files)
