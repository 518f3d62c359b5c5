"""Quest (Tang et al., "Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv 2406.10774, section 3.2).

A page is as promising as the highest score that a key within its bounds could have. Each KV head attends to its most
promising pages, to the page of the newest token and to those that hold sinks (the paper has none). Quest ranks pages
for each query head; here a page's rank is that of the query head of the group that scores it highest, so that a KV head
never reads more than the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.full_layers import FullLayersStep
from winnow_kernels.decode.row_groups import termination_of
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.selection.pages import order_pages, pages_kept, pages_of, select_pages
from winnow_kernels.selection.tokens import Selection


class QuestStep(FullLayersStep["QuestStep"]):
    """Attend to the newest page, then to those of the sinks, then to the others in the order of their upper scores.

    Attributes:
        index_built_tokens: for each request, the tokens of the pages whose bounds this step had to compute.
    """

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[Quest],
        bounds: PageBounds,
    ) -> None:
        super().__init__(context, scale, termination, [p.full_layers for p in parameters])
        self._parameters = parameters
        self._bounds = bounds
        self._page_size = bounds.generations.page_size
        self._newest_page = (context.lengths - 1) // self._page_size
        earlier = (context.longest - 1) // self._page_size
        self._is_earlier = torch.arange(earlier, device=context.device) < self._newest_page[:, None]
        first_slots = context.slots[:, : earlier * self._page_size : self._page_size]
        self._pages = (first_slots // self._page_size).where(self._is_earlier, 0)
        most = [pages_kept(p.budget, 1, p.sinks, self._page_size) for p in parameters]
        self._width = min(max(most), earlier + 1)
        self._sinks = torch.tensor([pages_of(p.sinks, self._page_size) for p in parameters], device=context.device)
        self._counts = torch.minimum(torch.tensor(most, device=context.device), self._newest_page + 1)
        self.index_built_tokens = [
            self._page_size * bounds.ensure(pages[is_earlier])
            for pages, is_earlier in zip(self._pages, self._is_earlier, strict=True)
        ]

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        grouped = group(queries, cache.kv_heads)
        upper = self._bounds.upper_scores(layer, grouped, self._pages, self._newest_page, meter)
        # One page more, the longest context's newest, has no bounds as yet.
        promise = F.pad(upper.amax(2), (0, 1))
        recent = torch.ones_like(self._newest_page)
        order = order_pages(promise, self._newest_page, recent, self._sinks, self._width)
        return select_pages(self.context, order, self._counts, self._page_size)

    def step_of(self, rows: list[int]) -> QuestStep:
        return QuestStep(
            self.context.rows(rows),
            self.scale,
            termination_of(self.termination, rows),
            [self._parameters[row] for row in rows],
            self._bounds,
        )
