"""What a decode step adds to the statistics; that it adds the right numbers, ``test_decode`` shows."""

from __future__ import annotations

import torch

from sglang_winnow.device.accounting import count_step
from tests.kernels.gpu.compiling import compile_launches
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_rows import ParameterTable
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.policies.declarations import LAYOUT


def launch() -> None:
    cpu = torch.device("cpu")
    step = StepBuffers(LAYOUT, 4, 256, 16, 2, 1, 1, 64, cpu).largest
    table, statistics = ParameterTable(LAYOUT, 4, cpu), Statistics(4, cpu)
    for everything in (None, LayerCache(*torch.empty(2, 64, 1, 16))):
        count_step(step, table, statistics, everything)


def test_it_compiles_for_hopper() -> None:
    compiled = compile_launches(launch)
    assert len(compiled) == 2
    for kernel in compiled:
        assert kernel.local_bytes == 0
