"""Why the hierarchical cache is refused: what comes back from the host passes by what tells indexes of new pages."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations, PageIndex

PAGE, SLOTS, HEADS, DIM = 16, 128, 2, 32


@pytest.mark.parametrize("kind", [KeyCodes, PageBounds])
def test_an_index_does_not_see_what_comes_back_from_the_host(kind: type[PageIndex]) -> None:
    pool = MHATokenToKVPool(SLOTS, PAGE, torch.float32, HEADS, DIM, 1, "cpu", enable_memory_saver=False)
    keys, values = pool.get_kv_buffer(0)
    keys.normal_(generator=torch.Generator().manual_seed(0))
    index = kind([LayerCache(keys, values)], PageGenerations(len(keys), PAGE, keys.device))
    # One request's page is kept on the host; then its place is another's.
    evicted, reused = torch.arange(PAGE, 2 * PAGE), torch.arange(2 * PAGE, 3 * PAGE)
    on_host = pool.get_cpu_copy(evicted)
    page = torch.tensor([2])
    assert index.ensure(page) == 1
    built = entries_of(index)

    pool.load_cpu_copy(on_host, reused)

    assert torch.equal(keys[reused], keys[evicted])
    # As if nothing had been written there, the index stands, and says of the page what it was.
    assert index.ensure(page) == 0
    assert all(torch.equal(one, other) for one, other in zip(entries_of(index), built, strict=True))
    index.build_layers(page)
    assert not all(torch.equal(one, other) for one, other in zip(entries_of(index), built, strict=True))


def entries_of(index: PageIndex) -> list[torch.Tensor]:
    """Return what an index holds of all pages."""
    if isinstance(index, KeyCodes):
        return [index.codes.clone(), index.factors.clone(), index.means.clone()]
    assert isinstance(index, PageBounds)
    return [index.bounds.clone()]
