"""On a real GPU: a bundle compiled for it generates, with speculation as without, what the CPU path generates."""

from __future__ import annotations

import pytest
from compile_for_cuda import kernel_model_dir
from real_models import smollm2_gguf

from dsc.runtime import load

pytestmark = pytest.mark.gpu

SAMPLINGS = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "seed": 4}]
PROMPT = "Write the numbers from one to ten, one on each line."


def compile_here(source, output):
    """The bundle with the kernels of this machine's GPU."""
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.kernel_bench import architecture_for
    from dsc.compiler.request import build_request
    from dsc.runtime.cuda_driver import CudaDriver

    with CudaDriver() as driver:
        arch = architecture_for(driver.device)
    draft = {"kind": "self", "precision": "int8"}
    asked = {"target": source, "output": output, "backends": ["cuda"], "archs": [arch], "draft": draft}
    asked["cuda_attention"] = "dspark"
    compile_bundle(build_request(asked | {"gate": {"n_prompts": 1, "n_tokens": 8, "n_draws": 0}}))
    return output


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    source = kernel_model_dir(folder / "source") if request.param == "tiny" else smollm2_gguf()
    return compile_here(source, folder / "model.dsmodel")


@pytest.fixture(params=["ort", "native"])
def pair(request, bundle):
    """One bundle on the CPU and on the GPU, there with attention by onnxruntime or by the bundle's kernels."""
    return load(bundle), load(bundle, provider="cuda", kernels=request.param)


def test_greedy_output_is_that_of_the_cpu(pair):
    options = {"max_new_tokens": 32, "speculation": "off", "ignore_eos": True}
    wanted, found = (model.generate(PROMPT, **options) for model in pair)
    assert found.ids == wanted.ids
    assert (found.stats.provider, found.stats.kernels) == ("cuda", "dspark")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_speculation_does_not_change_the_output(pair, sampling):
    runs = [
        pair[1].generate(PROMPT, max_new_tokens=64, sampling=sampling, speculation=speculation, ignore_eos=True)
        for speculation in ("off", {"window": 4, "fallback": False})
    ]
    assert runs[0].ids == runs[1].ids
    assert runs[1].stats.accepted > 0
    assert {run.stats.kernels for run in runs} == {"dspark"}
