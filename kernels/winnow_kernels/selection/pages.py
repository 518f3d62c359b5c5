"""From chosen pages to the tokens in them: what the page-wise policies share."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_kernels.cache import Context
from winnow_kernels.selection.tokens import Selection, select_positions


def pages_of(tokens: int, page_size: int) -> int:
    """Return how many pages hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def pages_kept(budget: int, recent: int, sinks: int, page_size: int) -> int:
    """Return how many pages a budget comes to: at least those that hold the recent tokens and the sinks.

    Args:
        budget: tokens.
        recent: newest tokens that are always kept, at least 1.
        sinks: first tokens that are always kept.
        page_size: tokens in a page.
    """
    return max(pages_of(budget, page_size), pages_of(recent, page_size) + pages_of(sinks, page_size))


def order_pages(scores: Tensor, newest: Tensor, recent: Tensor, sinks: Tensor, width: int) -> Tensor:
    """Return pages in the order in which they are kept: from the newest back, then those of sinks, then by score.

    Args:
        scores: float32 [requests, heads, pages]; those of pages that are always kept mean nothing.
        newest: int64 [requests]; the number of the newest token's page.
        recent: int64 [requests]; newest pages that are always kept, at least 1.
        sinks: int64 [requests]; first pages that are always kept.
        width: how many pages to return, at most as many as there are scores for.

    Returns:
        int64 [requests, heads, width]; beyond a context's own pages, any.
    """
    newest, recent, sinks = newest[:, None], recent[:, None], sinks[:, None]
    recent = torch.minimum(recent, newest + 1)
    always = recent + torch.minimum(sinks, newest + 1 - recent)
    pages = torch.arange(scores.shape[2], device=scores.device)
    is_scored = (pages >= sinks) & (pages <= newest - recent)
    by_score = scores.masked_fill(~is_scored[:, None], -torch.inf).topk(width, dim=-1).indices
    place = torch.arange(width, device=scores.device)
    kept = torch.where(place < recent, newest - place, place - recent)
    others = by_score.take_along_dim((place - always).clamp_min(0)[:, None], 2)
    return torch.where((place < always)[:, None], kept[:, None], others)


def select_pages(context: Context, order: Tensor, counts: Tensor, page_size: int) -> Selection:
    """Return the selection of all tokens of some pages, page after page.

    The page of the newest token, full or not, is read from its newest token back; the others from their first on.

    Args:
        context: the requests' contexts.
        order: int64 [requests, heads, pages]; pages in descending priority by their number in the context (position //
            ``page_size``), the newest token's first. Beyond the counts any page of the context.
        counts: int64 [requests], at least 1; how many of them are selected.
        page_size: tokens in a page.
    """
    in_newest = ((context.lengths - 1) % page_size + 1)[:, None]
    tokens = in_newest + (counts[:, None] - 1) * page_size
    index = torch.arange(order.shape[2] * page_size, device=context.device)
    behind = (index - in_newest).clamp_min(0)
    rank = (behind // page_size + 1).clamp_max(order.shape[2] - 1)
    of_page = order.take_along_dim(rank[:, None], 2) * page_size + (behind % page_size)[:, None]
    newest_first = context.lengths[:, None] - 1 - index
    positions = torch.where((index < in_newest)[:, None], newest_first[:, None], of_page)
    return select_positions(context, positions, tokens.expand(-1, order.shape[1]))
