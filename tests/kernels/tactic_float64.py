"""Tactic's selection, one request and KV head at a time, in float64 and loops: what the reference is compared with.

It takes the clusters as given: for each, its centroid, its spread, which way its span's clusters spread, and the
positions of its members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SAMPLED = 512


@dataclass(frozen=True)
class Cluster:
    centroid: Array
    spread: float
    directions: Array
    members: list[int]


@dataclass(frozen=True)
class Expected:
    positions: list[int]
    held: list[float]  # logarithm of the mass that is predicted to be selected, of each query head
    rest: list[float]  # of all other mass
    sampled: int
    capped: bool


def _mixed(cluster: int, kv_head: int, length: int) -> tuple[float, int]:
    """Two numbers that look random: from 0 to below 1, and from 0 to below 2^16."""
    number = (cluster * 0x9E3779B1 ^ kv_head * 0x85EBCA6B ^ length * 0xC2B2AE35) % 2**32
    number = (number ^ number >> 15) * 0x2C1B3C6D % 2**32
    number = (number ^ number >> 12) * 0x297A2D39 % 2**32
    number ^= number >> 15
    return (number >> 8) / 2**24, number * 0x9E3779B1 % 2**32 >> 16


def scores_of(queries: Array, keys: Array, scale: float, soft_cap: float | None) -> Array:
    """What the softmax is taken of."""
    scores = queries @ keys.T * scale
    capped: Array = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    return capped


def predicted_scores(
    query: Array, clusters: Sequence[Cluster], scale: float, soft_cap: float | None = None
) -> list[float]:
    """To base 2; what a cluster without members has means nothing."""
    means = [float(scores_of(query, cluster.centroid, scale, soft_cap)) for cluster in clusters]
    variances = [cluster.spread * scale**2 * float(query**2 @ cluster.directions) / len(query) for cluster in clusters]
    if soft_cap is not None:
        variances = [v * (1 - (mean / soft_cap) ** 2) ** 2 for v, mean in zip(variances, means, strict=True)]
    found = []
    for number, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        neighbours = range(number // 64 * 64, min(number // 64 * 64 + 64, len(clusters)))
        bound = max(
            (means[c] + 2.7 * math.sqrt(variances[c]) for c in neighbours if clusters[c].members),
            default=-math.inf,
        )
        reached = min(max(bound - mean, 0.0), variance)
        score = mean + (reached - reached**2 / (2 * variance) if variance else 0.0)
        found.append((score if soft_cap is None else min(score, soft_cap)) / math.log(2))
    return found


def share_step(share: float) -> int:
    """In which of the steps 0 … 63 a share of all mass is."""
    return min(max(math.floor(4 * (-math.log2(share) - 2)), 0), 63) if share else 63


def select(
    queries: Array,
    keys: Array,
    clusters: Sequence[Cluster],
    scale: float,
    p: float,
    cap: int | None,
    sinks: int,
    kv_head: int,
    in_order: bool,
    soft_cap: float | None = None,
) -> Expected:
    """What one KV head attends to; ``queries`` are its group's, [group, head dim], ``keys`` the context's."""
    length = len(keys)
    exact = scores_of(queries, keys, scale, soft_cap) / math.log(2)
    clustered = {member for cluster in clusters for member in cluster.members}
    firsts = list(range(min(sinks, length)))
    newest = [position for position in reversed(range(length)) if position not in clustered and position >= sinks]
    kept = firsts + newest
    limit = cap or length
    everything = Expected(list(reversed(range(length))), [], [], 0, False)
    if min(len(kept), limit) > 0.75 * length:
        return everything
    filled = [number for number, cluster in enumerate(clusters) if cluster.members]
    levels, shares, kept_shares, totals = [], [], [], []
    for query, scores in zip(queries, exact, strict=True):
        predicted = predicted_scores(query, clusters, scale, soft_cap)
        own = {c: round(8 * predicted[c]) for c in filled}
        masses = [2.0 ** scores[position] for position in kept]
        total = math.fsum([*masses, *(len(clusters[c].members) * 2.0 ** (own[c] / 8) for c in filled)])
        levels.append(own)
        share = {c: 2.0 ** (own[c] / 8) / total for c in filled}
        shares.append({c: value if value >= 2.0**-24 else 0.0 for c, value in share.items()})
        kept_shares.append(math.fsum(masses) / total)
        totals.append(math.log2(total))
    taken: set[int] = set()
    for own, share, of_kept in zip(levels, shares, kept_shares, strict=True):
        held = of_kept
        for level in sorted({own[c] if share[c] else -math.inf for c in filled}, reverse=True):
            if held >= p and p <= 0.999:
                break
            at_level = [c for c in filled if (own[c] if share[c] else -math.inf) == level]
            taken.update(at_level)
            held += math.fsum(share[c] * len(clusters[c].members) for c in at_level)
    means = {c: math.fsum(share[c] for share in shares) / len(shares) for c in filled}
    wanted = len(kept) + sum(len(clusters[c].members) for c in taken)
    if min(wanted, limit) > 0.75 * length:
        return everything
    listed = sorted(taken)
    steps = {c: share_step(means[c]) for c in taken}
    if in_order or wanted > limit:
        listed.sort(key=lambda c: steps[c])
    positions = (kept + [member for c in listed for member in clusters[c].members])[:limit]
    if in_order:
        order = {member: steps[c] for c in taken for member in clusters[c].members}
        for first in range(0, len(kept), 16):
            sixteen = kept[first : first + 16]
            of_sixteen = math.fsum(
                2.0 ** (scores[position] - total)
                for scores, total in zip(exact, totals, strict=True)
                for position in sixteen
            ) / (len(sixteen) * len(queries))
            order.update(dict.fromkeys(sixteen, share_step(of_sixteen)))
        positions.sort(key=lambda position: order[position])
    read = set(positions)
    out = [c for c in filled if c not in taken]
    samples: list[tuple[int, int, float]] = []
    for c in out:
        size = len(clusters[c].members)
        expected = min(means[c] * size * SAMPLED / (1 - min(p, 0.999)), size)
        chance, place = _mixed(c, kv_head, length)
        for number in range(math.floor(expected + chance)):
            member = clusters[c].members[((place * size >> 16) + number) % size]
            samples.append((c, member, size / expected))
    beliefs = []
    for share, scores, total, of_kept in zip(shares, exact, totals, kept_shares, strict=True):
        weighs = math.fsum(2.0 ** (scores[member] - total) * worth for _, member, worth in samples)
        was_predicted = math.fsum(share[c] * worth for c, _, worth in samples)
        lost = math.fsum(share[c] for c in taken for member in clusters[c].members if member not in read)
        lost += math.fsum(2.0 ** (scores[member] - total) for member in kept if member not in read)
        rest = math.fsum(share[c] * len(clusters[c].members) for c in out)
        rest = rest * (weighs / was_predicted if was_predicted else 1.0) + lost
        held = of_kept + math.fsum(share[c] * len(clusters[c].members) for c in taken) - lost
        beliefs.append((total + math.log2(held), total + math.log2(rest) if rest > 0 else -math.inf))
    selected, others = zip(*beliefs, strict=True)
    return Expected(positions, list(selected), list(others), len(samples), wanted > limit)


def reported_share(
    queries: Array, keys: Array, scale: float, expected: Expected, read: list[int], soft_cap: float | None = None
) -> float:
    """The share that is told, a mean over the query heads, where ``read`` of what is selected has been read."""
    if not expected.held:
        return 1.0
    shares = []
    for query, held, rest in zip(queries, expected.held, expected.rest, strict=True):
        mass = math.log2(math.fsum(np.exp(scores_of(query, keys[read], scale, soft_cap)).tolist()))
        selected = mass if len(read) == len(expected.positions) else max(held, mass)
        shares.append(1 / (2.0 ** (selected - mass) + 2.0 ** (rest - mass)))
    return sum(shares) / len(shares)
