"""Batches that mix policies: what a step launches for them, and that a row is what it is by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_winnow import crossover
from sglang_winnow.device import decode as decode_module
from sglang_winnow.device.decode import DeviceDecode, Variant
from sglang_winnow.device.lanes import lanes_of
from sglang_winnow.device.variants import variant_for, variants_of
from sglang_winnow.graph_sets import GraphSet
from tests.sglang_ext.device.test_decode import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    STEPS,
    Server,
    device_decode,
    on_device,
    policies_act_at_every_length,
)
from winnow_kernels.attend.cuda.kernel import CudaAttend
from winnow_kernels.attend.gpu import attend_kernel
from winnow_kernels.decode.gpu_selector import Selector
from winnow_kernels.decode.gpu_selector import Server as SelectorServer
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.policies.declarations import KINDS, selectors_of

__all__ = ["policies_act_at_every_length"]

DELTA_LAYER = 1
# What a layer launches that is shared by all kinds: attention alone.
NO_SELECTION = frozenset({"streaming_llm"})
NAMES = ("quest, terminated", "snapkv", "lowbit_top_k", "tactic, capped", "delta", "dense")
LENGTHS = (208, 143, 176, 190, 165, 97)
MIXED = frozenset({"quest", "snapkv", "lowbit_top_k", "tactic", "delta"})


class Launches:
    """Counts the kernels of a layer, none of which runs."""

    def __init__(self, decode: DeviceDecode, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decode = decode
        self._step = step
        self._launched: Counter[str] = Counter()
        monkeypatch.setattr(type(attend_kernel), "run", lambda kernel, *_, **__: self._note(kernel.fn))
        # In CUDA C++ it is the same step.
        monkeypatch.setattr(CudaAttend, "launch", lambda *_: self._note(attend_kernel.fn))

    def _note(self, kernel: Any) -> None:
        self._launched[f"{kernel.__module__}:{kernel.__name__}"] += 1

    def of(self, kinds: Iterable[str], *, ordered: bool, layer: int) -> Counter[str]:
        """Return the launches of a layer in a graph for batches of ``kinds``."""
        own = frozenset(kinds)
        variant = Variant(own, ordered, frozenset({DELTA_LAYER}) if "delta" in own else frozenset())
        self._decode.prepare(variant, (), (), (), self._step.request_slots, self._step.batch.lengths)
        self._decode.begin()
        self._launched = Counter()
        queries = torch.zeros(self._step.rows, GROUP * KV_HEADS, HEAD_DIM, device=self._step.slots.device)
        self._decode.attend(layer, queries, torch.empty_like(queries))
        return self._launched


@pytest.fixture
def launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Launches:
    decode = device_decode(Server(["dense"] * 4, [64] * 4, device))
    return Launches(decode, decode.buffers[4], monkeypatch)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kinds", [("quest", "snapkv"), ("lowbit_top_p", "lowbit_top_k", "streaming_llm"), KINDS])
def test_a_set_launches_what_its_kinds_launch_alone(kinds: Sequence[str], ordered: bool, launches: Launches) -> None:
    for layer in (0, DELTA_LAYER):
        attention = launches.of(NO_SELECTION, ordered=ordered, layer=layer)
        assert sum(attention.values()) == 2
        expected = attention.copy()
        for kind in kinds:
            expected += launches.of([kind], ordered=ordered, layer=layer) - attention
        assert launches.of(kinds, ordered=ordered, layer=layer) == expected


def test_order_is_launched_where_it_may_matter_and_delta_in_its_layers(launches: Launches) -> None:
    for kind in ("tactic", "quoka", "sparq", "lowbit_top_p", "lowbit_top_k"):
        in_order, unordered = (launches.of([kind], ordered=ordered, layer=0) for ordered in (True, False))
        assert sum(in_order.values()) > sum(unordered.values()) > 2
    assert sum(launches.of(["delta"], ordered=False, layer=0).values()) == 2
    assert sum(launches.of(["delta"], ordered=False, layer=DELTA_LAYER).values()) == 7


def test_what_runs_side_by_side_is_laid_out_once_for_a_set(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[list[str]] = []

    def lay_out(own: Mapping[str, Selector]) -> list[list[str]]:
        laid_out.append(list(own))
        return lanes_of(own)

    monkeypatch.setattr(decode_module, "lanes_of", lay_out)
    for kinds in (("quest", "snapkv"), ("tactic",), ("snapkv", "quest")):
        for layer in range(LAYERS):
            launches.of(kinds, ordered=False, layer=layer)
    assert laid_out == [["quest", "snapkv"], ["tactic"]]


def selectors(server: SelectorServer) -> Mapping[str, Selector]:
    return selectors_of(MIXED, server)


VARIANTS = variants_of(MIXED, [GraphSet(frozenset({kind}), True) for kind in MIXED], LAYERS, (DELTA_LAYER,))


def run(names: Sequence[str], device: torch.device) -> tuple[str, list[Tensor], Tensor]:
    """The label of the batch, the outputs of each step and layer, and the statistics of each row."""
    server = Server(names, LENGTHS, device)
    decode = device_decode(server, selectors)
    label = variant_for(decode.needed(server.states, server.lengths), VARIANTS)
    outputs = []
    for step in range(STEPS):
        outputs += on_device(server, decode, step, padding=1, variants=VARIANTS)
        server.grow()
    return label, outputs, server.statistics.rows[1 : len(names) + 1]


@pytest.fixture(scope="module")
def mixed(device: torch.device) -> tuple[list[Tensor], Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(crossover.ENVIRONMENT, "0")
        crossover.of_all_policies.cache_clear()
        label, outputs, statistics = run(NAMES, device)
    assert label == "all+early_termination"
    return outputs, statistics


@pytest.mark.parametrize(
    ("row", "label"),
    list(enumerate(("quest+early_termination", "snapkv", "lowbit_top_k", "tactic+early_termination", "delta"))),
)
def test_a_row_is_what_it_is_in_a_graph_of_its_kind(
    row: int, label: str, mixed: tuple[list[Tensor], Tensor], device: torch.device
) -> None:
    outputs, statistics = mixed
    alone = [name if number == row else "dense" for number, name in enumerate(NAMES)]
    own_label, expected_outputs, expected = run(alone, device)
    assert own_label == label
    assert torch.equal(statistics[row], expected[row])
    for output, wanted in zip(outputs, expected_outputs, strict=True):
        assert torch.equal(output[row], wanted[row])
