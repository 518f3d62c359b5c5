"""QUOKA's decode, for the runtime."""

from __future__ import annotations

from winnow_kernels.decode.declaration import Crossover
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.step_budget import StepBudgetDeclaration
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.quoka.parameters import QuokaDecode
from winnow_kernels.policies.quoka.reference import QuokaStep
from winnow_kernels.policies.quoka.selector import KIND, QuokaSelector


class QuokaDeclaration(StepBudgetDeclaration[QuokaDecode]):
    """Single tokens, for which every key's code is read.

    A server's crossover on a CPU is that of reading every key. On a GPU it is that of one request, whose tokens took as
    long as dense ones at 32,768 tokens, and a sixth longer at 8,192; 8 requests gain from some 8,192 tokens on.
    """

    kind = KIND
    crossover = Crossover(cpu=28_672, cuda=32_768)
    index = KeyCodes
    buffer_bytes = SCRATCH_BYTES

    def step(self, batch: PolicyBatch) -> QuokaStep:
        parameters = batch.parameters(QuokaDecode)
        step = QuokaStep(batch.context, batch.scale, batch.termination, parameters, batch.indexes[KeyCodes])
        batch.count_built(step.index_built_tokens)
        return step

    def selector(self, server: Server) -> QuokaSelector:
        return QuokaSelector(server)


DECLARATION = QuokaDeclaration()
