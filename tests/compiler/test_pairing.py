from __future__ import annotations

import pytest
from tokenizer_samples import byte_fallback, byte_level, files_of
from tokenizers import AddedToken, Tokenizer

from dsc.bundle_schema.errors import PairError
from dsc.compiler.pairing import pair
from dsc.compiler.tokenizer_match import TokenizerVerdict, compare_on_text, match_tokenizers


def edited(old: str, new: str) -> dict[str, bytes]:
    files = files_of(byte_level())
    return {**files, "tokenizer.json": files["tokenizer.json"].replace(old.encode(), new.encode())}


def with_tokens(*names: str, special: bool = True) -> dict[str, bytes]:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=special) for name in names])
    return files_of(tokenizer)


SAME = files_of(byte_level())
N = byte_level().get_vocab_size()


def test_equal_behaviour_counts_not_equal_files():
    pretty = Tokenizer.from_buffer(SAME["tokenizer.json"]).to_str(pretty=True).encode()
    verdict = match_tokenizers(SAME, {"tokenizer.json": pretty})

    assert verdict.relation == "identical"
    assert (verdict.n_target, verdict.n_draft, verdict.n_shared) == (N, N, N)


@pytest.mark.parametrize(("target_width", "draft_width"), [(N + 7, N), (N, N + 7), (N + 3, N + 7)])
def test_padded_logits_are_accepted_either_way(target_width, draft_width):
    found = pair(SAME, SAME, target_width, draft_width)

    assert found.relation == "padded"
    assert found.n_shared == N
    assert str(draft_width) in found.entry(()).summary


def test_a_chat_token_that_only_one_side_has_is_stated():
    for target, draft in ((with_tokens("<|tool|>"), SAME), (SAME, with_tokens("<|tool|>"))):
        verdict = match_tokenizers(target, draft)

        assert verdict.relation == "mapped"
        assert verdict.n_shared == N
        assert "<|tool|>" in verdict.summary


def test_one_token_with_another_meaning_is_refused_with_both_strings():
    other = edited('"Ġthe":', '"Ġthx":')
    other = {**other, "tokenizer.json": other["tokenizer.json"].replace(b'["\xc4\xa0t","he"]', b'["\xc4\xa0t","hx"]')}
    other = {**other, "tokenizer.json": other["tokenizer.json"].replace(b'["h","e"]', b'["h","x"]')}
    other = {**other, "tokenizer.json": other["tokenizer.json"].replace(b'"he":', b'"hx":')}
    first = byte_level().token_to_id("he")

    with pytest.raises(PairError, match=f"first {first}: 'he' in the target, 'hx' in the draft"):
        pair(SAME, other, N, N)
    differences = match_tokenizers(SAME, other).differences
    assert [(item.target, item.draft) for item in differences] == [("he", "hx"), ("Ġthe", "Ġthx")]


def test_swapped_tokens_are_refused():
    swapped = byte_level(("<|im_start|>", "<|end|>", "<|im_end|>"))

    with pytest.raises(PairError, match="first 0"):
        pair(SAME, files_of(swapped), N, N)


def test_a_token_under_another_id_is_refused():
    with pytest.raises(PairError, match=r"<\|b\|>"):
        pair(with_tokens("<|a|>", "<|b|>"), with_tokens("<|b|>", "<|c|>"), N + 2, N + 2)


def test_the_same_vocabulary_cut_differently_is_refused():
    other = byte_level()
    other.pre_tokenizer = Tokenizer.from_str(
        '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"post_processor":null,'
        '"decoder":null,"model":{"type":"BPE","vocab":{},"merges":[]},"pre_tokenizer":{"type":"Sequence",'
        '"pretokenizers":[{"type":"Digits","individual_digits":true},'
        '{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}]}}'
    ).pre_tokenizer

    with pytest.raises(PairError, match="12"):
        pair(SAME, files_of(other), N, N)


def test_special_on_one_side_only_is_stated():
    verdict = match_tokenizers(with_tokens("<|x|>", special=True), with_tokens("<|x|>", special=False))

    assert verdict.compatible
    assert "special on one side only" in verdict.summary


def test_different_kinds_are_refused():
    with pytest.raises(PairError, match="'<unk>'"):
        pair(SAME, files_of(byte_fallback()), N, N)


@pytest.mark.parametrize("files", [({}, SAME), (SAME, {}), (SAME, {"tokenizer.json": b"{"})])
def test_missing_and_broken_tokenizers_are_refused(files):
    with pytest.raises(PairError):
        pair(*files, N, N)


def test_models_without_tokenizers_need_equal_widths():
    assert pair({}, {}, 64, 64).n_shared == 64
    with pytest.raises(PairError, match="64"):
        pair({}, {}, 64, 32)


def test_differences_on_a_text_name_text_and_ids():
    other = byte_level()
    other.add_special_tokens(["<|t|>"])
    found = compare_on_text(files_of(other), SAME, "a<|t|>b€")

    assert len(found) == 1
    assert found[0].text == "<|t|>"
    assert found[0].draft_ids == (N,)
    assert len(found[0].target_ids) == 5
    assert compare_on_text(SAME, SAME, "a<|t|>b€") == ()


def test_verdict_survives_json():
    verdict = match_tokenizers(with_tokens("<|a|>"), SAME)

    assert TokenizerVerdict.model_validate_json(verdict.model_dump_json()) == verdict
