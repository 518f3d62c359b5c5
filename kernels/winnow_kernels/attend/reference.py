"""Attention over a selection: the second half of every decode policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE, Termination, deal, tiles_read
from winnow_kernels.attend.gather import Meter, Reading, gather_keys_and_values, peek_keys_and_values
from winnow_kernels.cache import LayerCache
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import capped


@dataclass(frozen=True)
class Attended:
    """The result of attending.

    Attributes:
        output: [requests, query heads, head dim], in the queries' dtype.
        log_sum_exp: float32 [requests, query heads], natural logarithm, of the scaled scores that were read, without
            sinks.
        read: int64 [requests, KV heads]; tokens read, less than selected where reading stopped early.
    """

    output: Tensor
    log_sum_exp: Tensor
    read: Tensor


def attend(
    queries: Tensor,
    cache: LayerCache,
    selection: Selection,
    scale: float,
    meter: Meter,
    termination: Termination | None = None,
) -> Attended:
    """Attend to a selection. A group's query heads share one read of each token.

    Args:
        queries: [requests, query heads, head dim]; query heads of a KV head lie next to each other.
        cache: the layer's KV cache, and its softmax's cap and sink logits.
        selection: what each KV head reads, in order.
        scale: what scores are multiplied by before the softmax.
        meter: counts what was read.
        termination: when to stop reading before the selection's end.
    """
    if termination is not None:
        return _attend_until_settled(queries, cache, selection, scale, meter, termination)
    grouped = group(queries, cache.kv_heads)
    keys, values = gather_keys_and_values(cache, selection, meter)
    scores = _scores(grouped, keys, selection, scale, cache.softmax.cap)
    log_sum_exp = scores.logsumexp(-1)
    output = scores.sub_(log_sum_exp[..., None]).exp_() @ values.to(grouped.dtype)
    meter.note_reading(Reading(selection))
    return _attended(queries, output, log_sum_exp, selection.counts, cache, meter)


def group(queries: Tensor, kv_heads: int) -> Tensor:
    """Return ``queries``, [requests, query heads, head dim], as float32 [requests, KV heads, group, head dim]."""
    return queries.float().unflatten(1, (kv_heads, -1))


def _attended(
    queries: Tensor, output: Tensor, log_sum_exp: Tensor, read: Tensor, cache: LayerCache, meter: Meter
) -> Attended:
    """Return what was come to, given outputs over tokens, [requests, KV heads, group, head dim], and their mass."""
    mass = log_sum_exp.flatten(1)
    meter.note_mass(mass)
    return Attended(cache.softmax.with_sinks(output.flatten(1, 2), mass).to(queries.dtype), mass, read)


def _scores(grouped: Tensor, keys: Tensor, selection: Selection, scale: float, cap: float | None) -> Tensor:
    """Return the scaled scores, float32 [requests, KV heads, group, width]; -inf beyond the selection."""
    scores = capped((grouped @ keys.to(grouped.dtype).mT) * scale, cap)
    return scores.masked_fill_(~selection.filled[:, :, None], -torch.inf)


def _attend_until_settled(
    queries: Tensor, cache: LayerCache, selection: Selection, scale: float, meter: Meter, termination: Termination
) -> Attended:
    # The definition looks at every tile to know which a kernel would have read, and uses and counts only those.
    selection = selection.padded_to(TILE)
    grouped = group(queries, cache.kv_heads)
    keys, values = peek_keys_and_values(cache, selection)
    scores = _scores(grouped, keys, selection, scale, cache.softmax.cap).unflatten(-1, (-1, TILE))
    # A tile beyond the selection weighs nothing; finite, so that differences of two such stay numbers.
    tile_mass = scores.logsumexp(-1).clamp_min(torch.finfo(scores.dtype).min / 4)
    tile_weights = (scores - tile_mass[..., None]).exp().transpose(2, 3)
    tile_outputs = tile_weights @ values.to(grouped.dtype).unflatten(2, (-1, TILE))

    dealt = deal(selection.counts, tiles=scores.shape[3])
    mass = dealt.take(tile_mass.transpose(2, 3))
    running_mass = mass.logcumsumexp(-2)
    outputs = dealt.take(tile_outputs.flatten(-2)).unflatten(-1, tile_outputs.shape[-2:])
    running = _running_outputs(mass, running_mass, outputs)

    read = tiles_read(_with_sinks(running, running_mass, cache), dealt.counts, termination)
    if selection.to_the_end is not None:
        read = dealt.counts.where(selection.to_the_end[..., None], read)
    last = (read - 1).clamp_min(0)[..., None, None]
    split_mass = running_mass.take_along_dim(last, 3).squeeze(3).masked_fill((read == 0)[..., None], -torch.inf)
    split_output = running.take_along_dim(last[..., None], 3).squeeze(3)
    log_sum_exp = split_mass.logsumexp(2)
    output = ((split_mass - log_sum_exp[:, :, None]).exp()[..., None] * split_output).sum(2)
    meter.note_reading(Reading(selection, dealt, read))

    tokens = dealt.tokens(read, selection.counts)
    meter.count_attended(tokens.sum(1), cache)
    meter.count_termination(termination, dealt.counts.sum(2), read.sum(2), selection.to_the_end)
    return _attended(queries, output, log_sum_exp, tokens, cache, meter)


def _with_sinks(running: Tensor, running_mass: Tensor, cache: LayerCache) -> Tensor:
    """Return running outputs of splits, each with the whole sink: what they would be if they were all there is."""
    # [requests, KV heads, splits, tiles, group] has query heads in two dimensions.
    of_heads = running_mass.movedim(1, -2).flatten(-2)
    kept = cache.softmax.kept_by_sinks(of_heads)
    return running if kept is None else running * kept.unflatten(-1, (cache.kv_heads, -1)).movedim(-2, 1)[..., None]


def _running_outputs(mass: Tensor, running_mass: Tensor, outputs: Tensor) -> Tensor:
    """Return the normalised output after each tile.

    Args:
        mass: [..., tiles, group]; log-sum-exp of each tile.
        running_mass: the same, of the tiles up to each.
        outputs: [..., tiles, group, head dim]; normalised output of each tile.
    """
    weights = (mass.transpose(-1, -2)[..., None, :] - running_mass.transpose(-1, -2)[..., None]).tril()
    weights = weights.exp().tril()
    return (weights @ outputs.transpose(-2, -3)).transpose(-2, -3)
