"""Auditing decode steps: what a sparse step attended to, and came to, beside dense attention with the same queries.

The dense side is computed from the KV cache as it is, in float32, and changes nothing. It says what one step lost in
one layer: its queries, and the cache, are those of a sequence whose earlier tokens were attended to sparsely. What the
step lost by its end, over all layers, tells a dense pass of the same token behind the same cache: by the distributions
of the next token (``next_token_divergence``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.softmax import capped


def is_audited(step: int, share: float) -> bool:
    """Return whether a decode step is among the ``share`` that is audited, as evenly spaced as can be.

    Args:
        step: its number, counted from anywhere.
        share: from 0 to 1.
    """
    numerator, denominator = share.as_integer_ratio()
    return step * numerator // denominator > (step - 1) * numerator // denominator


def exact_attention(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to a whole context.

    Args:
        queries: [query heads, head dim].
        slots: int64 [tokens].
        cache: the layer's KV cache.
        scale: what scores are multiplied by before the softmax.

    Returns:
        The output, float32 [query heads, head dim], and the log-sum-exp of the tokens' scores, without sinks, float32
        [query heads].
    """
    keys, values = (pool[slots].float().transpose(0, 1) for pool in (cache.keys, cache.values))
    scores = capped((queries.float().unflatten(0, (cache.kv_heads, -1)) @ keys.mT) * scale, cache.softmax.cap)
    mass = scores.logsumexp(-1).flatten()
    return cache.softmax.with_sinks((scores.softmax(-1) @ values).flatten(0, 1), mass), mass


def next_token_divergence(dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two distributions of the next token, in float64.

    Args:
        dense: logits of dense attention, as the model returns them, [rows, vocabulary].
        sparse: those of sparse steps, the same shape.

    Returns:
        KL(dense ‖ sparse) in nats, float64 [rows], and whether the most probable token is the same, bool [rows].
    """
    of_dense, of_sparse = dense.double().log_softmax(-1), sparse.double().log_softmax(-1)
    # What dense attention excludes counts nothing, whatever the step makes of it.
    terms = (of_dense.exp() * (of_dense - of_sparse)).masked_fill(of_dense == -math.inf, 0)
    # Rounding may make of two distributions that are the same less than nothing.
    return terms.sum(-1).clamp_min(0), dense.argmax(-1) == sparse.argmax(-1)


class AuditedMeter(Meter):
    """A meter that keeps what the last layer's attended tokens weigh.

    Attributes:
        mass: log-sum-exp of their scores, float32 [requests, query heads], infinite of requests that attended to all;
            None if all of them did.
    """

    mass: Tensor | None = None

    def note_mass(self, log_sum_exp: Tensor) -> None:
        self.mass = log_sum_exp

    def of_rows(self, rows: int) -> AuditedMeter:
        return AuditedMeter(rows, self.attended.device)

    def add(self, part: Meter, rows: list[int]) -> None:
        super().add(part, rows)
        if isinstance(part, AuditedMeter) and part.mass is not None:
            if self.mass is None:
                self.mass = part.mass.new_full((len(self.attended), part.mass.shape[1]), torch.inf)
            self.mass[rows] = part.mass


@dataclass(frozen=True)
class AuditedRow:
    """A row of a batch whose step is audited.

    Attributes:
        row: its number.
        p: the share of the attention that its policy promises each query head; None if it promises none.
    """

    row: int
    p: float | None


class Audit:
    """The audit of one decode step of some requests that share a policy.

    Args:
        rows: those that are audited.
        context: of all rows.
        meter: of the step.
    """

    def __init__(self, rows: Sequence[AuditedRow], context: Context, meter: AuditedMeter) -> None:
        self._rows = rows
        self._context = context
        self._meter = meter
        # Of each row: query heads of all layers, and over them sums of shares, of errors, and of those that reach p.
        self._sums = torch.zeros(len(rows), 4, dtype=torch.float64, device=context.device)

    def add(self, queries: Tensor, output: Tensor, cache: LayerCache, scale: float) -> None:
        """Audit the layer that the step has just attended in.

        Args:
            queries: [requests, query heads, head dim].
            output: what the step came to, the same shape.
            cache: the layer's KV cache.
            scale: what scores are multiplied by before the softmax.
        """
        mass, self._meter.mass = self._meter.mass, None
        for sums, audited in zip(self._sums, self._rows, strict=True):
            slots = self._context.slots[audited.row, : self._context.lengths[audited.row]]
            exact, all_mass = exact_attention(queries[audited.row], slots, cache, scale)
            # Rounding may make a part more than the whole.
            shares = torch.ones_like(all_mass) if mass is None else (mass[audited.row] - all_mass).exp().clamp_max(1)
            lost = torch.linalg.vector_norm(output[audited.row].float() - exact, dim=-1)
            sums[0] += len(shares)
            sums[1] += shares.double().sum()
            sums[2] += (lost / torch.linalg.vector_norm(exact, dim=-1)).double().sum()
            sums[3] += 0 if audited.p is None else int((shares >= audited.p).sum())

    def count(self, statistics: Statistics, table_rows: Tensor) -> None:
        """Add the audited rows' sums to the statistics; ``table_rows`` are those of all rows, int64 [requests]."""
        own = table_rows[[audited.row for audited in self._rows]]
        statistics.add(own, Field.AUDITED_STEPS, 1.0)
        fields = (Field.AUDITED_HEADS, Field.AUDITED_SHARE, Field.AUDITED_ERROR, Field.AUDITED_REACHED)
        for column, field in enumerate(fields):
            statistics.add(own, field, self._sums[:, column])
