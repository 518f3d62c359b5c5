"""Dense attention over whole contexts: decode steps and prefill chunks.

On a CPU, contexts are mostly a few long runs of neighbouring slots. Such runs are attended to where they lie, without a
copy, and what the parts yield is merged by log-sum-exp. Query heads of a KV head become rows of one query matrix, so
that a group reads each key and value once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.softmax import capped

# Copying fewer tokens than these costs less than one more part to merge.
SHORTEST_RUN = 512
# Rows of queries that share one mask and one range of keys in a sliding window's prefill.
WINDOW_ROWS = 512
# Capped scores are computed at once, as many as these: 64 MiB.
CAPPED_SCORES = 2**24


@dataclass(frozen=True)
class Run:
    """Neighbouring slots, read in place: ``splits`` parts of ``length`` slots each, from ``start``.

    Parts of one run are attended to in parallel.
    """

    start: int
    splits: int
    length: int


@dataclass(frozen=True)
class Layout:
    """How one request's tokens lie in the pool: in long runs, and scattered.

    Attributes:
        runs: what is read in place.
        scattered: int64 [tokens]; the slots of all other tokens, which are copied.
    """

    runs: Sequence[Run]
    scattered: Tensor

    @classmethod
    def of(cls, slots: Tensor, kv_heads: int) -> Layout:
        """Return the layout of ``slots``, int64 [tokens], of which order does not matter."""
        breaks = (slots[1:] != slots[:-1] + 1).nonzero().flatten() + 1
        bounds = F.pad(F.pad(breaks, (1, 0)), (0, 1), value=len(slots))
        long = (bounds.diff() >= SHORTEST_RUN).nonzero().flatten()
        runs, is_scattered = [], torch.ones_like(slots, dtype=torch.bool)
        for begin, end in zip(bounds[long].tolist(), bounds[long + 1].tolist(), strict=True):
            # Attention on a CPU is parallel over KV heads and parts: enough of them for all threads.
            splits = min(-(-torch.get_num_threads() // kv_heads), (end - begin) // SHORTEST_RUN)
            length = (end - begin) // splits
            runs.append(Run(int(slots[begin]), splits, length))
            is_scattered[begin : begin + splits * length] = False
        return cls(runs, slots[is_scattered] if runs else slots)

    def parts(self, cache: LayerCache, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values part by part, [splits, KV heads, tokens, head dim]; all tokens of all parts once."""
        for run in self.runs:
            span = slice(run.start, run.start + run.splits * run.length)
            keys, values = (
                take(pool, span).view(run.splits, run.length, *pool.shape[1:]).to(dtype)
                for pool in (cache.keys, cache.values)
            )
            yield keys.transpose(1, 2), values.transpose(1, 2)
        if len(self.scattered):
            keys, values = (pool.index_select(0, self.scattered).to(dtype) for pool in (cache.keys, cache.values))
            yield keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


# Layouts of a step's contexts, which are the same in all its layers, by window and KV heads.
_layouts: WeakKeyDictionary[Context, dict[tuple[int | None, int], list[Layout]]] = WeakKeyDictionary()


def attend_all(
    queries: Tensor,
    context: Context,
    cache: LayerCache,
    scale: float,
    meter: Meter,
    sliding_window: int | None = None,
) -> Tensor:
    """Attend to whole contexts in a decode step; every token within the window counts as attended.

    Args:
        queries: [requests, query heads, head dim]; query heads of a KV head lie next to each other.
        context: the requests' contexts, the newest token included.
        cache: the layer's KV cache, and its softmax's cap and sink logits.
        scale: what scores are multiplied by before the softmax.
        meter: counts what was read.
        sliding_window: how many tokens before the newest are visible beside it; None for all.

    Returns:
        [requests, query heads, head dim], in the queries' dtype.
    """
    visible = context.lengths if sliding_window is None else context.lengths.clamp_max(sliding_window + 1)
    meter.count_attended(visible * cache.kv_heads, cache)
    if queries.device.type != "cpu" and cache.softmax.is_plain:
        return _attend_padded(queries, context, cache, scale, visible)
    outputs = torch.empty_like(queries)
    for request, layout in enumerate(_layouts_of(context, cache.kv_heads, sliding_window)):
        rows = queries[request].reshape(cache.kv_heads, -1, cache.head_dim)
        output, mass = _merge(_parts(rows, layout, cache, scale))
        outputs[request] = cache.softmax.with_sinks(output.flatten(0, 1), mass.flatten())
    return outputs


def prefill(
    queries: Tensor, slots: Tensor, cache: LayerCache, scale: float, sliding_window: int | None = None
) -> Tensor:
    """Attend from one request's newest tokens, whose keys and values are in the cache, causally to its whole context.

    Args:
        queries: [new tokens, query heads, head dim].
        slots: int64 [tokens]; the KV slot of each token of the context, the new ones last.
        cache: the layer's KV cache, and its softmax's cap and sink logits.
        scale: what scores are multiplied by before the softmax.
        sliding_window: how many tokens before its own position a token sees; None for all.

    Returns:
        [new tokens, query heads, head dim], in the queries' dtype.
    """
    if sliding_window is not None and len(slots) > sliding_window + 1:
        return _prefill_window(queries, slots, cache, scale, sliding_window)
    if queries.device.type != "cpu" and cache.softmax.is_plain:
        return _prefill_lower_right(queries, slots, cache, scale)
    return with_sinks(*attend_to_newest(queries, slots, cache, scale), cache)


