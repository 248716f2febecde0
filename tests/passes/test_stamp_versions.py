import pytest
from pass_graphs import session, text_model

from dsc.bundle_schema.errors import PassError
from dsc.passes.stamp_versions import StampVersionsPass

TEXT = "agraph (float[B, 4] x) => (float[B, 4] y) { y = Relu(x) }"


@pytest.mark.parametrize(("opset", "ir_version"), [(21, 10), (23, 10), (24, 12), (26, 13)])
def test_the_lowest_ir_version_of_the_opset(opset, ir_version):
    model = text_model(TEXT)
    model.ir_version = 14
    model.opset_imports[""] = opset
    assert StampVersionsPass()(model).fired == 1
    assert model.ir_version == ir_version
    assert not StampVersionsPass()(model).modified
    session(model)


def test_an_opset_that_is_too_new_is_refused():
    model = text_model(TEXT)
    model.opset_imports[""] = 27
    with pytest.raises(PassError, match=r"at most 26 for onnxruntime 1\.31, got 27"):
        StampVersionsPass()(model)
