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
    share: float
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


def place_step(score: float, last_score: float, count: int, scale: float) -> int:
    """Where a query head that takes ``count`` tokens, the last with ``last_score``, has a cluster: in 0 … 63."""
    octaves = math.floor(4 * (score - last_score) * scale * math.log2(math.e))
    fraction, exponent = math.frexp(count)
    of_count = 4 * (exponent - 1) + math.floor(4 * (2 * fraction - 1))
    return min(max(of_count - 8 - octaves, 0), 63)


def select(
    queries: Array,
    keys: Array,
    length: int,
    clusters: list[tuple[Array, list[int]]],
    scale: float,
    p: float,
    max_tokens: int | None,
    sinks: int = 0,
) -> Expected:
    """``queries`` [group, head dim]; ``keys`` [length, head dim]; ``clusters`` in the order of their numbers."""
    newest_first = list(reversed(range(length)))
    clustered = {position for _, members in clusters for position in members}
    first = list(range(min(sinks, length)))
    kept = first + [position for position in newest_first if position not in clustered and position >= sinks]
    total = len(clustered)
    best: dict[int, int] = {}
    needed: dict[int, int] = {}
    per_head = []
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
        fitted = fitted_weights([float(weights[i]) for i in unwrapped[:known]], total, *curve)
        count = smallest_count(fitted, outside, p)
        per_head.append((count, fitted, outside, [float(weights[i]) for i in kept], unwrapped))
        start = 0
        taken_of: dict[int, int] = {}
        for c in order:
            taken = min(len(clusters[c][1]), count - start)
            if taken > 0:
                taken_of[c] = taken
            start += len(clusters[c][1])
        for c, taken in taken_of.items():
            step = place_step(cluster_scores[c], cluster_scores[list(taken_of)[-1]], count, scale)
            best[c] = min(best.get(c, step), step)
            needed[c] = max(needed.get(c, 0), taken)
    order_of_all = sorted(needed, key=lambda c: (best[c], c))
    positions = kept + [position for c in order_of_all for position in clusters[c][1][: needed[c]]]
    capped = max_tokens is not None and len(positions) > max_tokens
    limit = max_tokens if max_tokens is not None else len(positions)
    attended = set(positions[:limit])
    if min(limit, len(positions)) > 0.75 * length:
        return Expected(newest_first, [count for count, *_ in per_head], 1.0, False)
    shares = []
    for count, fitted, outside, kept_weights, unwrapped in per_head:
        before_lost = next((place for place in range(count) if unwrapped[place] not in attended), count)
        held = sum(kept_weights[:limit]) + fitted[:before_lost].sum()
        shares.append(held / (outside + fitted.sum()))
    front = min(len(first) + 64, limit, len(kept))
    ordered = positions[:front] + positions[len(kept) : limit] + positions[front : min(len(kept), limit)]
    return Expected(ordered, [count for count, *_ in per_head], float(np.mean(shares)), capped)


def _window_starts(clusters: int, window: int) -> tuple[int, int]:
    near = max(0, math.ceil(0.1 * clusters - window / 2))
    far_end = min(clusters, math.ceil(0.6 * clusters - window / 2) + window)
    return near, max(0, far_end - window)