def attend_to_newest(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float) -> tuple[Tensor, Tensor]:
    """Attend as ``prefill`` does, but without sinks, and tell how much was attended to.

    Args:
        queries: [new tokens, query heads, head dim].
        slots: int64 [tokens]; the KV slot of each token, the new ones last.
        cache: the layer's KV cache.
        scale: what scores are multiplied by before the softmax.

    Returns:
        Outputs, [KV heads, group, new tokens, head dim], and float32 log-sum-exps, [KV heads, group, new tokens].
    """
    new_tokens = len(queries)
    own = _attend_causally(queries, slots[-new_tokens:], cache, scale)
    if new_tokens == len(slots):
        return own
    rows = as_rows(queries, cache.kv_heads)
    layout = Layout.of(slots[:-new_tokens], cache.kv_heads)
    output, mass = _merge(_parts(rows, layout, cache, scale))
    return merge([own, (output.view_as(own[0]), mass.view_as(own[1]))])


def attend_with_mass(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    cap: float | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend, and tell how much was attended to, so that outputs over disjoint sets of tokens can be merged.

    Args:
        queries: [batch, heads, rows, head dim].
        keys: [batch, heads, tokens, head dim], at least one token, of the queries' dtype.
        values: the same shape.
        scale: what scores are multiplied by before the softmax.
        cap: what then bounds them; None for none.
        is_causal: row i sees tokens up to i; rows and tokens are as many.

    Returns:
        Outputs, [batch, heads, rows, head dim], and float32 log-sum-exps of the scores, [batch, heads, rows].
    """
    if cap is not None:
        return _attend_capped(queries, keys, values, scale, cap, is_causal=is_causal)
    # F.scaled_dot_product_attention hides the log-sum-exps of the very functions that it calls.
    if queries.device.type == "cpu":
        output, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            queries, keys, values, is_causal=is_causal, scale=scale
        )
        return output, mass
    output, mass, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        queries, keys, values, None, compute_log_sumexp=True, is_causal=is_causal, scale=scale
    )
    return output, mass[..., : queries.shape[2]]


def causal_tokens(begin: int, end: int) -> int:
    """Return what queries at positions ``begin`` to ``end - 1`` see causally: Σ (position + 1)."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the outputs, [..., head dim], and log-sum-exps, [...], of attention over disjoint sets of tokens."""
    if len(parts) == 1:
        return parts[0]
    masses = torch.stack([mass_of_part for _, mass_of_part in parts])
    mass = masses.logsumexp(0)
    weights = (masses - mass).exp_()[..., None]
    merged = weights[0] * parts[0][0]
    for weight, (output, _) in zip(weights[1:], parts[1:], strict=True):
        merged.addcmul_(weight, output.to(merged.dtype))
    return merged.to(parts[0][0].dtype), mass


def span_of(slots: Tensor) -> slice | Tensor:
    """Return ``slots``, int64 [tokens], as a slice if they are one run, which can be read in place; else themselves."""
    if len(slots) and bool((slots[1:] == slots[:-1] + 1).all()):
        first = int(slots[0])
        return slice(first, first + len(slots))
    return slots


def take(pool: Tensor, span: slice | Tensor) -> Tensor:
    """Return what ``pool``, [slots, ...], holds at a span, or at slots of any shape: a view of a run, else a copy."""
    if isinstance(span, slice):
        if span.stop > len(pool):
            raise IndexError(f"slots up to {span.stop - 1} are asked of a pool of {len(pool)}")
        return pool[span]
    return pool.index_select(0, span.flatten()).unflatten(0, span.shape)


def as_rows(queries: Tensor, kv_heads: int) -> Tensor:
    """Return ``queries``, [tokens, query heads, head dim], as [KV heads, group × tokens, head dim]."""
    tokens, _, head_dim = queries.shape
    return queries.reshape(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)


def with_sinks(outputs: Tensor, log_sum_exp: Tensor, cache: LayerCache) -> Tensor:
    """Return what attention over tokens comes to with the layer's sinks: [tokens, query heads, head dim].

    Args:
        outputs: [KV heads, group, tokens, head dim].
        log_sum_exp: float32 [KV heads, group, tokens].
        cache: the layer's.
    """
    return cache.softmax.with_sinks(outputs.permute(2, 0, 1, 3).flatten(1, 2), log_sum_exp.permute(2, 0, 1).flatten(1))


def _layouts_of(context: Context, kv_heads: int, sliding_window: int | None) -> list[Layout]:
    known = _layouts.setdefault(context, {})
    key = (sliding_window, kv_heads)
    if key not in known:
        lengths = context.lengths.tolist()
        begins = [0 if sliding_window is None else max(0, length - sliding_window - 1) for length in lengths]
        known[key] = [
            Layout.of(slots[begin:length], kv_heads)
            for slots, begin, length in zip(context.slots, begins, lengths, strict=True)
        ]
    return known[key]


def _attend_causally(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float) -> tuple[Tensor, Tensor]:
    """Attend among tokens, each to itself and those before it; results as of ``attend_to_newest``."""
    grouped = queries.reshape(len(queries), cache.kv_heads, -1, cache.head_dim).permute(1, 2, 0, 3)
    keys, values = (
        pool.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1)
        for pool in _keys_and_values(cache, slots, queries.dtype)
    )
    return attend_with_mass(grouped, keys, values, scale, cache.softmax.cap, is_causal=True)


