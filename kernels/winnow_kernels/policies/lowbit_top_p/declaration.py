"""``lowbit_top_p``, for the runtime."""

from __future__ import annotations

from winnow_kernels.decode.coded_tokens import tokens_read
from winnow_kernels.decode.declaration import ALWAYS, Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.lowbit_top_p.reference import LowBitTopPStep
from winnow_kernels.policies.lowbit_top_p.selector import KIND, LowBitTopPSelector


class LowBitTopPDeclaration(Declaration[LowBitTopP]):
    """As many tokens as hold a share of the attention, by low-bit keys.

    On a CPU it was slower than dense attention at 16,384 and 30,000 tokens of the shipped model, whose attention is
    diffuse: at p = 0.9 two fifths of a context are read.

    On a GPU layers were timed. With 8 requests a layer took 0.82 of dense attention's time at 8,192 tokens, 0.38 at
    32,768 and 0.23 at 131,072; 1.2 at 4,096. With one request it took 1.14 at 32,768, which decides the crossover.
    """

    kind = KIND
    crossover = Crossover(cpu=32_768, cuda=32_768)
    columns = Columns(("least", "most"))
    index = KeyCodes
    buffer_bytes = SCRATCH_BYTES

    def budget(self, parameters: LowBitTopP, prompt_length: int, length: int, page_size: int) -> int | None:
        if parameters.max_tokens is None:
            return None
        return tokens_read(parameters.max_tokens, parameters.sinks, length, page_size)

    def covered_until(self, parameters: LowBitTopP, prompt_length: int, page_size: int) -> int:
        """Return 0, but for a share that takes everything: below a cap, too, a step reads what holds the share."""
        return ALWAYS if parameters.takes_all and parameters.max_tokens is None else 0

    def step(self, batch: PolicyBatch) -> LowBitTopPStep:
        parameters = batch.parameters(LowBitTopP)
        step = LowBitTopPStep(batch.context, batch.scale, batch.termination, parameters, batch.indexes[KeyCodes])
        batch.count_built(step.index_built_tokens)
        return step

    def own_parameters(self, parameters: LowBitTopP, prompt_length: int, page_size: int) -> OwnParameters:
        # The share to aim at depends on the index, too: the selector holds it.
        return OwnParameters({"least": parameters.min_tokens, "most": parameters.max_tokens or 0})

    def selector(self, server: Server) -> LowBitTopPSelector:
        return LowBitTopPSelector(server)

    def order_matters(self, parameters: LowBitTopP, length: int) -> bool:
        """Return whether the cap may leave out tokens that hold the share."""
        return parameters.max_tokens is not None and parameters.max_tokens < length


DECLARATION = LowBitTopPDeclaration()
