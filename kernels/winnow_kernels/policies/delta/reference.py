"""DELTA (Entezari Zarch et al., "Dynamic Layer-Aware Token Attention", section 4 and Algorithms 1 and 2).

A few Δ-layers attend to everything and find the salient pages; the layers after each attend to those pages only,
until the next Δ-layer. Selection is renewed at every decode step, and is the same for all KV heads. The layers before
the first Δ-layer attend to everything: there is nothing yet that they could use.

A token's score is the greatest attention weight that any query head of the Δ-layer gives it, a page's the sum over
its tokens. The newest ⌈recency / page size⌉ pages are kept, the one that is not full counting as one, then those that
hold sinks (the paper has none), then the others by score.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend.dense import Layout, attend_all
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import attend, group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.row_groups import attend_rows, termination_of
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.policies.delta.parameters import Delta, Role
from winnow_kernels.selection.pages import order_pages, pages_kept, pages_of, select_pages
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import capped


class WholeContext:
    """One request's tokens as a Δ-layer reads them: long runs of neighbouring slots in place, the others as a copy."""

    def __init__(self, slots: Tensor, kv_heads: int) -> None:
        """
        Args:
            slots: int64 [tokens], by position.
            kv_heads: how many KV heads read them.
        """
        self._layout = Layout.of(slots, kv_heads)
        runs = [
            torch.arange(run.start, run.start + run.splits * run.length, device=slots.device)
            for run in self._layout.runs
        ]
        read = torch.cat([*runs, self._layout.scattered])
        position = torch.empty(int(slots.max()) + 1, dtype=torch.int64, device=slots.device)
        position[slots] = torch.arange(len(slots), device=slots.device)
        # Where the token of each position is in the order of the parts; None if that is the order of positions.
        self._place: Tensor | None = None
        if not torch.equal(read, slots):
            self._place = torch.empty_like(slots)
            self._place[position[read]] = torch.arange(len(slots), device=slots.device)

    def attend_and_score(self, grouped: Tensor, cache: LayerCache, scale: float) -> tuple[Tensor, Tensor]:
        """Attend to all tokens, with one read of their keys and values.

        Args:
            grouped: float32 [KV heads, group, head dim]; the queries.
            cache: the layer's KV cache.
            scale: what scores are multiplied by before the softmax.

        Returns:
            The output, like ``grouped``, and the greatest weight of each token, float32 [tokens].
        """
        parts = [
            (keys, values)
            for keys_of_splits, values_of_splits in self._layout.parts(cache, grouped.dtype)
            for keys, values in zip(keys_of_splits, values_of_splits, strict=True)
        ]
        # Keys times queries, not the other way round: this is faster where keys of several heads lie interleaved.
        columns = (grouped * scale).mT
        logits = capped(torch.cat([keys @ columns for keys, _ in parts], dim=1).mT, cache.softmax.cap)
        weights = logits.softmax(-1)
        lengths = [keys.shape[1] for keys, _ in parts]
        of_parts = zip(torch.split(weights, lengths, dim=-1), parts, strict=True)
        output = torch.stack([own @ values for own, (_, values) in of_parts]).sum(0)
        if cache.softmax.sink_logits is not None:
            output = cache.softmax.with_sinks(output.flatten(0, 1), logits.logsumexp(-1).flatten()).view_as(output)
        scores = weights.amax((0, 1))
        return output, scores if self._place is None else scores[self._place]


