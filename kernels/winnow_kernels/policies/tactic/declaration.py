"""Tactic, for the runtime."""

from __future__ import annotations

import torch

from winnow_kernels.decode.declaration import Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.indexes.clusters import ClusterIndex, clustered_until
from winnow_kernels.policies.tactic.gpu.selection import MAX_TOKENS
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep
from winnow_kernels.policies.tactic.selector import KIND, TacticSelector


class TacticDeclaration(Declaration[Tactic]):
    """As many tokens as hold a share of the attention, by clusters.

    The shipped model's attention is diffuse: at p = 0.9 half of a context is read, which does not pay on a CPU at any
    length that the model serves.
    """

    kind = KIND
    crossover = Crossover(cpu=32_768, cuda=20_480)
    columns = Columns(("cap", "full_layers"))
    index = ClusterIndex
    buffer_bytes = SCRATCH_BYTES
    longest_on_gpu = MAX_TOKENS

    def budget(self, parameters: Tactic, prompt_length: int, length: int, page_size: int) -> int | None:
        return parameters.max_tokens

    def covered_until(self, parameters: Tactic, prompt_length: int, page_size: int) -> int:
        """Return 0: a cap is no budget. Below it, too, a step reads what holds the share."""
        return 0

    def step(self, batch: PolicyBatch) -> TacticStep:
        clusters = batch.indexes[ClusterIndex]
        ends = [
            clustered_until(request.prompt_length, length, clusters.piece)
            for request, length in zip(batch.requests, batch.lengths, strict=True)
        ]
        parameters = batch.parameters(Tactic)
        batch.count_built(
            [
                clusters.ensure(batch.context, row, end, of_row.sinks)
                for row, (end, of_row) in enumerate(zip(ends, parameters, strict=True))
            ]
        )
        clustered = torch.tensor(ends, device=batch.context.device)
        return TacticStep(batch.context, batch.scale, batch.termination, clusters, parameters, clustered)

    def own_parameters(self, parameters: Tactic, prompt_length: int, page_size: int) -> OwnParameters:
        numbers = {"cap": parameters.max_tokens or 0, "full_layers": parameters.full_layers}
        return OwnParameters(numbers, share=parameters.p)

    def selector(self, server: Server) -> TacticSelector:
        return TacticSelector(
            server.indexes[ClusterIndex], server.scale, server.query_heads, server.requests, server.step, server.ranks
        )

    def order_matters(self, parameters: Tactic, length: int) -> bool:
        """Return whether the cap may leave out tokens that hold the share."""
        return parameters.max_tokens is not None and parameters.max_tokens < length


DECLARATION = TacticDeclaration()
