"""A certificate counts for the kernels that it was measured with, and what a bundle lacks is said or refused."""

from contextlib import suppress

import numpy as np
import pytest
from scripted_lm import greedy_reference, scripted_lm
from toy_bundle import toy_bundle, toy_info, write_bundle

from dsc.bundle_schema.bundle_errors import ChecksumMismatch
from dsc.bundle_schema.certificate import Certificate
from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import BundleError, CheckFailed, DscError
from dsc.runtime import load

TABLE = np.random.default_rng(2).normal(size=(20, 20)).astype(np.float32)
EXPECTED = greedy_reference(TABLE, [1], 10)


def test_a_certificate_of_other_kernels_is_no_certificate_of_these(tmp_path):
    path = toy_bundle(
        tmp_path / "toy.dsmodel", TABLE, certificate=Certificate(verdict="pass", kernels="native", device="toy")
    )
    assert load(path).generate([1], 3).stats.certificate == "pass (measured with native kernels)"
    with pytest.raises(CheckFailed, match="a certificate of ort kernels on cpu is required, got one of native kernels"):
        load(path, certified=True)


def test_a_certificate_of_these_kernels_is_one(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE)
    assert load(path, certified=True).generate([1], 3).stats.certificate == "pass"


@pytest.mark.parametrize("output", ["k_pool_out.0", "v_pool_out.0", "logits"])
@pytest.mark.parametrize("owner", ["target", "draft"])
def test_a_graph_that_does_not_give_what_it_must_is_refused(tmp_path, owner, output):
    """Without its cache among the outputs a graph would read rows that nobody has written."""
    graphs = {name: scripted_lm(TABLE) for name in ("target", "draft")}
    found = [value for value in graphs[owner].graph.output if value.name != output]
    del graphs[owner].graph.output[:]
    graphs[owner].graph.output.extend(found)
    path = write_bundle(
        tmp_path / "toy.dsmodel",
        graphs["target"],
        toy_info(20),
        draft=graphs["draft"],
        draft_info=toy_info(20),
        draft_kind="model",
    )
    with pytest.raises(BundleError, match=rf"{owner}/graph\.onnx: the graph output '{output}' is required"):
        load(path)


def test_a_damaged_draft_is_an_error_or_said_and_changes_no_output(tmp_path, capfd):
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, TABLE, draft_kind="self")
    with open_bundle(path) as bundle:
        found = bundle.member("draft/graph.onnx")
    sound = path.read_bytes()
    assert load(path, strict=False).generate([1], 10).stats.proposed > 0
    said = 0
    for step in range(60):
        data = bytearray(sound)
        data[found.offset + step * found.nbytes // 60] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(ChecksumMismatch, match=r"draft/graph\.onnx"):
            load(path, strict=False)
        with suppress(DscError):
            model = load(path, verify="never", strict=False)
            results = [model.generate([1], 10)]
            with model.engine(slots=1) as engine:
                results.append(engine.submit([1], max_new_tokens=10).result())
            for result in results:
                assert list(result.ids) == EXPECTED
                assert result.stats.proposed or "draft/graph.onnx" in result.stats.speculation_reason
                said += bool(result.stats.speculation_reason)
    assert said > 0
    assert capfd.readouterr().out == ""
