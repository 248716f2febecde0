"""Manifest and certificate: canonical bytes, what is refused, and the published schemas."""

import json
from typing import Any

import jsonschema
import pytest
from bundle_samples import sample_info, sample_manifest, write_sample
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dsc.bundle_schema.bundle_errors import BundleError, DuplicateKey, InvalidField, MalformedJson
from dsc.bundle_schema.certificate import (
    Certificate,
    ChiSquareCheck,
    FiniteCheck,
    GreedyCheck,
    Mismatch,
    ParityCheck,
    RowsCheck,
    TokenizerCheck,
    dump_certificate,
    parse_certificate,
)
from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.kv_plan import KvPlan
from dsc.bundle_schema.manifest import DraftEntry, Manifest, dump_manifest, parse_manifest
from dsc.bundle_schema.schemas import SCHEMAS, schema_path, schema_text
from dsc.bundle_schema.strict_json import dump_canonical, parse_strict
from dsc.bundle_schema.tensors import StrictModel

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcé", max_size=4), inner, max_size=4),
    max_leaves=12,
)

CERTIFICATE = Certificate(
    verdict="not_strict",
    reasons=("1 of 2 prompts differs",),
    kernels="native",
    device="cpu: a processor, 2 threads",
    greedy=(
        GreedyCheck(
            proposer="ngram",
            window=4,
            n_prompts=2,
            n_tokens=64,
            mismatches=(Mismatch(prompt=1, position=9, plain=3, speculative=4, logit_gap=0.0),),
        ),
    ),
    rows=RowsCheck(max_rows=8, n_rows=100, bit_equal=False, max_difference=1e-5, n_argmax_changes=1, n_ties=1),
    sampling=(
        ChiSquareCheck(
            proposer="model", temperature=0.7, n_draws=20000, statistic=10.5, degrees_of_freedom=9, p_value=0.3
        ),
    ),
    tokenizer=TokenizerCheck(verdict="padded", n_target=64, n_draft=60),
    finite=FiniteCheck(n_values=1000, n_not_finite=0),
    parity=ParityCheck(
        framework="transformers 5.24", n_positions=256, max_difference=1e-4, logit_range=30.0, n_argmax_equal=256
    ),
)


@given(recipe=st.dictionaries(st.text("abc", max_size=5), JSON_VALUES, max_size=4))
def test_a_manifest_round_trips_and_is_canonical(recipe: dict[str, Any]):
    manifest = sample_manifest().model_copy(update={"recipe": recipe})
    data = dump_manifest(manifest)
    assert parse_manifest(data) == manifest
    assert dump_manifest(parse_manifest(data)) == data
    assert json.loads(data)["recipe"] == recipe


def test_equal_content_gives_equal_bytes_whatever_its_order():
    first = sample_manifest()
    second = Manifest(**dict(reversed([(name, getattr(first, name)) for name in Manifest.model_fields])))
    reordered = second.model_copy(update={"recipe": dict(reversed(first.recipe.items()))})
    assert dump_manifest(first) == dump_manifest(reordered)


def test_a_certificate_round_trips():
    assert parse_certificate(dump_certificate(CERTIFICATE)) == CERTIFICATE


@pytest.mark.parametrize(("verdict", "reasons"), [("pass", ("something",)), ("fail", ()), ("not_strict", ())])
def test_a_verdict_needs_its_reasons(verdict: Any, reasons: tuple[str, ...]):
    with pytest.raises(ValidationError, match="a verdict other than 'pass' has reasons"):
        Certificate(verdict=verdict, reasons=reasons, device="cpu")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"n_draws": 20000', b'"n_draws": -1', InvalidField),
        (b'"p_value": 0.3', b'"p_value": 1.5', InvalidField),
        (b'"p_value": 0.3', b'"p_value": NaN', MalformedJson),
        (b'"p_value": 0.3', b'"p_value": -Infinity', MalformedJson),
        (b'"p_value": 0.3', b'"p_value": 0.3, "p_value": 0.9', DuplicateKey),
        (b'"bit_equal": false', b'"bit_equal": true', InvalidField),
        (b'"bit_equal": false', b'"bit_equal": 0', InvalidField),
        (b'"kernels": "native"', b'"kernels": "other"', InvalidField),
    ],
)
def test_wrong_certificates_are_refused(old: bytes, new: bytes, error: type[BundleError]):
    data = dump_certificate(CERTIFICATE)
    assert old in data
    with pytest.raises(error):
        parse_certificate(data.replace(old, new))


@pytest.mark.parametrize(("kind", "has_model"), [("ngram", True), ("none", True), ("model", False), ("self", False)])
def test_a_draft_has_a_model_exactly_when_it_runs_one(kind: Any, has_model: bool):
    model = sample_manifest().target if has_model else None
    with pytest.raises(ValidationError, match="have a model"):
        DraftEntry(kind=kind, model=model)


def test_an_error_names_the_path_and_what_was_got():
    data = dump_manifest(sample_manifest()).replace(b'"n_heads": 4', b'"n_heads": "four"')
    with pytest.raises(InvalidField, match=r"manifest\.json: target\.info\.n_heads: .* valid integer, got 'four'"):
        parse_manifest(data)


class Document(StrictModel):
    schema_version: str
    value: float


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_exactly(value: float):
    document = Document(schema_version="1.0", value=value)
    data = dump_canonical(document)
    assert parse_strict(Document, data, "document", "1.0") == document


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data: bytes):
    with pytest.raises(BundleError):
        parse_manifest(data)


@pytest.mark.parametrize("name", SCHEMAS)
def test_published_schemas_are_those_of_the_models(name: str):
    assert schema_path(name).read_text(encoding="utf-8") == schema_text(name), "run `make schemas`"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("certificate", CERTIFICATE),
        ("dflash_config", DflashConfig(proposers={"ngram": Proposer()})),
        ("kv_plan", KvPlan(max_length=8, n_slots=1, rollback_slack=2, zones=(), slots=(), total_nbytes=0)),
        ("manifest", sample_manifest()),
    ],
)
def test_what_is_written_obeys_its_published_schema(name: str, value: StrictModel):
    schema = json.loads(schema_text(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(dump_canonical(value)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(dump_canonical(value)) | {"surprise": 1}, schema)


def test_the_manifest_finds_its_members(tmp_path):
    manifest = write_sample(tmp_path / "sample.dsmodel")
    member = manifest.member("card.md")
    assert member is not None
    assert member.nbytes == 0
    assert manifest.member("other") is None
    assert [graph.member for graph in manifest.graphs()] == ["target/graph.onnx"]
    assert sample_info().kv_layers[0].window is None
