"""Tactic's selection, one request and KV head at a time, in float64 and loops: what the reference is compared with.

It takes the clusters as given: for each, its centroid and the positions of its members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    positions: list[int]
    tokens: list[int]  # of each query head's list
    held: list[float]  # share that is believed to be selected, of each query head
    total: list[float]  # logarithm of what is believed to be all mass
    capped: bool


def fit(place1: float, weight1: float, place2: float, weight2: float) -> tuple[float, float]:
    if place1 >= place2 or weight1 <= weight2:
        return 0.0, (weight1 + weight2) / 2
    a = (weight1 - weight2) / (1 / place1 - 1 / place2)
    return a, weight1 - a / place1


def fitted_weights(exact: list[float], total: int, a: float, b: float) -> Array:
    """The weight of each token of a list, exact or from the curve."""
    return np.array([*exact, *(max(0.0, a / x + b) for x in range(len(exact) + 1, total + 1))])


def smallest_count(weights: Array, outside: float, p: float) -> int:
    """The smallest number of leading tokens that holds ``p`` of all mass together with ``outside``."""
    if p >= 1:
        return len(weights)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    return int(np.argmax(outside + sums >= p * (outside + sums[-1])))


def in_steps(score: float) -> float:
    """The score with 18 bits of a float32: cut off, not rounded."""
    fraction, exponent = math.frexp(float(np.float32(score)))
    return math.ldexp(math.trunc(fraction * 2**10) / 2**10, exponent)


def share_step(weight: float, total: float) -> int:
    """In which of the steps 0 … 63 a share of all mass is; both are logarithms."""
    octaves = (total - weight) / math.log(2)
    return min(max(math.floor(4 * (octaves - 2)), 0), 63)


def select(
    queries: Array,
    keys: Array,
    length: int,
    clusters: list[tuple[Array, list[int]]],
    scale: float,
    p: float,
    max_tokens: int | None,
    sinks: int = 0,
    in_order: bool = False,
) -> Expected:
    """``queries`` [group, head dim]; ``keys`` [length, head dim]; ``clusters`` in the order of their numbers."""
    newest_first = list(reversed(range(length)))
    clustered = {position for _, members in clusters for position in members}
    first = list(range(min(sinks, length)))
    kept = first + [position for position in newest_first if position not in clustered and position >= sinks]
    total = len(clustered)
    best: dict[int, int] = {}
    best_of_kept = [63] * len(kept)
    needed: dict[int, int] = {}
    per_head = []
    totals: list[float] = []
    for query in queries:
        cluster_scores = [in_steps(float(query @ centroid)) for centroid, _ in clusters]
        order = sorted(range(len(clusters)), key=lambda c: (-cluster_scores[c], c))
        scores = keys @ query * scale
        reference = scores.max()
        weights = np.exp(scores - reference)
        outside = float(sum(weights[kept]))
        unwrapped = [position for c in order for position in clusters[c][1]]
        quarter = order[: math.ceil(len(clusters) / 4)]
        known = min(math.ceil(total * 0.02), sum(len(clusters[c][1]) for c in quarter))
        window = min(4, len(clusters))
        points: list[tuple[float, float | None]] = []
        for start in _window_starts(len(clusters), window):
            before = sum(len(clusters[c][1]) for c in order[:start])
            of_window = [clusters[c][1] for c in order[start : start + window]]
            tokens = sum(len(members) for members in of_window)
            mass = sum(len(m) * float(np.mean(weights[m[:16]])) for m in of_window if m)
            points.append((before + (tokens + 1) / 2, mass / tokens if tokens else None))
        (place1, weight1), (place2, weight2) = points
        known_weights = [weight for weight in (weight1, weight2) if weight is not None] or [0.0]
        curve = fit(place1, known_weights[0], place2, known_weights[-1])
        near = [cluster_scores[c] * scale for c in order[_window_starts(len(clusters), window)[0] :][:window]]
        above_centroids = _log(curve[0] / place1 + curve[1]) - (float(np.mean(near)) if near else 0.0)
        fitted = fitted_weights([float(weights[i]) for i in unwrapped[:known]], total, *curve)
        count = smallest_count(fitted, outside, p)
        per_head.append((count, fitted, outside, [float(weights[i]) for i in kept], unwrapped))
        mass = outside + fitted.sum()
        totals.append(float(reference + math.log(mass)))
        for begin in range(0, len(kept), 16):
            mean = float(np.mean(weights[kept[begin : begin + 16]]))
            step = share_step(_log(mean), _log(mass))
            for place in range(begin, min(begin + 16, len(kept))):
                best_of_kept[place] = min(best_of_kept[place], step)
        start = 0
        taken_of: dict[int, int] = {}
        mean_of: dict[int, float] = {}
        for c in order:
            taken = min(len(clusters[c][1]), count - start)
            if taken > 0:
                taken_of[c] = taken
                of_known = weights[clusters[c][1][: max(0, known - start)]]
                of_centroid = cluster_scores[c] * scale + above_centroids
                mean_of[c] = _log(float(np.mean(of_known))) if len(of_known) else of_centroid
            start += len(clusters[c][1])
        for c, taken in taken_of.items():
            step = share_step(mean_of[c], _log(mass))
            best[c] = min(best.get(c, step), step)
            needed[c] = max(needed.get(c, 0), taken)
    order_of_all = sorted(needed, key=lambda c: (best[c], c))
    positions = kept + [position for c in order_of_all for position in clusters[c][1][: needed[c]]]
    capped = max_tokens is not None and len(positions) > max_tokens
    limit = max_tokens if max_tokens is not None else len(positions)
    attended = set(positions[:limit])
    if min(limit, len(positions)) > 0.75 * length:
        everything = [1.0] * len(per_head)
        return Expected(newest_first, [count for count, *_ in per_head], everything, totals, False)
    shares = []
    for count, fitted, outside, kept_weights, unwrapped in per_head:
        before_lost = next((place for place in range(count) if unwrapped[place] not in attended), count)
        held = sum(kept_weights[:limit]) + fitted[:before_lost].sum()
        shares.append(held / (outside + fitted.sum()))
    positions = positions[:limit]
    if in_order:
        of_clusters = {position: best[c] for c in order_of_all for position in clusters[c][1]}
        step_of = dict(zip(kept, best_of_kept, strict=True)) | of_clusters
        positions.sort(key=step_of.__getitem__)
    return Expected(positions, [count for count, *_ in per_head], shares, totals, capped)


def reported_share(queries: Array, keys: Array, scale: float, expected: Expected, read: list[int]) -> float:
    """What is told of a KV head that was to read what is ``expected`` and has read these positions: a mean."""
    shares = []
    for query, held, total in zip(queries, expected.held, expected.total, strict=True):
        mass = float(np.exp(keys[read] @ query * scale - total).sum())
        selected = mass if len(read) == len(expected.positions) else max(held, mass)
        shares.append(mass / (selected + 1 - held))
    return float(np.mean(shares))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _window_starts(clusters: int, window: int) -> tuple[int, int]:
    near = max(0, math.ceil(0.1 * clusters - window / 2))
    far_end = min(clusters, math.ceil(0.6 * clusters - window / 2) + window)
    return near, max(0, far_end - window)
