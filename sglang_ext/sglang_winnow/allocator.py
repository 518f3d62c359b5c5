"""A page allocator that needs no Triton, for platforms where Triton cannot launch kernels."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator with its two Triton launches expressed in torch.

    A KV slot is ``page * page_size + offset``; page 0 is SGLang's padding page and is never handed out. Both methods
    return one slot per new token, in request order, as int64 of shape ``[new tokens]``, or ``None`` (and take no
    page) when the free pages do not suffice.
    """

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Allocate tokens ``prefix_lens[i] .. seq_lens[i] - 1`` of every request ``i``.

        ``last_loc[i]`` is the slot of token ``prefix_lens[i] - 1``: the rest of its page is used before a new page is.
        """
        return self._alloc(prefix_lens_cpu, seq_lens_cpu, last_loc)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
    ) -> torch.Tensor | None:
        """Allocate token ``seq_lens[i] - 1`` of every request ``i``; ``last_loc[i]`` is the slot of the one before."""
        return self._alloc(seq_lens_cpu - 1, seq_lens_cpu, last_loc)

    def _alloc(self, starts: torch.Tensor, ends: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
        starts = starts.to(device=self.device, dtype=torch.int64)
        ends = ends.to(device=self.device, dtype=torch.int64)
        pages_before = self._pages(starts)
        new_pages = self._pages(ends) - pages_before
        needed = int(new_pages.sum())
        if self.need_sort and needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:needed], self.free_pages[needed:]

        lengths = ends - starts
        request = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), lengths)
        first_row = torch.cumsum(lengths, 0) - lengths
        position = torch.arange(len(request), device=self.device) - (first_row - starts)[request]
        page = position // self.page_size
        first_taken = torch.cumsum(new_pages, 0) - new_pages
        rank = page + (first_taken - pages_before)[request]

        continues = page < pages_before[request]
        slots = last_loc.to(device=self.device, dtype=torch.int64)[request] + 1 + position - starts[request]
        fresh = ~continues
        slots[fresh] = taken[rank[fresh]] * self.page_size + position[fresh] % self.page_size
        return slots

    def _pages(self, lengths: torch.Tensor) -> torch.Tensor:
        return (lengths + self.page_size - 1) // self.page_size
