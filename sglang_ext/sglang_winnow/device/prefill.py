"""Prefill on the device: QUOKA's blocks of a pass in a few launches a layer, all else by SGLang's own backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_winnow.device.compile_ahead import compiling_ahead
from sglang_winnow.prefill_plan import Chunk, PrefillPlan
from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.fields import PAGE_TOKENS
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.prefill.attention import attend_blocks
from winnow_kernels.policies.quoka.prefill.cut import blocks_of
from winnow_kernels.policies.quoka.prefill.reads import reads_of
from winnow_kernels.policies.quoka.prefill.representatives import QUERIES_AT_ONCE
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillPass, QuokaPrefillWorkspace, select_blocks
from winnow_kernels.prefill.blocks import Block, PrefillBlocks, aligned

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DevicePrefill:
    """One pass.

    A request whose whole prompt is shorter than QUOKA's budget is dense: all blocks of another one are computed by the
    same kernels, dense ones too, so that where prefill chunks end changes nothing.

    Attributes:
        plan: of the pass, which counts.
        batch: the whole batch, of which SGLang's backend computes layers with a window; None in a pass without one.
        dense_batch: the requests that SGLang's backend computes in the layers with full attention; the whole batch if
            it computes all, None for none.
        dense_tokens: int64 [tokens], where theirs lie in the batch; None for all or none.
    """

    def __init__(
        self,
        plan: PrefillPlan,
        forward_batch: ForwardBatch | None,
        table: Tensor,
        page_size: int,
        caches: Sequence[LayerCache],
        workspace: QuokaPrefillWorkspace,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            plan: of the pass.
            forward_batch: of SGLang; None where all requests are sparse.
            table: int32 [request slots, positions]; the KV slot of each token of a request.
            page_size: slots in a page.
            caches: the KV cache of every layer with full attention.
            workspace: for contexts as long as the longest.
            dtype: of queries; None for the cache's.
        """
        self.plan = plan
        self.batch = forward_batch
        self._caches = caches
        sparse = [chunk for chunk in plan.chunks if _is_sparse(chunk)]
        self._is_sparse = bool(sparse)
        self.dense_batch: ForwardBatch | None = forward_batch
        self.dense_tokens: Tensor | None = None
        if not sparse:
            return
        self.dense_batch = None
        if dense := [chunk for chunk in plan.chunks if not _is_sparse(chunk)]:
            self.dense_tokens = _tokens_of(dense, table.device)
            self.dense_batch = _part_of(forward_batch, dense, self.dense_tokens)
        self._blocks_of = {chunk.number: _blocks_of(chunk, row) for row, chunk in enumerate(sparse)}
        slots = torch.cat([chunk.table_row for chunk in sparse])
        longest = max(chunk.end for chunk in sparse)
        used = -(-longest // page_size)
        pages = table.new_zeros(len(slots), aligned(used))
        torch.div(table[slots, :longest:page_size], page_size, rounding_mode="floor", out=pages[:, :used])
        blocks = [block for of_request in self._blocks_of.values() for block in of_request]
        self._blocks = PrefillBlocks.of(blocks, pages, page_size)
        self._pass = QuokaPrefillPass.of(self._blocks, caches[0], workspace, dtype)

    @property
    def is_dense(self) -> bool:
        """Whether SGLang's backend computes everything."""
        return not self._is_sparse

    def attend(self, layer: int, queries: Tensor, scale: float, output: Tensor) -> None:
        """Attend from the queries that SGLang's backend does not serve; their keys and values are in the cache.

        Args:
            layer: its place among those with full attention.
            queries: [tokens, query heads, head dim], of the whole pass.
            scale: what scores are multiplied by before the softmax.
            output: like ``queries``; those of other requests are left as they are.
        """
        cache = self._caches[layer]
        selection = select_blocks(queries, cache, self._pass)
        attend_blocks(queries, cache, self._blocks, selection, scale, output)

    def finish(self) -> None:
        """Count what was read, after the last layer."""
        self.plan.finish()
        for chunk in self.plan.chunks:
            if chunk.quoka is not None and chunk.counted:
                blocks = self._blocks_of[chunk.number] if _is_sparse(chunk) else _blocks_of(chunk, 0)
                self.plan.count(chunk, reads_of(blocks, self._caches[0]), len(self._caches))


def compile_defaults(
    cache: LayerCache, query_heads: int, page_size: int, workspace: QuokaPrefillWorkspace, dtype: torch.dtype
) -> None:
    """Compile what passes of QUOKA with the default block and queries launch; others compile when they first come.

    Args:
        cache: any layer's KV cache.
        query_heads: of a layer.
        page_size: slots in a page.
        workspace: of the passes.
        dtype: of queries.
    """
    # Less than a block: the second one is sparse.
    parameters = QuokaPrefill(budget=PAGE_TOKENS, sinks=0)
    block, device = parameters.block, cache.keys.device
    pages = torch.zeros(1, aligned(2 * block // page_size), dtype=torch.int32, device=device)
    queries = torch.empty(block, query_heads, cache.head_dim, dtype=dtype, device=device)
    with compiling_ahead():
        # What ranks queries is compiled for powers of two.
        tokens = QUERIES_AT_ONCE
        while tokens <= block:
            blocks = PrefillBlocks.of(blocks_of(0, 0, block, block + tokens, parameters), pages, page_size)
            selection = select_blocks(queries, cache, QuokaPrefillPass.of(blocks, cache, workspace, dtype))
            attend_blocks(queries, cache, blocks, selection, 1.0, torch.empty_like(queries))
            tokens *= 2


def _is_sparse(chunk: Chunk) -> bool:
    if chunk.quoka is None or chunk.state is None:
        return False
    last = max(chunk.state.prompt_length, chunk.end) - 1
    return not chunk.quoka.is_dense(last // chunk.quoka.block * chunk.quoka.block)


def _blocks_of(chunk: Chunk, row: int) -> list[Block]:
    assert chunk.quoka is not None
    return blocks_of(row, chunk.first_row, chunk.start, chunk.end, chunk.quoka)


def _tokens_of(chunks: Sequence[Chunk], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(chunk.rows.start, chunk.rows.stop) for chunk in chunks]).to(device)


def _part_of(batch: ForwardBatch, chunks: Sequence[Chunk], tokens: Tensor) -> ForwardBatch:
    """Return the batch as it would be with the requests of ``chunks`` alone, whose tokens are at ``tokens``."""
    numbers = torch.tensor([chunk.number for chunk in chunks])
    on_device = numbers.to(tokens.device)
    lengths = [chunk.end - chunk.start for chunk in chunks]
    part = copy.copy(batch)
    part.batch_size = len(chunks)
    part.req_pool_indices = batch.req_pool_indices[on_device]
    part.seq_lens = batch.seq_lens[on_device]
    part.seq_lens_cpu = batch.seq_lens_cpu[numbers]
    part.seq_lens_sum = int(part.seq_lens_cpu.sum())
    part.out_cache_loc = batch.out_cache_loc[tokens]
    part.positions = batch.positions[tokens]
    part.input_ids = None if batch.input_ids is None else batch.input_ids[tokens]
    part.extend_num_tokens = sum(lengths)
    part.extend_seq_lens = batch.extend_seq_lens[on_device]
    part.extend_prefix_lens = batch.extend_prefix_lens[on_device]
    starts = [0, *accumulate(lengths)][:-1]
    part.extend_start_loc = torch.tensor(starts, dtype=batch.extend_start_loc.dtype).to(tokens.device)
    part.extend_seq_lens_cpu = lengths
    part.extend_prefix_lens_cpu = [chunk.start for chunk in chunks]
    # With prefill in CUDA graphs SGLang keeps the room for the output of all tokens there, and backends write to it.
    part._attn_output = None  # noqa: SLF001
    return part
