"""K-means over many small sets of keys at once (Tactic, section 3.2 and appendix C.2).

Distances are those to the centroids as they are stored: rounded to the keys' dtype. Of keys in half precision every
product is then exact in float32, so that on tensor cores, too, only the order of additions can make a difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLUSTER_SIZE = 16
"""Average number of keys in a cluster (section 3.2)."""
ITERATIONS = 10
_SEED = 0


def kmeans(keys: Tensor, clusters: int, iterations: int = ITERATIONS, seed: int = _SEED) -> tuple[Tensor, Tensor]:
    """Cluster each problem's keys by Euclidean distance, by Lloyd's algorithm.

    The first centroids are ``clusters`` distinct members, drawn at random: at the same places in every problem, so that
    the same keys give the same clusters whatever they are batched with.

    Args:
        keys: float [problems, keys, head dim].
        clusters: at most the number of keys.
        iterations: at most so many; a problem whose labels have settled no longer changes.
        seed: of the draw.

    Returns:
        Labels, int64 [problems, keys], and centroids, of the keys' dtype [problems, clusters, head dim]: the means of
        their members; a cluster that has lost all its members stays where it last was.

    Raises:
        ValueError: ``clusters`` or ``iterations`` is out of bounds.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
    dtype = keys.dtype
    centroids = keys[:, drawn_members(keys.shape[1], clusters, seed).to(keys.device)]
    keys = keys.float()
    labels = _nearest(keys, centroids.float())
    for iteration in range(1, iterations + 1):
        sums, sizes = _sums(keys, labels, clusters)
        centroids = torch.where(sizes > 0, (sums / sizes.clamp_min(1)).to(dtype), centroids)
        if iteration == iterations:
            break
        moved = _nearest(keys, centroids.float())
        if torch.equal(moved, labels):
            break
        labels = moved
    return labels, centroids


def spreads(keys: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far clusters' members lie from their centroid, and in which directions.

    Args:
        keys: of ``kmeans``.
        labels: its result.
        centroids: its result.

    Returns:
        Mean squared distances, float32 [problems, clusters], 0 for a cluster without members; and what part of them
        each element makes in all clusters of a problem together, float32 [problems, head dim], 1 on average.
    """
    of_keys = centroids.gather(1, labels[..., None].expand(-1, -1, keys.shape[2]))
    squares = (keys.float() - of_keys.float()).square_()
    distances = squares.sum(-1)
    sums = distances.new_zeros(labels.shape[0], centroids.shape[1]).scatter_add_(1, labels, distances)
    sizes = torch.zeros_like(sums).scatter_add_(1, labels, torch.ones_like(distances))
    of_elements = squares.sum(1)
    means = of_elements.mean(-1, keepdim=True)
    return sums / sizes.clamp_min_(1), torch.where(means > 0, of_elements / means, 1.0)


def drawn_members(count: int, clusters: int, seed: int = _SEED) -> Tensor:
    """Return which of ``count`` keys are the first centroids, int64 [clusters], ascending.

    Raises:
        ValueError: there are more clusters than keys, or none.
    """
    if not 1 <= clusters <= count:
        raise ValueError(f"clusters must lie between 1 and the number of keys, {count}, not {clusters}")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:clusters].sort().values


def drawn_behind(left_out: int, count: int, clusters: int, seed: int = _SEED) -> Tensor:
    """Return which of ``count`` keys are the first centroids if the first ``left_out`` are in no cluster.

    Args:
        left_out: at most ``count``.
        count: of keys.
        clusters: that there is space for.
        seed: of the draw.

    Returns:
        int64 [clusters], ascending; where fewer keys than clusters are left, -1 behind them.
    """
    if left_out == count:
        return torch.full((clusters,), -1)
    drawn = left_out + drawn_members(count - left_out, min(clusters, count - left_out), seed)
    return torch.nn.functional.pad(drawn, (0, clusters - len(drawn)), value=-1)


def _nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    half_norms = centroids.square().sum(-1)[:, None] / 2
    return torch.baddbmm(half_norms, keys, centroids.mT, alpha=-1).min(-1).indices


def _sums(keys: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Return clusters' sums of members, [problems, clusters, head dim], and their numbers, [problems, clusters, 1]."""
    problems, _, head_dim = keys.shape
    rows = (labels + torch.arange(problems, device=keys.device)[:, None] * clusters).flatten()
    sizes = torch.bincount(rows, minlength=problems * clusters).view(problems, clusters, 1)
    if keys.is_cuda:
        # Atomic additions come in any order, and a rounding error may move a label: the same keys, other clusters.
        members = labels[:, None] == torch.arange(clusters, device=keys.device)[:, None]
        return members.to(keys.dtype) @ keys, sizes
    sums = keys.new_zeros(problems * clusters, head_dim).index_add_(0, rows, keys.flatten(0, 1))
    return sums.view(problems, clusters, head_dim), sizes
