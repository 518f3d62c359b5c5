"""Explaining decode steps that ran on a GPU (``decode.explanation``): which slots a row attended to in a layer.

Read from what the layer has left behind, before another one attends: this waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE, deal
from winnow_kernels.attend.gather import Reading
from winnow_kernels.attend.gpu_merge import Partial
from winnow_kernels.batch import ELSEWHERE, WHOLE, WHOLE_TO_THE_END
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.explanation import ExplainedLayer, ExplainedRow, exact_weights
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.selection.tokens import Selection


def attended_slots(
    row: int, head: int, slots: Tensor, step: Step, layer: int, partial: Partial, *, ordered: bool
) -> Tensor:
    """Return the slots that a KV head of a row has read in the layer that attended last, int64 [tokens].

    Args:
        row: its number.
        head: its number.
        slots: int64 [tokens], of the row's context by position.
        step: with the layer's selection.
        layer: its number.
        partial: what splits have left.
        ordered: whether rows may have stopped early.
    """
    count = int(step.counts[layer, row, head])
    # Who attends elsewhere attends to everything: DELTA at its Δ-layers.
    if count in (WHOLE_TO_THE_END, ELSEWHERE):
        return slots
    chosen = slots if count == WHOLE else step.slots[row, head, :count].long()
    if not (ordered and bool(step.parameters.thresholds[row, 2].isfinite())):
        return chosen
    if count == WHOLE:
        # Newest first.
        chosen = chosen.flip(0)
    tokens = torch.tensor([[len(chosen)]], device=slots.device)
    dealt = deal(tokens, tiles=-(-len(chosen) // TILE))
    tiles = partial.tiles_read[row, head, : dealt.counts.shape[2]].long()
    return Reading(Selection(chosen[None, None], tokens), dealt, tiles[None, None]).slots(0, 0)


def explain_layer(
    explained: ExplainedRow,
    slots: Tensor,
    attended: dict[int, Tensor] | None,
    queries: Tensor,
    cache: LayerCache,
    scale: float,
) -> ExplainedLayer:
    """Return the explanation of one row in one layer, on the host.

    Args:
        explained: the row.
        slots: int64 [tokens], of its context by position.
        attended: the slots that each of the KV heads has read; None if they have read all.
        queries: [rows, query heads, head dim].
        cache: the layer's KV cache.
        scale: what scores are multiplied by before the softmax.
    """
    weights = exact_weights(queries[explained.row], slots, cache, scale, explained.heads)
    if attended is None:
        return ExplainedLayer(weights.cpu(), torch.ones_like(weights, dtype=torch.bool).cpu())
    is_attended = torch.stack([torch.isin(slots, attended[head]) for head in explained.heads])
    return ExplainedLayer(weights.cpu(), is_attended.cpu())
