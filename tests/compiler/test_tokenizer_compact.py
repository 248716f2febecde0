"""A tokenizer in fewer bytes gives the same ids."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trained_tokenizer import CORPUS, trained

from dsc.bundle_schema.packed_vocabulary import MERGES_NAME
from dsc.compiler.tokenizer_compact import compact_files, compact_tokenizer
from dsc.runtime.text import load_tokenizer

TEXTS = st.text(max_size=60) | st.sampled_from(CORPUS)


BYTE_LEVEL, WITH_SPACES = trained(True), trained(False)


@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize(("tokenizer", "joined"), [(BYTE_LEVEL, True), (WITH_SPACES, False)])
def test_merges_are_joined_where_that_is_unambiguous(tokenizer: Tokenizer, joined: bool, pretty: bool):
    data = tokenizer.to_str(pretty=pretty).encode()
    compact = compact_tokenizer(data)
    assert len(compact) < len(data) or not (joined or pretty)
    assert all(isinstance(merge, str) == joined for merge in json.loads(compact)["model"]["merges"])
    assert Tokenizer.from_str(compact.decode()).to_str() == tokenizer.to_str()


@given(text=TEXTS)
def test_every_text_has_the_same_ids(text: str):
    for tokenizer in (BYTE_LEVEL, WITH_SPACES):
        compact = Tokenizer.from_str(compact_tokenizer(tokenizer.to_str(pretty=True).encode()).decode())
        assert compact.encode(text).ids == tokenizer.encode(text).ids


def test_a_merge_that_looks_like_a_comment_stays_a_pair():
    model = {"type": "BPE", "vocab": {"#version": 0, "x": 1, "#versionx": 2}, "merges": [["#version", "x"]]}
    data = json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()
    assert json.loads(compact_tokenizer(data))["model"] == model


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"model":7}', b'{"model":{"merges":[1]}}', b'{"a":"\\ud800"}']
)
def test_what_is_no_tokenizer_is_left_alone(data: bytes):
    assert compact_tokenizer(data) == data


def test_only_a_tokenizer_over_the_limit_is_packed():
    files = {"tokenizer.json": BYTE_LEVEL.to_str(pretty=True).encode(), "chat_template.jinja": b"{{ x }}"}
    size = len(compact_tokenizer(files["tokenizer.json"]))
    kept, packed = compact_files(files, size), compact_files(files, size - 1)
    assert kept == files | {"tokenizer.json": compact_tokenizer(files["tokenizer.json"])}
    assert set(packed) == {*files, MERGES_NAME}
    assert load_tokenizer(packed).to_str() == load_tokenizer(files).to_str()
    assert compact_files({"chat_template.jinja": b""}, 0) == {"chat_template.jinja": b""}
