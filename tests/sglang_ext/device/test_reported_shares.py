"""The shares that attention reports, in batches in which policies of several kinds have one reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from sglang_winnow import crossover
from sglang_winnow.device.variants import variants_of
from tests.sglang_ext.device.test_decode import (
    LAYERS,
    STEPS,
    Server,
    device_decode,
    on_device,
    policies_act_at_every_length,
)
from winnow_kernels.decode import gpu_selector
from winnow_kernels.decode.gpu_selector import Selector
from winnow_kernels.decode.gpu_selector import Server as SelectorServer
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.declarations import selectors_of

__all__ = ["policies_act_at_every_length"]

NAMES = ("tactic", "lowbit_top_p", "quest", "tactic, no sinks")
LENGTHS = (208, 143, 176, 190)
KINDS = ("tactic", "lowbit_top_p", "quest")
VARIANTS = variants_of(KINDS, (), LAYERS, delta_layers=())


def selectors(server: SelectorServer) -> Mapping[str, Selector]:
    return selectors_of(KINDS, server)


def run(names: Sequence[str], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """The outputs of each step and layer, and the statistics of each row."""
    server = Server(names, LENGTHS, device)
    decode = device_decode(server, selectors)
    outputs = []
    for step in range(STEPS):
        outputs += on_device(server, decode, step, padding=1, variants=VARIANTS)
        server.grow()
    return outputs, server.statistics.rows[1 : len(names) + 1]


@pytest.fixture(scope="module")
def mixed(device: torch.device) -> tuple[list[Tensor], Tensor]:
    """What all rows in one batch yield and cost, where selectors have scratch for one row at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_selector, "SCRATCH_BYTES", 1)
        patch.setenv(crossover.ENVIRONMENT, "0")
        crossover.of_all_policies.cache_clear()
        return run(NAMES, device)


@pytest.mark.parametrize("own", [(0, 3), (1,)], ids=["tactic", "lowbit_top_p"])
def test_a_row_has_the_share_that_it_has_without_rows_of_other_kinds(
    own: tuple[int, ...], mixed: tuple[list[Tensor], Tensor], device: torch.device
) -> None:
    outputs, statistics = mixed
    expected_outputs, expected = run([name if row in own else "dense" for row, name in enumerate(NAMES)], device)
    for row in own:
        assert torch.equal(statistics[row], expected[row])
        for output, wanted in zip(outputs, expected_outputs, strict=True):
            assert torch.equal(output[row], wanted[row])


def test_rows_of_kinds_that_report_nothing_have_no_share(mixed: tuple[list[Tensor], Tensor]) -> None:
    _, statistics = mixed
    reports = torch.tensor([name != "quest" for name in NAMES], device=statistics.device)
    assert torch.equal(statistics[:, Field.ESTIMATES], reports.double() * STEPS * LAYERS)
    shares = statistics[:, Field.ESTIMATED_SHARE] / (STEPS * LAYERS)
    assert (shares[~reports] == 0).all()
    assert (shares[reports] > 0.1).all()
    assert (shares[reports] < 1).all()
