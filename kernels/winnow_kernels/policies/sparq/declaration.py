"""SparQ, for the runtime."""

from __future__ import annotations

from dataclasses import replace

from winnow_kernels.decode.declaration import Crossover
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.step_budget import StepBudgetDeclaration
from winnow_kernels.policies.sparq.parameters import SparQ
from winnow_kernels.policies.sparq.reference import SparQStep
from winnow_kernels.policies.sparq.selector import KIND, SparQSelector


class SparQDeclaration(StepBudgetDeclaration[SparQ]):
    """Single tokens, for which every key is read. The crossovers are the longest contexts at which it was compared:
    it was slower than dense attention.
    """

    kind = KIND
    crossover = Crossover(cpu=28_672, cuda=32_768)
    columns = Columns(("budget", "channels"), of_ratio="budget")
    buffer_bytes = SCRATCH_BYTES
    pays_on_gpu = False

    def step(self, batch: PolicyBatch) -> SparQStep:
        page_size = batch.indexes.page_size
        return SparQStep(batch.context, batch.scale, batch.termination, batch.parameters(SparQ), page_size)

    def own_parameters(self, parameters: SparQ, prompt_length: int, page_size: int) -> OwnParameters:
        own = super().own_parameters(parameters, prompt_length, page_size)
        return replace(own, numbers={**own.numbers, "channels": parameters.channels})

    def selector(self, server: Server) -> SparQSelector:
        return SparQSelector(server.step)


DECLARATION = SparQDeclaration()