def rank_pages(
    token_scores: Tensor, lengths: Tensor, recent: Tensor, sinks: Tensor, width: int, page_size: int
) -> Tensor:
    """Return the pages in the order in which they are kept: from the newest back, then those of sinks, then by score.

    Args:
        token_scores: float32 [requests, longest]; 0 beyond a context.
        lengths: int64 [requests].
        recent: int64 [requests]; newest pages that are always kept, at least 1.
        sinks: int64 [requests]; first pages that are always kept.
        width: how many pages to return.
        page_size: tokens in a page.

    Returns:
        int64 [requests, width]; beyond a context's own pages, others.
    """
    padded = F.pad(token_scores, (0, -token_scores.shape[1] % page_size))
    scores = padded.reshape(len(lengths), 1, -1, page_size).sum(-1)
    return order_pages(scores, (lengths - 1) // page_size, recent, sinks, width)[:, 0]


class DeltaStep(DecodeStep):
    """Attend in full before the first Δ-layer and at Δ-layers, elsewhere to the pages that the last of these selected.

    Early termination leaves the layers that attend in full alone: they have to see everything.
    """

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[Delta],
        page_size: int,
    ) -> None:
        super().__init__(context, scale, termination)
        self._parameters = parameters
        self._page_size = page_size
        most = [pages_kept(p.budget, p.recency, p.sinks, page_size) for p in parameters]
        self._width = min(max(most), pages_of(context.longest, page_size))
        self._recent = torch.tensor([pages_of(p.recency, page_size) for p in parameters], device=context.device)
        self._sinks = torch.tensor([pages_of(p.sinks, page_size) for p in parameters], device=context.device)
        self._counts = torch.minimum(torch.tensor(most, device=context.device), (context.lengths - 1) // page_size + 1)
        self._order = torch.zeros(context.requests, self._width, dtype=torch.int64, device=context.device)
        self._selection: Selection | None = None
        self._contexts: dict[tuple[int, ...], Context] = {tuple(range(context.requests)): context}
        self._whole: dict[int, WholeContext] = {}

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        """Return what the last Δ-layer of each request selected."""
        if self._selection is None:
            self._selection = select_pages(self.context, self._order[:, None], self._counts, self._page_size)
        heads = cache.kv_heads
        return Selection(self._selection.slots.expand(-1, heads, -1), self._selection.counts.expand(-1, heads))

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        rows: dict[Role, list[int]] = {role: [] for role in Role}
        for row, parameters in enumerate(self._parameters):
            rows[parameters.role(layer)].append(row)
        output = torch.empty_like(queries)
        full, refresh, reuse = (rows[role] for role in Role)
        attend_rows(full, lambda q, m: self._attend_fully(full, q, cache, m), queries, meter, output)
        attend_rows(refresh, lambda q, m: self._refresh(refresh, q, cache, m), queries, meter, output)
        attend_rows(reuse, lambda q, m: self._reuse(layer, reuse, q, cache, m), queries, meter, output)
        return output

    def _attend_fully(self, rows: list[int], queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        return attend_all(queries, self._context_of(rows), cache, self.scale, meter)

    def _refresh(self, rows: list[int], queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        context = self._context_of(rows)
        output, scores = self.attend_and_score(rows, queries, cache, meter)
        width = min(self._width, pages_of(context.longest, self._page_size))
        recent, sinks = self._recent[rows], self._sinks[rows]
        order = rank_pages(scores, context.lengths, recent, sinks, width, self._page_size)
        self._order[rows, :width] = order
        self._selection = None
        return output

    def attend_and_score(
        self, rows: Sequence[int], queries: Tensor, cache: LayerCache, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        """Attend with some of the step's rows to their whole contexts, from one read of keys and values.

        Args:
            rows: their numbers.
            queries: [rows, query heads, head dim].
            cache: the layer's KV cache.
            meter: with one row for each of these rows.

        Returns:
            The attention output, like ``queries``, and the tokens' scores, float32 [rows, longest of these contexts], 0
            beyond a context. A score is the maximum over the query heads given: where ranks share out the heads, pages
            are to be ranked by the maximum over all ranks.
        """
        context = self._context_of(rows)
        meter.count_attended(context.lengths * cache.kv_heads, cache)
        grouped = group(queries, cache.kv_heads)
        output = torch.empty_like(grouped)
        scores = grouped.new_zeros(context.requests, context.longest)
        for i, row in enumerate(rows):
            if row not in self._whole:
                self._whole[row] = WholeContext(context.slots[i, : int(context.lengths[i])], cache.kv_heads)
            output[i], own = self._whole[row].attend_and_score(grouped[i], cache, self.scale)
            scores[i, : len(own)] = own
        return output.flatten(1, 2).to(queries.dtype), scores

    def _reuse(self, layer: int, rows: list[int], queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        everyone = self.select(layer, queries, cache, meter)
        selection, termination = everyone, self.termination
        if len(rows) < self.context.requests:
            counts = everyone.counts[rows]
            selection = Selection(everyone.slots[rows, :, : int(counts.max())], counts)
            termination = termination_of(termination, rows)
        return attend(queries, cache, selection, self.scale, meter, termination).output

    def _context_of(self, rows: Sequence[int]) -> Context:
        key = tuple(rows)
        if key not in self._contexts:
            self._contexts[key] = self.context.rows(list(rows))
        return self._contexts[key]
