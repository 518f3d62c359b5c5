"""QUOKA's selection in prefill (``reference.select_for_blocks``), for all blocks of a pass.

1. Norms: all keys before each request's last block are read once.
2. Representatives: two launches read the queries of the pass, about twice.
3. Scores: one launch multiplies representatives and keys, and writes 4 bytes for each block, KV head and key before the
block.
4. Top: six launches read the scores three times and write the slots.

The last two alternate: as many blocks at a time as a workspace holds the scores of. With 8 KV heads a block that 32K
tokens precede takes 1.3 MiB, one that 128K precede 4.3 MiB. With the default of 256 MiB a chunk of 8,192 tokens in
blocks of 128 is one batch up to 120K, and two behind that. Smaller batches would be read from the L2 cache, but every
launch ends with multiprocessors that wait for the last, and every batch reads all keys.

With 32 query and 8 KV heads of 128, and 16 representatives, that chunk takes 60 × 10⁹ operations at 32K. It reads 67 MB
of keys from memory for norms and as much for scores, and 67 MB of queries; its scores are 60 MB. At 128K operations,
keys and scores are four times as many.

Nothing but a block's own queries and the keys before it decides what it gets, not its neighbours or where chunks end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from winnow_kernels.cache import LayerCache, widened_dtype
from winnow_kernels.kernel_arguments import Vectors
from winnow_kernels.policies.quoka.prefill import representatives as speaking
from winnow_kernels.policies.quoka.prefill import scores as scoring
from winnow_kernels.policies.quoka.prefill import top
from winnow_kernels.policies.quoka.prefill.plan import Plan, Run, scores_stride
from winnow_kernels.policies.quoka.prefill.tables import Blocks
from winnow_kernels.prefill.blocks import WHOLE, PrefillBlocks, aligned

SCORES_BYTES: Final = 256 * 2**20
"""Default size of the workspace."""


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """What each block and KV head attends to before the block.

    Attributes:
        slots: int32 [blocks, KV heads, width]; of a block the first ``Block.budget`` of each row, ascending by
            position. The rest means nothing, and so does the row of a block that attends to everything.
    """

    slots: Tensor


@dataclass(frozen=True, eq=False)
class QuokaPrefillWorkspace:
    """Scratch for scores, the same in all layers and passes.

    Attributes:
        scores: float32 [numbers].
    """

    scores: Tensor

    @classmethod
    def empty(
        cls, kv_heads: int, longest: int, device: torch.device, scores_bytes: int = SCORES_BYTES
    ) -> QuokaPrefillWorkspace:
        """Return a workspace of ``scores_bytes``, or more if a block that ``longest`` tokens precede needs more."""
        numbers = max(scores_bytes // 4, kv_heads * scores_stride(longest))
        return cls(torch.empty(numbers, dtype=torch.float32, device=device))


@dataclass(frozen=True, eq=False)
class QuokaPrefillPass:
    """One pass's selection, planned once for all layers, which then write to the same tensors one after another.

    Beside the workspace it takes, for each KV head, 4 bytes for each token before a request's last block, for each
    representative of a block the bytes of a key and 4, and for each block 4 for 2,048 tokens before it: 6.2 MiB for a
    chunk of 8,192 at 128K with 8 KV heads of 128, in blocks of 128 with 16 representatives. The selection takes 4 bytes
    for each token.

    Attributes:
        blocks: of the pass.
        plan: what is launched.
        scores: float32 [numbers]; scratch, the workspace's.
        reciprocals: float32 [numbers]; scratch, reciprocal norms of the requests' keys.
        marks: int32 [numbers]; scratch, what is known of a batch's thresholds.
        ranked: for each run of the plan int32 [blocks, KV heads, representatives]; scratch.
        representatives: for each run of the plan [blocks, KV heads, representatives, head dim], as queries; scratch.
        selection: what is written to.
    """

    blocks: PrefillBlocks
    plan: Plan
    scores: Tensor
    reciprocals: Tensor
    marks: Tensor
    ranked: Sequence[Tensor]
    representatives: Sequence[Tensor]
    selection: BlockSelection

    @classmethod
    def of(
        cls,
        blocks: PrefillBlocks,
        cache: LayerCache,
        workspace: QuokaPrefillWorkspace,
        dtype: torch.dtype | None = None,
    ) -> QuokaPrefillPass:
        """Plan the selection of the blocks whose budget is not ``WHOLE``.

        Args:
            blocks: of the pass.
            cache: any layer's KV cache, of bfloat16, float16, float32 or narrow.
            workspace: made for as many KV heads and for at least as many tokens.
            dtype: of the queries; None for the cache's.
        """
        kv_heads, head_dim, device = cache.kv_heads, cache.head_dim, cache.keys.device
        plan = Plan.of(blocks, kv_heads, scoring.columns_of(head_dim), len(workspace.scores))
        shapes = [(len(run.sparse), kv_heads, run.representatives, head_dim) for run in plan.runs]
        batches = [batch for run in plan.runs for batch in run.batches]
        marks = max((top.marks_of(len(batch.sparse) * kv_heads, batch.longest) for batch in batches), default=0)
        width = aligned(max((block.budget for block in blocks.blocks if block.budget != WHOLE), default=0))
        return cls(
            blocks,
            plan,
            workspace.scores,
            torch.empty(plan.norms, dtype=torch.float32, device=device),
            torch.empty(marks, dtype=torch.int32, device=device),
            [
                torch.empty(len(run.sparse), kv_heads, run.representatives, dtype=torch.int32, device=device)
                for run in plan.runs
            ],
            [torch.empty(shape, dtype=dtype or widened_dtype(cache.keys.dtype), device=device) for shape in shapes],
            BlockSelection(torch.empty(len(blocks.blocks), kv_heads, width, dtype=torch.int32, device=device)),
        )


def select_blocks(queries: Tensor, cache: LayerCache, own: QuokaPrefillPass) -> BlockSelection:
    """Return the slots that the blocks of a pass attend to in a layer, until the pass's next layer is selected for.

    A block selects the ``Block.budget`` best-scored tokens before its start; of equal scores the first.

    Args:
        queries: [queries of the pass, query heads, head dim], in the pass's dtype; queries and heads may be strided.
        cache: the layer's KV cache. Keys before the last sparse block of each request must be in it.
        own: planned for layers like this.
    """
    if not own.plan.runs:
        return own.selection
    blocks, plan = own.blocks, own.plan
    keys = (Vectors.of(cache.keys), Blocks.of(blocks))
    of_keys = {
        "head_dim": cache.head_dim,
        "dim_block": triton.next_power_of_2(cache.head_dim),
        "at_once": scoring.KEYS_AT_ONCE,
    }
    tiles = triton.cdiv(plan.longest, scoring.KEYS_AT_ONCE)
    scoring.norms_kernel[(cache.kv_heads, tiles, len(plan.requests))](
        *keys, plan.requests, own.reciprocals, **of_keys, num_warps=4
    )
    for run, ranked, representatives in zip(plan.runs, own.ranked, own.representatives, strict=True):
        _speak(queries, blocks, run, ranked, representatives)
        for batch in run.batches:
            runs = triton.cdiv(batch.longest, scoring.RUN)
            scoring.score_kernel[(len(batch.groups), runs, cache.kv_heads)](
                *keys,
                scoring.Scoring(representatives, own.reciprocals, run.sparse, batch.groups, own.scores),
                cache.kv_heads,
                **of_keys,
                representatives=run.representatives,
                columns=scoring.columns_of(cache.head_dim),
                run=scoring.RUN,
                num_warps=scoring.WARPS,
            )
            top.write_top(own.scores, batch.sparse, blocks, batch.longest, own.marks, own.selection.slots)
    return own.selection


def _speak(queries: Tensor, blocks: PrefillBlocks, run: Run, ranked: Tensor, representatives: Tensor) -> None:
    """Write the representatives of a run's blocks."""
    kv_heads = representatives.shape[1]
    query_heads, head_dim = queries.shape[1:]
    of_blocks = (Vectors.of(queries), Blocks.of(blocks), run.sparse, ranked)
    of_queries = {
        "group": query_heads // kv_heads,
        "head_dim": head_dim,
        "dim_block": triton.next_power_of_2(head_dim),
        "representatives": run.representatives,
    }
    speaking.rank_kernel[(len(run.sparse), kv_heads)](
        *of_blocks,
        **of_queries,
        rows=speaking.QUERIES_AT_ONCE,
        tiles=triton.next_power_of_2(triton.cdiv(run.queries, speaking.QUERIES_AT_ONCE)),
        num_warps=speaking.RANK_WARPS,
    )
    tile = min(run.representatives, speaking.REPRESENTATIVES_AT_ONCE)
    speaking.average_kernel[(len(run.sparse), kv_heads, run.representatives // tile)](
        *of_blocks, representatives, **of_queries, tile=tile, num_warps=4
    )
