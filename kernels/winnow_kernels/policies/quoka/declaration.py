"""QUOKA's decode, for the runtime."""

from __future__ import annotations

from winnow_kernels.decode.declaration import ALWAYS, Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.quoka.parameters import QuokaDecode
from winnow_kernels.policies.quoka.reference import QuokaStep
from winnow_kernels.policies.quoka.selector import KIND, QuokaSelector


class QuokaDeclaration(Declaration[QuokaDecode]):
    """Single tokens, for which every key's code is read.

    The crossovers are those of reading every key: no server was timed with codes.
    """

    kind = KIND
    crossover = Crossover(cpu=28_672, cuda=32_768)
    columns = Columns(("budget",), of_ratio="budget")
    index = KeyCodes
    buffer_bytes = SCRATCH_BYTES

    def budget(self, parameters: QuokaDecode, prompt_length: int, length: int, page_size: int) -> int:
        return parameters.tokens(length - 1)

    def covered_until(self, parameters: QuokaDecode, prompt_length: int, page_size: int) -> int:
        if parameters.budget_ratio is not None:
            return ALWAYS if parameters.budget_ratio == 1 else 0
        return super().covered_until(parameters, prompt_length, page_size)

    def step(self, batch: PolicyBatch) -> QuokaStep:
        parameters = batch.parameters(QuokaDecode)
        step = QuokaStep(batch.context, batch.scale, batch.termination, parameters, batch.indexes[KeyCodes])
        batch.count_built(step.index_built_tokens)
        return step

    def own_parameters(self, parameters: QuokaDecode, prompt_length: int, page_size: int) -> OwnParameters:
        return OwnParameters({"budget": parameters.budget or 0}, ratio=parameters.budget_ratio or 0.0)

    def selector(self, server: Server) -> QuokaSelector:
        return QuokaSelector(server)


DECLARATION = QuokaDeclaration()
