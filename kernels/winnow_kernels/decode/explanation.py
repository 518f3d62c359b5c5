"""Explaining decode steps: which tokens were attended to, and what dense attention would have given each.

The weights are of the same queries and the same KV cache, in float32, as an audit's. They change nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter, Reading
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.contract.explanation import Explain
from winnow_kernels.decode.audit import AuditedMeter
from winnow_kernels.softmax import capped


def exact_weights(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float, heads: Sequence[int]) -> Tensor:
    """Return what dense attention gives each token: float32 [heads, tokens], means over the query heads of a KV head.

    What a sink takes is in none of them (``winnow_kernels.softmax``).

    Args:
        queries: [query heads, head dim].
        slots: int64 [tokens].
        cache: the layer's KV cache.
        scale: what scores are multiplied by before the softmax.
        heads: KV heads, by number.
    """
    chosen = list(heads)
    keys = cache.keys[slots][:, chosen].float().transpose(0, 1)
    grouped = queries.float().unflatten(0, (cache.kv_heads, -1))[chosen]
    return capped((grouped @ keys.mT) * scale, cache.softmax.cap).softmax(-1).mean(1)


class ExplainedMeter(AuditedMeter):
    """A meter that keeps what the last layer has read.

    Attributes:
        readings: of each row that has not attended to all, what was read, and the row's number there.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        super().__init__(requests, device)
        self.readings: dict[int, tuple[Reading, int]] = {}

    def note_reading(self, reading: Reading) -> None:
        self.readings = {row: (reading, row) for row in range(len(self.attended))}

    def of_rows(self, rows: int) -> ExplainedMeter:
        return ExplainedMeter(rows, self.attended.device)

    def add(self, part: Meter, rows: list[int]) -> None:
        super().add(part, rows)
        if isinstance(part, ExplainedMeter):
            self.readings |= {rows[row]: noted for row, noted in part.readings.items()}

    def take_readings(self) -> dict[int, tuple[Reading, int]]:
        """Return what the last layer has read, by row, and forget it."""
        readings, self.readings = self.readings, {}
        return readings


@dataclass(frozen=True, eq=False)
class ExplainedLayer:
    """One layer of one decode step.

    Attributes:
        weights: float32 [heads, tokens], what dense attention gives each token of the context.
        attended: bool [heads, tokens], whether the step attended to it.
    """

    weights: Tensor
    attended: Tensor


@dataclass(eq=False)
class Explanation:
    """What is explained of a request, and what has been found.

    Attributes:
        asked: by the request.
        found: by decode step and layer.
        dense: the steps that read everything, whatever the policy.
    """

    asked: Explain
    found: defaultdict[int, dict[int, ExplainedLayer]] = field(default_factory=lambda: defaultdict(dict))
    dense: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class ExplainedRow:
    """A row of a batch whose step is explained.

    Attributes:
        row: its number.
        layers: that are explained.
        heads: KV heads that are.
        found: where it is put, by layer.
    """

    row: int
    layers: Sequence[int]
    heads: Sequence[int]
    found: dict[int, ExplainedLayer]


class StepExplanation:
    """The explanation of one decode step of some requests that share a policy.

    Args:
        rows: those that are explained.
        context: of all rows.
        meter: of the step.
    """

    def __init__(self, rows: Sequence[ExplainedRow], context: Context, meter: ExplainedMeter) -> None:
        self._rows = rows
        self._context = context
        self._meter = meter

    def add(self, layer: int, queries: Tensor, cache: LayerCache, scale: float) -> None:
        """Explain the layer that the step has just attended in; ``queries`` are [requests, query heads, head dim]."""
        readings = self._meter.take_readings()
        for explained in self._rows:
            if layer not in explained.layers:
                continue
            slots = self._context.slots[explained.row, : self._context.lengths[explained.row]]
            weights = exact_weights(queries[explained.row], slots, cache, scale, explained.heads)
            attended = torch.ones_like(weights, dtype=torch.bool)
            if explained.row in readings:
                reading, row = readings[explained.row]
                attended = torch.stack([torch.isin(slots, reading.slots(row, head)) for head in explained.heads])
            explained.found[layer] = ExplainedLayer(weights, attended)
