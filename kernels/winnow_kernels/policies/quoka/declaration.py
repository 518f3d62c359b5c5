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

    The crossovers are those of reading every key: no server was timed with codes. On a GPU a layer with 8 requests and
    a budget of 1,024 took 0.85 of dense attention's time at 8,192 tokens, 0.4 at 32,768 and 0.22 at 131,072.
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
