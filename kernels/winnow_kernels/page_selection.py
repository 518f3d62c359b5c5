"""From chosen pages to the tokens in them: what the page-wise policies share."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_kernels.cache import Context
from winnow_kernels.selection import Selection, select_positions


def pages_of(tokens: int, page_size: int) -> int:
    """Return how many pages hold ``tokens`` tokens."""
    return -(-tokens // page_size)


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
