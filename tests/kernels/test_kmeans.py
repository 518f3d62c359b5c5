"""Batched K-means: against Lloyd's algorithm in plain loops, and whatever it is batched with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from winnow_kernels.indexes.kmeans import drawn_behind, drawn_members, kmeans


def _keys(problems: int, count: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(problems, count, dim, generator=torch.Generator().manual_seed(seed))


def _lloyd(keys: Tensor, clusters: int, iterations: int, seed: int) -> tuple[list[int], Tensor]:
    drawn = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))[:clusters].sort().values
    points, centroids = keys.double(), keys[drawn].double()
    labels = [int((centroids - point).square().sum(1).argmin()) for point in points]
    for iteration in range(iterations):
        for cluster in range(clusters):
            members = [point for point, label in zip(points, labels, strict=True) if label == cluster]
            if members:
                centroids[cluster] = torch.stack(members).mean(0)
        if iteration < iterations - 1:
            labels = [int((centroids - point).square().sum(1).argmin()) for point in points]
    return labels, centroids


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_equals_lloyds_algorithm(iterations: int) -> None:
    keys = _keys(3, 96, 8)
    labels, centroids = kmeans(keys, 6, iterations=iterations, seed=5)
    for problem in range(3):
        expected_labels, expected_centroids = _lloyd(keys[problem], 6, iterations, seed=5)
        assert labels[problem].tolist() == expected_labels
        torch.testing.assert_close(centroids[problem].double(), expected_centroids, atol=1e-5, rtol=1e-5)


def test_a_problem_does_not_depend_on_its_neighbours() -> None:
    keys = _keys(7, 256, 16)
    keys[2] = torch.arange(256)[:, None] // 64 * 10.0  # settles at once, while the others go on
    labels, centroids = kmeans(keys, 16)
    for problem in range(7):
        alone_labels, alone_centroids = kmeans(keys[problem : problem + 1], 16)
        assert torch.equal(labels[problem], alone_labels[0])
        torch.testing.assert_close(centroids[problem], alone_centroids[0], atol=1e-6, rtol=1e-6)


def test_centroids_are_the_means_of_their_members_and_cost_falls() -> None:
    keys = _keys(2, 512, 32)
    costs = []
    for iterations in (1, 2, 5, 10):
        labels, centroids = kmeans(keys, 32, iterations=iterations)
        for cluster in range(32):
            of_cluster = keys[1][labels[1] == cluster]
            torch.testing.assert_close(centroids[1, cluster], of_cluster.mean(0), atol=1e-5, rtol=1e-5)
        of_each = centroids.gather(1, labels[..., None].expand(-1, -1, 32))
        costs.append(float((keys - of_each).square().sum()))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.98 * costs[0]


def test_empty_clusters_have_no_members_and_no_nan() -> None:
    labels, centroids = kmeans(torch.ones(1, 64, 4), 4)
    assert len(labels.unique()) == 1
    assert centroids.isfinite().all()


def test_the_draw_decides() -> None:
    keys = _keys(1, 256, 8)
    first, again, other = (kmeans(keys, 16, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distances_are_those_to_the_centroids_that_are_returned(dtype: torch.dtype) -> None:
    """One more assignment, to what k iterations return, is what the next iteration labels by."""
    keys = (3 + _keys(4, 256, 16)).to(dtype)
    for iterations in (1, 4):
        _, centroids = kmeans(keys, 16, iterations=iterations)
        assert centroids.dtype == dtype
        distances = torch.cdist(keys.double(), centroids.double())
        labels, _ = kmeans(keys, 16, iterations=iterations + 1)
        nearest = distances.gather(2, labels[..., None])[..., 0]
        torch.testing.assert_close(nearest, distances.amin(2), atol=1e-5, rtol=0)


def test_drawn_members_are_the_first_centroids() -> None:
    drawn = drawn_members(64, 8)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    keys = torch.zeros(1, 64, 2)
    keys[0, drawn, 0] = torch.arange(8.0)
    keys[0, :, 1] = torch.arange(64.0) // 8 * 100
    labels, _ = kmeans(keys, 8, iterations=1)
    expected = torch.cdist(keys[0], keys[0, drawn]).argmin(1)
    assert torch.equal(labels[0], expected)


def test_first_centroids_lie_behind_what_is_left_out() -> None:
    assert torch.equal(drawn_behind(0, 64, 8), drawn_members(64, 8))
    drawn = drawn_behind(20, 64, 8)
    assert torch.equal(drawn, 20 + drawn_members(44, 8))
    assert drawn_behind(61, 64, 8).tolist() == [61, 62, 63, *[-1] * 5]


@pytest.mark.parametrize(("clusters", "iterations", "field"), [(0, 1, "clusters"), (9, 1, "clusters"), (2, 0, "iter")])
def test_bounds(clusters: int, iterations: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        kmeans(_keys(1, 8, 2), clusters, iterations=iterations)
