"""``verified_pages``: a policy of our own, which drafts from what the checks of the drafts have read anyway.

A check attends densely from a few neighbouring tokens to the whole context. A page's mass in it is the attention that
it gets, averaged over the new tokens and the query heads of a KV head. What drafts attend to is decided there: the
pages of the sinks, those that held most, and all tokens from the page on that was ``recency`` tokens old. Drafts decide
nothing and read no index. The checks before the last are forgotten: with them, fading, no more drafts stood.

Before the first check the newest pages take the place of those that hold most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.request import CheckObserver
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.policies.snapkv.reference import select_kept
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages
from winnow_kernels.selection.pages import pages_kept, pages_of
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import capped


@dataclass(frozen=True)
class PageBudget:
    """What a request keeps, in pages.

    Attributes:
        sinks: first pages, always kept.
        recent: newest complete pages, always kept.
        most: pages that are kept for their masses.
    """

    sinks: int
    recent: int
    most: int

    @classmethod
    def of(cls, parameters: VerifiedPages, page_size: int) -> Self:
        """Return what ``parameters`` come to."""
        sinks, recent = pages_of(parameters.sinks, page_size), pages_of(parameters.recency, page_size)
        kept = pages_kept(parameters.budget, parameters.recency, parameters.sinks, page_size)
        return cls(sinks, recent, kept - sinks - recent)

    def first_unchecked(self, length: int, page_size: int) -> int:
        """Return the page from which on a context of ``length`` tokens is read while nothing has been checked."""
        return max(0, (length - 1) // page_size - self.recent - self.most)


class CheckedPages(CheckObserver):
    """What one request drafts from.

    Attributes:
        since: position from which on everything is attended to.
        kept: for each layer, int64 [KV heads, kept], positions before ``since``, ascending.
    """

    def __init__(self, parameters: VerifiedPages, page_size: int, layers: int, kv_heads: int, length: int) -> None:
        """``length`` is that of the context when nothing has been checked yet, with the newest token."""
        self._budget = PageBudget.of(parameters, page_size)
        self._page_size = page_size
        self.since = self._budget.first_unchecked(length, page_size) * page_size
        sinks = torch.arange(min(self._budget.sinks * page_size, self.since))
        self.kept = {layer: sinks.expand(kv_heads, -1) for layer in range(layers)}

    def observe(self, layer: int, queries: Tensor, slots: Tensor, cache: LayerCache, scale: float) -> None:
        masses = page_masses(queries, slots, cache, scale, self._page_size)
        first = max(0, (len(slots) - len(queries)) // self._page_size - self._budget.recent)
        self.since = first * self._page_size
        sinks = min(self._budget.sinks, first)
        by_mass = masses[:, sinks:first].sort(dim=-1, descending=True, stable=True).indices[:, : self._budget.most]
        pages = F.pad((sinks + by_mass).sort(-1).values, (sinks, 0))
        pages[:, :sinks] = torch.arange(sinks, device=pages.device)
        within = torch.arange(self._page_size, device=pages.device)
        self.kept[layer] = (pages[..., None] * self._page_size + within).flatten(1)


def page_masses(queries: Tensor, slots: Tensor, cache: LayerCache, scale: float, page_size: int) -> Tensor:
    """Return what share of the attention of a request's newest tokens each page of its context gets.

    Args:
        queries: [new tokens, query heads, head dim].
        slots: int64 [tokens]; the KV slot of each token of the context, the new ones last.
        cache: the layer's KV cache.
        scale: what scores are multiplied by before the softmax.
        page_size: tokens in a page.

    Returns:
        float32 [KV heads, pages].
    """
    new_tokens, length = len(queries), len(slots)
    keys = cache.keys[slots].transpose(0, 1).float()
    # One product for all new tokens and query heads of a KV head.
    rows = group(queries.float() * scale, cache.kv_heads).transpose(0, 1).flatten(1, 2)
    scores = capped(rows @ keys.mT, cache.softmax.cap).view(cache.kv_heads, new_tokens, -1, length)
    position = torch.arange(length, device=slots.device)
    later = position > position[-new_tokens:, None]
    weights = scores.masked_fill_(later[:, None], -torch.inf).softmax(-1).mean((1, 2))
    return F.pad(weights, (0, -length % page_size)).unflatten(1, (-1, page_size)).sum(-1)


class VerifiedPagesStep(DecodeStep):
    """Attend to what was kept at the last check, and to everything behind it, in the order of ``select_kept``."""

    def __init__(
        self, context: Context, scale: float, termination: Termination | None, states: Sequence[CheckedPages]
    ) -> None:
        super().__init__(context, scale, termination)
        self._states = states
        self._since = torch.tensor([state.since for state in states], device=context.device)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        kept = [state.kept[layer].to(self.context.device) for state in self._states]
        counts = torch.tensor([[each.shape[1]] * cache.kv_heads for each in kept], device=self.context.device)
        return select_kept(self.context, self._since, kept, counts)
