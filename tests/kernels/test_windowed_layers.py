"""Indexes of a model some of whose layers have a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache, scattered_context
from winnow_kernels.indexes.clusters import MIN_SPAN, ClusterIndex
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations

PAGE, SLOTS, DIM, LAYERS, WINDOWED = 16, 1024, 32, 3, 1


def cluster_index(caches: Any, generations: PageGenerations) -> ClusterIndex:
    return ClusterIndex(caches, generations, span=MIN_SPAN)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any, int], Tensor]]] = {
    "page bounds": (PageBounds, lambda index, layer: index.bounds[layer]),
    "key norms": (KeyNorms, lambda index, layer: index.reciprocals[layer]),
    "key codes": (KeyCodes, lambda index, layer: index.pieces[layer]),
    "clusters": (cluster_index, lambda index, layer: index._tables.centroids[layer]),
}


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_built_of_a_layer_with_a_window(name: str) -> None:
    make, entries = KINDS[name]
    caches = [random_cache(SLOTS, 2, DIM, seed=layer, dtype=torch.float16) for layer in range(LAYERS)]
    context = scattered_context([SLOTS // 2], SLOTS, PAGE, 0)
    own = [replace(cache, windowed=layer == WINDOWED) for layer, cache in enumerate(caches)]
    built = []
    for layers in (caches, own):
        index = make(layers, PageGenerations(SLOTS, PAGE, torch.device("cpu")))
        if isinstance(index, ClusterIndex):
            assert index.ensure(context, 0, SLOTS // 2)
        else:
            assert index.ensure(index.generations.complete_pages(context, 0, SLOTS // 2))
        built.append(index)
    for layer in range(LAYERS):
        everything, found = (entries(index, layer) for index in built)
        assert everything.any()
        assert torch.equal(found, torch.zeros_like(found) if layer == WINDOWED else everything)
