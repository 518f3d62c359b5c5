"""Dense attention, for the runtime: no columns, and no selector."""

from __future__ import annotations

from winnow_kernels.decode.declaration import Crossover, Declaration
from winnow_kernels.decode.gpu_rows import OwnParameters
from winnow_kernels.decode.gpu_selector import Selector, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.policies.dense.parameters import Dense
from winnow_kernels.policies.dense.reference import DenseStep


class DenseDeclaration(Declaration[Dense]):
    """Dense attention; a step of its own where reading may stop early."""

    kind = "dense"
    crossover = Crossover(cpu=0, cuda=0)

    def budget(self, parameters: Dense, prompt_length: int, length: int, page_size: int) -> None:
        """Return None: every token is read."""

    def step(self, batch: PolicyBatch) -> DenseStep:
        return DenseStep(batch.context, batch.scale, batch.termination)

    def own_parameters(self, parameters: Dense, prompt_length: int, page_size: int) -> OwnParameters:
        return OwnParameters()

    def selector(self, server: Server) -> Selector:
        raise NotImplementedError("rows without a selection are dense")


DECLARATION = DenseDeclaration()
