"""A packed tokenizer is the same tokenizer, and nothing else passes for one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trained_tokenizer import trained

from dsc.bundle_schema.errors import ConfigError
from dsc.bundle_schema.packed_vocabulary import MERGES_NAME, TOKENIZER_NAME, pack_tokenizer, unpack_tokenizer
from dsc.runtime.text import load_tokenizer

BYTE_LEVEL, WITH_SPACES = (trained(kind).to_str().encode() for kind in (True, False))


def changed(data: bytes, **model) -> bytes:
    tree = json.loads(data)
    tree["model"] |= model
    return json.dumps(tree).encode()


@pytest.mark.parametrize("data", [BYTE_LEVEL, WITH_SPACES], ids=["bytes", "characters"])
def test_a_packed_tokenizer_is_the_same_tokenizer(data):
    packed = pack_tokenizer(data)
    assert set(packed) == {TOKENIZER_NAME, MERGES_NAME}
    assert sum(map(len, packed.values())) < len(data)
    assert load_tokenizer(packed).to_str() == load_tokenizer({TOKENIZER_NAME: data}).to_str()
    assert unpack_tokenizer({TOKENIZER_NAME: data}) == data


@given(st.data())
def test_several_merges_of_one_token_and_tokens_without_any_come_back(data):
    letters = sorted(data.draw(st.sets(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=8)))
    tokens, merges = list(letters), []
    for _ in range(data.draw(st.integers(0, 12))):
        left, right = data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens))
        if left + right not in tokens:
            tokens.append(left + right)
    for token in tokens:
        cuts = [n for n in range(1, len(token)) if token[:n] in tokens and token[n:] in tokens]
        merges += [[token[:n], token[n:]] for n in data.draw(st.permutations(cuts))]
    vocabulary = {token: made for made, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    tree = json.loads(unpack_tokenizer(pack_tokenizer(json.dumps({"model": model}).encode())))
    found = [merge.split(" ") if isinstance(merge, str) else merge for merge in tree["model"]["merges"]]
    assert found == merges
    assert tree["model"]["vocab"] == vocabulary


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"model":7}',
        changed(WITH_SPACES, type="WordPiece"),
        changed(WITH_SPACES, vocab={"a": 0, "b": 2, "ab": 3}, merges=[["a", "b"]]),
        changed(WITH_SPACES, vocab={"a": 0, "b": 1, "ab": 2, "ba": 3}, merges=[["b", "a"], ["a", "b"]]),
        changed(WITH_SPACES, vocab={"a": 0, "b": 1}, merges=[["a", "b"]]),
        changed(WITH_SPACES, vocab={"a" * 256: 0, "b": 1, "a" * 256 + "b": 2}, merges=[["a" * 256, "b"]]),
    ],
    ids=["empty", "no object", "no model", "not BPE", "gaps", "other order", "no such token", "a long part"],
)
def test_what_cannot_be_packed_stays(data):
    assert pack_tokenizer(data) == {}


def test_no_other_reader_takes_it_for_a_tokenizer():
    with pytest.raises(Exception, match=r"vocab|untagged|invalid"):
        Tokenizer.from_buffer(pack_tokenizer(BYTE_LEVEL)[TOKENIZER_NAME])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[:-1], "bytes and .* of merges are required"),
        (lambda packed: packed + b"\1", "bytes and .* of merges are required"),
        (lambda packed: packed[:9], "bytes and .* of merges are required"),
        (lambda packed: packed[:-1] + b"\0", "cannot be read"),
        (lambda packed: packed[:-1] + b"\xff", "cannot be read"),
    ],
)
def test_merges_that_do_not_fit_are_refused(damage, message):
    packed = pack_tokenizer(BYTE_LEVEL)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(packed | {MERGES_NAME: damage(packed[MERGES_NAME])})


@pytest.mark.parametrize("data", [b"{}", b'{"model":{}}', b'{"model":{"vocab":7}}', BYTE_LEVEL[:-9]])
def test_merges_without_a_packed_vocabulary_are_refused(data):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer({TOKENIZER_NAME: data, MERGES_NAME: b""})