def _parts(rows: Tensor, layout: Layout, cache: LayerCache, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Attend without a mask from ``rows``, [KV heads, rows, head dim], to each split of each part."""
    return [
        attend_with_mass(rows.expand(len(keys), -1, -1, -1), keys, values, scale, cache.softmax.cap)
        for keys, values in layout.parts(cache, rows.dtype)
    ]


def _attend_capped(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend as ``attend_with_mass`` does, with scores that are computed: torch's own attention bounds none."""
    tokens = keys.shape[2]
    at_once = max(1, CAPPED_SCORES // (queries.shape[:2].numel() * tokens))
    position = torch.arange(tokens, device=queries.device)
    outputs, masses = [], []
    for first in range(0, queries.shape[2], at_once):
        rows = queries[:, :, first : first + at_once]
        mask = position <= first + torch.arange(rows.shape[2], device=rows.device)[:, None] if is_causal else None
        output, mass = _attend_masked(rows, keys, values, scale, cap, mask)
        outputs.append(output)
        masses.append(mass)
    return torch.cat(outputs, 2), torch.cat(masses, 2)


def _attend_masked(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend as ``attend_with_mass`` does where ``mask``, bool [rows, tokens], is true; of each row somewhere."""
    scores = capped((queries.float() @ keys.float().mT) * scale, cap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    mass = scores.logsumexp(-1)
    return (scores.sub_(mass[..., None]).exp_() @ values.float()).to(queries.dtype), mass


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge all splits of all parts, [splits, KV heads, rows, …]."""
    return merge([(o, mass) for output, log_sum_exp in parts for o, mass in zip(output, log_sum_exp, strict=True)])


def _keys_and_values(cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of ``slots``, each [tokens, KV heads, head dim]; in place if they are one run."""
    span = span_of(slots)
    return take(cache.keys, span).to(dtype), take(cache.values, span).to(dtype)


def _for_each_query_head(vectors: Tensor, group: int) -> Tensor:
    """Return ``vectors``, [tokens, KV heads, head dim], as [1, query heads, tokens, head dim]."""
    return vectors.repeat_interleave(group, dim=1).transpose(0, 1)[None]


def _attend_padded(queries: Tensor, context: Context, cache: LayerCache, scale: float, visible: Tensor) -> Tensor:
    mask = context.inside & (context.positions >= (context.lengths - visible)[:, None])
    slots = context.slots.where(context.inside, context.slots[:, :1])
    keys, values = (pool[slots].to(queries.dtype).transpose(1, 2) for pool in (cache.keys, cache.values))
    grouped = queries.reshape(len(queries), cache.kv_heads, -1, cache.head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=scale).flatten(
        1, 2
    )


def _prefill_lower_right(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float) -> Tensor:
    keys, values = (
        _for_each_query_head(pool, queries.shape[1] // cache.kv_heads)
        for pool in _keys_and_values(cache, slots, queries.dtype)
    )
    mask = causal_lower_right(len(queries), len(slots))
    output = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale)
    return output[0].transpose(0, 1)


def _prefill_window(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
    new_tokens, length = len(queries), len(slots)
    offset = max(0, length - new_tokens - window)
    keys, values = (
        _for_each_query_head(pool, queries.shape[1] // cache.kv_heads)
        for pool in _keys_and_values(cache, slots[offset:], queries.dtype)
    )
    positions = torch.arange(offset, length, device=queries.device)
    outputs = torch.empty_like(queries)
    for begin in range(0, new_tokens, WINDOW_ROWS):
        rows = slice(begin, min(begin + WINDOW_ROWS, new_tokens))
        own = positions[length - offset - new_tokens :][rows]
        first, last = int(max(0, rows.start + length - new_tokens - window)), rows.stop + length - new_tokens
        seen = slice(first - offset, last - offset)
        mask = (positions[seen] <= own[:, None]) & (positions[seen] >= own[:, None] - window)
        of_heads = (queries[rows].transpose(0, 1)[None], keys[:, :, seen], values[:, :, seen])
        if cache.softmax.is_plain:
            output = F.scaled_dot_product_attention(*of_heads, attn_mask=mask, scale=scale)
            outputs[rows] = output[0].transpose(0, 1)
        else:
            output, mass = _attend_masked(*of_heads, scale, cache.softmax.cap, mask)
            outputs[rows] = cache.softmax.with_sinks(output[0].transpose(0, 1), mass[0].T)
    return outputs
