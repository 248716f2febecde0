import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from pass_graphs import run, text_model

from dsc.passes.to_bfloat16 import ToBfloat16Pass
from dsc.passes.verify_graph import verify_graph

W = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
G = np.ones(16, np.float32)
TEXT = """agraph (float[batch, seq, 16] x, float[16, 8] w, float[16] g) => (float[batch, seq, 8] logits)
<float[batch, seq, 16] n> { n = RMSNormalization<axis=-1, epsilon=1e-6>(x, g) logits = MatMul(n, w) }"""


def test_types_and_numerics_by_onnx_own_evaluator():
    model = text_model(TEXT, w=W, g=G)
    assert ToBfloat16Pass()(model).modified
    verify_graph(model)
    assert model.graph.inputs[0].dtype.name == "BFLOAT16"
    assert model.graph.initializers["w"].dtype.name == "BFLOAT16"
    assert model.graph.outputs[0].dtype.name == "FLOAT"
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    x = (1e3 * np.random.default_rng(1).standard_normal((2, 3, 16))).astype(np.float32)
    wanted = run(text_model(TEXT, w=W, g=G), {"x": x})["logits"]
    got = ReferenceEvaluator(proto).run(None, {"x": x.astype(ir.DataType.BFLOAT16.numpy())})[0]
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()
