"""QUOKA (Jones et al., "Query-Oriented KV Selection for Efficient LLM Prefill", Algorithms 1 and 2, section 3).

Positions whose queries resemble their block's mean least speak for the block. A key is as promising as its highest
cosine with one of them; the block attends to the most promising keys before it, and causally to its own. In decode, the
one query speaks for itself, and the first tokens can be kept as sinks beside the newest page (the paper has none).

Decode predicts cosines from the keys' low-bit codes, which also tell how long a key is (``KeyCodes.norms``), instead of
reading all keys: on real text it keeps as much of the attention (``benchmarks/NOTES.md``), for a seventh of the bytes.
They count in steps of 1/1024, far less than what they may be wrong by.

Prefill departs from the paper in what a block always selects, inside its budget: the first tokens, ``sinks``, and those
right before the block, ``recency_ratio`` of its budget. Queries that do not speak attend to recent tokens in many small
parts, which no representative asks for; cosines pass over them. A sink holds most of many heads' attention in a real
model; cosines nearly always find it, but nothing makes them. With 0 and 0 it is the paper's algorithm.

Blocks lie on a grid of absolute positions, so that what is computed does not depend on where prefill chunks end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend import dense
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.top_tokens import TopTokensStep
from winnow_kernels.indexes.key_codes import BLOCK, KeyCodes, RoundedQueries
from winnow_kernels.indexes.key_norms import KeyNorms, reciprocal_norms
from winnow_kernels.policies.quoka.parameters import QuokaDecode, QuokaPrefill

# Blocks scored in one matrix product: more would score more keys that only the later blocks may see.
BLOCKS_IN_BATCH = 8
# Scores held at once (16 MiB).
SCORES_IN_BATCH = 2**22
COSINE_STEPS: Final = 1024
"""Steps of a predicted cosine from 0 to 1."""
_TINY: Final = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class PrefillReads:
    """What a chunk's prefill read in one layer, summed over KV heads.

    Keys and values are read once for each block of queries: bytes of dense attention are those of all keys and values
    up to the end of each block; bytes of a selection are the scored keys with their norms, then the selected and the
    block's own keys and values.

    Attributes:
        attended: tokens that queries attended to, each query counted by itself (as one for all query heads of a group).
        context: tokens up to and including the query itself, summed over queries.
        read_bytes: bytes read from KV cache and index.
        context_bytes: bytes that dense attention reads.
    """

    attended: int = 0
    context: int = 0
    read_bytes: int = 0
    context_bytes: int = 0

    def __add__(self, other: PrefillReads) -> PrefillReads:
        return PrefillReads(
            self.attended + other.attended,
            self.context + other.context,
            self.read_bytes + other.read_bytes,
            self.context_bytes + other.context_bytes,
        )

    @classmethod
    def of_dense(cls, prefix_length: int, length: int, block: int, cache: LayerCache) -> PrefillReads:
        """Return what a dense chunk reads whose queries lie at positions ``prefix_length`` to ``length - 1``."""
        tokens = dense.causal_tokens(prefix_length, length) * cache.kv_heads
        ends = (min(start + block, length) for start in _block_starts(prefix_length, length, block))
        amount = sum(ends) * cache.kv_heads * 2 * cache.vector_bytes
        return cls(tokens, tokens, amount, amount)


def quoka_prefill(
    queries: Tensor,
    slots: Tensor,
    cache: LayerCache,
    scale: float,
    parameters: QuokaPrefill,
    norms: Tensor | None = None,
) -> tuple[Tensor, PrefillReads]:
    """Attend from one request's newest tokens, whose keys and values are in the cache, block by block.

    A block that the chunk's start or end cuts works with the queries it has: chunks should start on the grid, and end
    on it except at the prompt's end.

    Args:
        queries: [new tokens, query heads, head dim].
        slots: int64 [tokens]; the KV slot of each token of the context, the new ones last.
        cache: the layer's KV cache.
        scale: what scores are multiplied by before the softmax.
        parameters: the request's.
        norms: the layer's ``KeyNorms.reciprocals``, built for the whole blocks before the new tokens; None to compute
            these norms, too, from the keys.

    Returns:
        [new tokens, query heads, head dim], in the queries' dtype; and what was read.
    """
    length, prefix_length = len(slots), len(slots) - len(queries)
    starts = _block_starts(prefix_length, length, parameters.block)
    first_sparse = next((start for start in starts if not parameters.is_dense(start)), length)
    split = max(first_sparse, prefix_length)
    outputs = torch.empty_like(queries)
    reads = PrefillReads.of_dense(prefix_length, split, parameters.block, cache)
    if split > prefix_length:
        outputs[: split - prefix_length] = dense.prefill(queries[: split - prefix_length], slots[:split], cache, scale)
    for start, positions in select_for_blocks(queries, slots, cache, parameters, norms):
        end = min(start + parameters.block, length)
        begin = max(start, prefix_length)
        rows = slice(begin - prefix_length, end - prefix_length)
        outputs[rows] = _attend_block(queries[rows], slots[start:end], slots[positions], cache, scale)
        reads += block_reads(begin, start, end, positions.shape[1], cache)
    return outputs, reads


def select_for_blocks(
    queries: Tensor,
    slots: Tensor,
    cache: LayerCache,
    parameters: QuokaPrefill,
    norms: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the selection of each block that is not dense: its first position, and the positions selected before it.

    Takes what ``quoka_prefill`` takes. Positions are int64 [KV heads, budget], in no particular order.
    """
    length, prefix_length = len(slots), len(slots) - len(queries)
    starts = [s for s in _block_starts(prefix_length, length, parameters.block) if not parameters.is_dense(s)]
    if not starts:
        return
    before_last = slots[: starts[-1]]
    span = dense.span_of(before_last)
    keys = dense.take(cache.keys, span)
    known = 0 if norms is None else prefix_length // parameters.block * parameters.block
    reciprocals = reciprocal_norms(keys[known:])
    if norms is not None:
        reciprocals = torch.cat((dense.take(norms, dense.span_of(before_last[:known])), reciprocals))
    # [KV heads, head dim, tokens] and [KV heads, tokens].
    keys, reciprocals = keys.float().permute(1, 2, 0), reciprocals.T.contiguous()
    for batch in _batches(starts, cache.kv_heads, parameters):
        representatives = []
        for start in batch:
            rows = slice(max(start, prefix_length) - prefix_length, start + parameters.block - prefix_length)
            representatives.append(speaking_queries(queries[rows], cache.kv_heads, parameters.queries))
        scores = torch.cat(representatives, 1).float() @ keys[..., : batch[-1]]
        for start, of_block in zip(batch, torch.split(scores, [s.shape[1] for s in representatives], 1), strict=True):
            # Norms are positive: dividing the maximum is dividing the scores.
            promise = of_block[..., :start].amax(1) * reciprocals[:, :start]
            promise[:, : parameters.sinks] = torch.inf
            promise[:, start - parameters.recent(start) :] = torch.inf
            yield start, promise.topk(parameters.tokens(start), dim=-1, sorted=False).indices


