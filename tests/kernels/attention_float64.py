"""Attention over lists of tokens, one request and head at a time, in float64: what the references are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.early_termination import EarlyTermination


@dataclass(frozen=True)
class HeadOutput:
    outputs: Tensor  # [group, head dim]
    log_sum_exp: Tensor  # [group]
    read: int
    tiles: int
    tiles_read: int
    margin: float
    """How near what was compared came to its threshold; less than float32 rounds may be judged either way."""


def attend_head(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    cap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [group, head dim] and the tokens' log-sum-exps [group]; ``sink_logits`` are [group]."""
    scores = scores_of_head(queries, keys, scale, cap)
    logits = scores
    if sink_logits is not None:
        # One more token, of which the value is nothing.
        logits = torch.cat((scores, sink_logits.double()[:, None]), 1)
    return logits.softmax(-1)[:, : len(keys)] @ values.double(), scores.logsumexp(-1)


def scores_of_head(queries: Tensor, keys: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return what the softmax is taken of: float64 [queries, tokens]."""
    scores = queries.double() @ keys.double().T * scale
    return scores if cap is None else cap * torch.tanh(scores / cap)


def attend_head_until_settled(
    queries: Tensor, cache: LayerCache, head: int, slots: list[int], scale: float, thresholds: EarlyTermination | None
) -> HeadOutput:
    """Read ``slots`` tile by tile in the splits that the definition names, each until its output has settled."""
    tiles = [slots[i : i + 64] for i in range(0, len(slots), 64)]
    splits = min(16, max(1, math.ceil(len(tiles) / 16)))
    group, cap, sinks = len(queries), cache.softmax.cap, cache.softmax.sink_logits
    sink_logits = None if sinks is None else sinks[head * group : (head + 1) * group]
    parts, read, tiles_read, margin = [], 0, 0, math.inf
    for split in range(splits):
        seen: list[int] = []
        calm, before = 0, None
        for tile in tiles[split::splits]:
            seen += tile
            tiles_read += 1
            vectors = cache.keys[seen, head], cache.values[seen, head]
            output, mass = attend_head(queries, *vectors, scale, cap)
            with_sink, _ = attend_head(queries, *vectors, scale, cap, sink_logits)
            dims = output.shape[1]
            probe = with_sink[:, sorted({i * dims // 32 for i in range(32)})]
            if thresholds and before is not None:
                slack = [_slack(b, a, thresholds) for b, a in zip(before, probe, strict=True)]
                margin = min(margin, *(abs(x) for pair in slack for x in pair))
                calm = calm + 1 if all(x >= 0 for pair in slack for x in pair) else 0
                if calm >= thresholds.patience:
                    break
            before = probe
        if seen:
            parts.append((output, mass))
        read += len(seen)
    masses = torch.stack([mass for _, mass in parts])
    total = masses.logsumexp(0)
    outputs = torch.stack([(mass - total).exp()[:, None] * output for output, mass in parts]).sum(0)
    if sink_logits is not None:
        outputs *= (1 / (1 + (sink_logits.double() - total).exp()))[:, None]
    return HeadOutput(outputs, total, read, len(tiles), tiles_read, margin)


def _slack(before: Tensor, after: Tensor, thresholds: EarlyTermination) -> tuple[float, float]:
    """How far below its threshold the change of the norm, relative to it, and that of the direction are."""
    norms = float(before.norm()), float(after.norm())
    cosine = float(before @ after) / (norms[0] * norms[1])
    return thresholds.scale - abs(norms[1] - norms[0]) / norms[0], thresholds.direction - (1 - cosine)
