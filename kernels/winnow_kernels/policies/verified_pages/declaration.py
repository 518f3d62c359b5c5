"""``verified_pages``, for the runtime."""

from __future__ import annotations

import torch

from winnow_kernels.decode.declaration import Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.request import Request
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages
from winnow_kernels.policies.verified_pages.reference import CheckedPages, PageBudget, VerifiedPagesStep
from winnow_kernels.policies.verified_pages.selector import CAPACITY, KIND, MASSES_BYTES, CheckedPagesSelector
from winnow_kernels.selection.pages import pages_kept


class VerifiedPagesDeclaration(Declaration[VerifiedPages]):
    """What checks of drafts have found, which costs drafts nothing to know. Its crossover is SnapKV's."""

    kind = KIND
    crossover = Crossover(cpu=4096, cuda=0)
    columns = Columns(("recent", "most"))
    buffer_bytes = SCRATCH_BYTES + MASSES_BYTES + CAPACITY * torch.int32.itemsize

    def budget(self, parameters: VerifiedPages, prompt_length: int, length: int, page_size: int) -> int:
        return pages_kept(parameters.budget, parameters.recency, parameters.sinks, page_size) * page_size

    def step(self, batch: PolicyBatch) -> VerifiedPagesStep:
        states = [
            _checked(request, length, batch) for request, length in zip(batch.requests, batch.lengths, strict=True)
        ]
        return VerifiedPagesStep(batch.context, batch.scale, batch.termination, states)

    def own_parameters(self, parameters: VerifiedPages, prompt_length: int, page_size: int) -> OwnParameters:
        budget = PageBudget.of(parameters, page_size)
        return OwnParameters({"recent": budget.recent, "most": budget.most})

    def selector(self, server: Server) -> CheckedPagesSelector:
        return CheckedPagesSelector(server)


def _checked(request: Request, length: int, batch: PolicyBatch) -> CheckedPages:
    """Return what the checks of a request have found, or will find."""
    if not isinstance(request.checked, CheckedPages):
        caches = batch.indexes.caches
        [parameters] = [own for own in [request.decode] if isinstance(own, VerifiedPages)]
        request.checked = CheckedPages(parameters, batch.indexes.page_size, len(caches), caches[0].kv_heads, length)
    return request.checked


DECLARATION = VerifiedPagesDeclaration()