def speaking_queries(queries: Tensor, kv_heads: int, count: int) -> Tensor:
    """Return the queries that speak for a block, the mean over each group (Algorithm 1, lines 1 to 8).

    The query heads of a group choose the same positions, by their mean likeness. Then the mean over the group is that
    of one position's scores, as section 3.3 describes it; if each head chose for itself, as Algorithm 1 can be read,
    it would mix positions that have nothing in common.

    Args:
        queries: [rows, query heads, head dim].
        kv_heads: KV heads.
        count: how many positions to keep for each KV head.

    Returns:
        [KV heads, min(rows, count), head dim], rounded to the queries' dtype, in which they are multiplied with keys.
    """
    # [KV heads, group, rows, head dim].
    heads = queries.float().transpose(0, 1).unflatten(0, (kv_heads, -1))
    if len(queries) > count:
        likeness = F.cosine_similarity(heads, heads.mean(2, keepdim=True), dim=-1).mean(1)
        kept = likeness.topk(count, dim=1, largest=False, sorted=True).indices
        heads = heads.take_along_dim(kept[:, None, :, None], 2)
    return F.normalize(heads, dim=-1).mean(1).to(queries.dtype)


class QuokaStep(TopTokensStep):
    """Attend to the newest page, then to the sinks, then to keys in the order of their cosines with the mean query.

    The mean is over the group, of normalised queries. Cosines are predicted, in whole steps; of equal ones the first
    token's comes first.

    Attributes:
        index_built_tokens: for each request, the tokens of the pages whose codes this step had to compute.
    """

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[QuokaDecode],
        codes: KeyCodes,
    ) -> None:
        size = codes.generations.page_size
        super().__init__(context, scale, termination, parameters, size)
        self._codes = codes
        pages = [
            codes.generations.complete_pages(context, request, earlier)
            for request, earlier in enumerate(self.scored.tolist())
        ]
        self.index_built_tokens = [size * codes.ensure(own) for own in pages]
        self._blocks = [dense.span_of(codes.blocks_of(own)) for own in pages]

    def scores(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> list[Tensor]:
        of_block = cache.kv_heads * self._codes.layout.size
        meter.count_bytes(self.scored // BLOCK * of_block)
        means = F.normalize(group(queries, cache.kv_heads), dim=-1).mean(2, keepdim=True)
        scores = []
        for mean, blocks in zip(means, self._blocks, strict=True):
            steps = cosine_steps(self._codes, layer, mean, blocks)[:, 0]
            # What is earlier is less than a step more: no two tokens are equal.
            scores.append(steps - torch.arange(steps.shape[1], dtype=torch.float64, device=steps.device) * 2.0**-32)
        return scores


def cosine_steps(codes: KeyCodes, layer: int, queries: Tensor, blocks: slice | Tensor) -> Tensor:
    """Return the predicted cosines of keys with queries, in steps of 1 ÷ ``COSINE_STEPS``, rounded down.

    Each operation rounds as IEEE 754 says, and kernels round alike: so the same query has the same steps anywhere.

    Args:
        codes: of the keys.
        layer: the layer's number.
        queries: float32 [KV heads, queries, head dim].
        blocks: int64 [n], or a span of n (``dense.span_of``).

    Returns:
        float32 [KV heads, queries, n × 16]; whole numbers from −``COSINE_STEPS`` on, and below ``COSINE_STEPS``.
    """
    levels = RoundedQueries.of(queries, 1.0).levels
    lengths = (levels.float().square().sum(-1) * queries.shape[-1]).sqrt().clamp_min(1.0)
    products = codes.scores(layer, RoundedQueries(levels, COSINE_STEPS / lengths), blocks)
    steps = (products / codes.norms(layer, blocks).clamp_min(_TINY)[:, None]).floor_()
    return steps.clamp_(-COSINE_STEPS, COSINE_STEPS - 1)


def _block_starts(begin: int, end: int, block: int) -> range:
    """Return where the blocks start that have queries at positions ``begin`` to ``end - 1``."""
    return range(begin // block * block, end, block) if end > begin else range(0)


def _batches(starts: list[int], kv_heads: int, parameters: QuokaPrefill) -> Iterator[list[int]]:
    """Yield consecutive blocks that are scored together."""
    fit = SCORES_IN_BATCH // (kv_heads * parameters.queries * starts[-1])
    size = max(1, min(BLOCKS_IN_BATCH, fit))
    for begin in range(0, len(starts), size):
        yield starts[begin : begin + size]


def _attend_block(queries: Tensor, own: Tensor, selected: Tensor, cache: LayerCache, scale: float) -> Tensor:
    """Attend from a block's queries to ``selected``, slots [KV heads, budget], and causally to its ``own`` slots."""
    kv_heads = cache.kv_heads
    heads = torch.arange(kv_heads, device=selected.device)[:, None]
    vectors = (selected * kv_heads + heads).flatten()
    keys, values = (
        pool.flatten(0, 1).index_select(0, vectors).to(queries.dtype).view(1, kv_heads, -1, cache.head_dim)
        for pool in (cache.keys, cache.values)
    )
    rows = dense.as_rows(queries, kv_heads)
    output, mass = dense.attend_with_mass(rows[None], keys, values, scale, cache.softmax.cap)
    own_part = dense.attend_to_newest(queries, own, cache, scale)
    merged = dense.merge([own_part, (output.view_as(own_part[0]), mass.view_as(own_part[1]))])
    return dense.with_sinks(*merged, cache)


def block_reads(begin: int, start: int, end: int, selected: int, cache: LayerCache) -> PrefillReads:
    """Return what a block reads that attends to ``selected`` tokens before it.

    Args:
        begin: position of its first query.
        start: position of its first token.
        end: position behind its last query.
        selected: tokens before ``start``, for each KV head.
        cache: the layer's KV cache.
    """
    queries = end - begin
    own = dense.causal_tokens(begin - start, end - start)
    scored_bytes = start * (cache.vector_bytes + KeyNorms.BYTES)
    attended_bytes = (selected + end - start) * 2 * cache.vector_bytes
    return PrefillReads(
        attended=cache.kv_heads * (queries * selected + own),
        context=cache.kv_heads * dense.causal_tokens(begin, end),
        read_bytes=cache.kv_heads * (scored_bytes + attended_bytes),
        context_bytes=cache.kv_heads * end * 2 * cache.vector_bytes,
    )
