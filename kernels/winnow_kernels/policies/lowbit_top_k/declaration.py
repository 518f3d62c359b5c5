"""``lowbit_top_k``, for the runtime."""

from __future__ import annotations

from winnow_kernels.decode.coded_tokens import WHOLE_SHARE, read_whole_until, tokens_read
from winnow_kernels.decode.declaration import Crossover
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.step_budget import StepBudgetDeclaration
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_k.reference import LowBitTopKStep
from winnow_kernels.policies.lowbit_top_k.selector import KIND, LowBitTopKSelector


class LowBitTopKDeclaration(StepBudgetDeclaration[LowBitTopK]):
    """A fixed number of tokens, by low-bit keys.

    On a CPU it was slower than dense attention at 16,384 and 30,000 tokens: the codes of all keys are unpacked.

    On a GPU a layer with 8 requests took 0.38 of dense attention's time at 32,768 tokens and a budget of 1,024, and
    0.25 at 131,072 and 4,096. With one request its launches take longer than dense attention up to some 32,768 tokens.
    """

    kind = KIND
    crossover = Crossover(cpu=32_768, cuda=32_768)
    whole_share = WHOLE_SHARE
    index = KeyCodes
    buffer_bytes = SCRATCH_BYTES

    def budget(self, parameters: LowBitTopK, prompt_length: int, length: int, page_size: int) -> int:
        return tokens_read(parameters.tokens(length - 1), parameters.sinks, length, page_size)

    def covered_by(self, tokens: int) -> int:
        return read_whole_until(tokens)

    def step(self, batch: PolicyBatch) -> LowBitTopKStep:
        parameters = batch.parameters(LowBitTopK)
        step = LowBitTopKStep(batch.context, batch.scale, batch.termination, parameters, batch.indexes[KeyCodes])
        batch.count_built(step.index_built_tokens)
        return step

    def selector(self, server: Server) -> LowBitTopKSelector:
        return LowBitTopKSelector(server)


DECLARATION = LowBitTopKDeclaration()
