"""DELTA, for the runtime."""

from __future__ import annotations

from collections.abc import Collection

from winnow_kernels.decode.declaration import Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.delta.reference import DeltaStep
from winnow_kernels.policies.delta.selector import KIND, DeltaSelector
from winnow_kernels.selection.pages import pages_kept, pages_of


class DeltaDeclaration(Declaration[Delta]):
    """Whole pages, which Δ-layers find in their own attention."""

    kind = KIND
    crossover = Crossover(cpu=8192, cuda=0)
    columns = Columns(("pages", "recent"))
    has_own_layers = True
    buffer_bytes = SCRATCH_BYTES

    def budget(self, parameters: Delta, prompt_length: int, length: int, page_size: int) -> int:
        return pages_kept(parameters.budget, parameters.recency, parameters.sinks, page_size) * page_size

    def step(self, batch: PolicyBatch) -> DeltaStep:
        parameters = batch.parameters(Delta)
        return DeltaStep(batch.context, batch.scale, batch.termination, parameters, batch.indexes.page_size)

    def own_parameters(self, parameters: Delta, prompt_length: int, page_size: int) -> OwnParameters:
        pages = pages_kept(parameters.budget, parameters.recency, parameters.sinks, page_size)
        return OwnParameters({"pages": pages, "recent": pages_of(parameters.recency, page_size)})

    def selector(self, server: Server) -> DeltaSelector:
        return DeltaSelector(server)

    def own_layers(self, parameters: Delta) -> Collection[int]:
        return parameters.named_layers


DECLARATION = DeltaDeclaration()
