"""On a real GPU: what the kernels were built for, against the card's own copy and against themselves."""

from __future__ import annotations

from statistics import median

import pytest
from gpu_device import open_kernels

from dsc.compiler.gpu_operators import bind_operator
from dsc.compiler.kernel_bench import case_nbytes, copy_bandwidth, cuda_clock, make_inputs, standard_cases
from dsc.kernels.table import load_contract

pytestmark = pytest.mark.gpu

CASES = {case.name: case for case in standard_cases()}
ONE_ROW = CASES["attention, 8 x 8192, 1 rows, head 128"]
EIGHT_ROWS = CASES["attention, 8 x 8192, 8 rows, head 128"]
VERDICT = CASES["verdict greedy, 8 x 152064"]


def bound(case):
    """A call that queues the case's launches on torch's stream."""
    import torch

    kernels = open_kernels()
    _, tensors = make_inputs(case, "cuda")
    operation = bind_operator(kernels, load_contract(case.contract), tensors, case.attributes)
    stream = torch.cuda.current_stream().cuda_stream
    return lambda: operation.run(stream)


def seconds(*cases):
    """Medians of interleaved runs, one for each case."""
    runs = [bound(case) for case in cases]
    times = [[cuda_clock(run, 20) for run in runs] for _ in range(9)]
    return [median(column) for column in zip(*times, strict=True)]


def test_verification_attention_reads_at_four_fifths_of_the_cards_copy():
    (time,) = seconds(EIGHT_ROWS)
    assert case_nbytes(EIGHT_ROWS) / time >= 0.8 * copy_bandwidth(cuda_clock)


def test_seven_drafts_cost_little_more_than_none():
    none, seven = seconds(ONE_ROW, EIGHT_ROWS)
    assert seven <= 1.3 * none


def test_the_greedy_verdict_of_8_sequences_takes_30_microseconds():
    (time,) = seconds(VERDICT)
    assert time <= 30e-6
