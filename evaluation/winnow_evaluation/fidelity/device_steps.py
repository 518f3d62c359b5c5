"""Decode steps of one request as a server on CUDA takes them: attention in all layers, in a CUDA graph.

Policies have request slots of their own, whose pages are those of one prompt, and take turns. A step has the queries of
one token behind the prompt; its context stays that of the first. What a server does between the layers is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from sglang_winnow.crossover import acting_at_every_length
from sglang_winnow.device.decode import DeviceDecode, Variant
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE, PrefilledBatch
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.decode.gpu_selector import Server
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.decode.ranks import ALONE
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import LAYOUT, kinds_of, selectors_of
from winnow_kernels.policies.tactic.gpu.selection import selection_width

# A dense row runs Winnow's kernel where a step launches for a policy, and this one launches nothing in its layers.
_BESIDE_DENSE: Final = "streaming_llm"
# The host has launched a step's graph by then.
_AHEAD_CYCLES: Final = 400_000


class DeviceSteps:
    """The decode steps of policies behind one prompt.

    Attributes:
        outputs: of each layer with full attention in the last step, [1, query heads, head dim].
    """

    def __init__(self, batch: PrefilledBatch, policies: Sequence[AttentionPolicy], queries: Sequence[Tensor]) -> None:
        """
        Args:
            batch: of one prompt, with the keys and values of what follows it.
            policies: that act; those that are dense attend by Winnow's kernel.
            queries: of each layer with full attention, [1, tokens, query heads, head dim]: those of the tokens behind
                the prompt.
        """
        model, device = batch.model, batch.model.device
        caches = [batch.caches[layer] for layer in model.full_layers]
        _, tokens, query_heads, _ = queries[0].shape
        self._tokens = tokens
        self._length = batch.lengths[0] + 1
        self._every_query = queries
        self._queries = [of_layer[:, 0].clone() for of_layer in queries]
        self.outputs = [torch.empty_like(of_layer) for of_layer in self._queries]
        self._states = [batch.state_on_device(0, policy) for policy in policies]
        # Slot 0 is that of padding.
        slots = len(policies) + 1
        table = torch.zeros(slots, batch.slots.shape[1], dtype=torch.int32, device=device)
        table[1:] = batch.slots[0]
        kinds = kinds_of({policy.decode.policy for policy in policies} | {_BESIDE_DENSE})
        attend_buffers = AttendBuffers.empty(1, query_heads, caches[0])
        longest = table.shape[1]
        buffers = StepBuffers(
            LAYOUT, 1, longest, PAGE_SIZE, len(caches), query_heads, model.kv_heads, selection_width(longest), device
        )
        indexes = Indexes(caches, PAGE_SIZE, device)
        server = Server(caches, batch.scale, query_heads, indexes, attend_buffers, slots, buffers.largest, ALONE)
        self._decode = DeviceDecode(
            caches, batch.scale, table, buffers, attend_buffers, selectors_of(kinds, server), Statistics(slots, device)
        )

    def prepare(self, number: int, step: int) -> None:
        """Prepare a policy's step, outside of its graph; steps beyond the tokens begin with the first again.

        Args:
            number: of the policy.
            step: from 0 on.
        """
        for own, of_layer in zip(self._queries, self._every_query, strict=True):
            own.copy_(of_layer[:, step % self._tokens])
        state, device = self._states[number], self._queries[0].device
        with acting_at_every_length():
            needed = self._decode.needed([state], [self._length])
            variant = Variant(needed.kinds or frozenset({_BESIDE_DENSE}), needed.ordered, needed.own_layers)
            request_slots = torch.tensor([number + 1], device=device)
            lengths = torch.tensor([self._length], dtype=torch.int32, device=device)
            self._decode.prepare(variant, [state], [number + 1], [self._length], request_slots, lengths)

    def run(self) -> None:
        """Take the step that was prepared last."""
        self._decode.begin()
        for place, (queries, output) in enumerate(zip(self._queries, self.outputs, strict=True)):
            self._decode.attend(place, queries, output)
        self._decode.finish()


def time_steps(
    batch: PrefilledBatch, policies: Sequence[AttentionPolicy], queries: Sequence[Tensor], steps: int
) -> list[list[float]]:
    """Time the decode steps of policies on a GPU: attention in all layers, nothing else.

    Policies take turns, and another one begins each step.

    Args:
        batch: as for ``DeviceSteps``.
        policies: as for ``DeviceSteps``.
        queries: as for ``DeviceSteps``.
        steps: how many.

    Returns:
        Of each policy the seconds of each step.
    """
    own = DeviceSteps(batch, policies, queries)
    replays = [_captured(own, number) for number in range(len(policies))]
    seconds: list[list[float]] = [[] for _ in policies]
    for step in range(steps):
        for place in range(len(policies)):
            number = (place + step) % len(policies)
            own.prepare(number, step)
            seconds[number].append(_seconds(replays[number]))
    return seconds


def _captured(steps: DeviceSteps, number: int) -> Callable[[], None]:
    # The first step enters the request and builds indexes; kernels are compiled outside of graphs.
    for step in range(2):
        steps.prepare(number, step)
        steps.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.run()
    return graph.replay


def _seconds(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD_CYCLES)  # noqa: SLF001  # As torch's own benchmarks do.
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
