"""SnapKV, for the runtime, and what policies share that keep a part of the prompt for its votes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch

from winnow_kernels.decode.declaration import ALWAYS, Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.policies.snapkv.gpu_positions import CAPACITY
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.parameters import SnapKV, Voted
from winnow_kernels.policies.snapkv.reference import SnapKVState, SnapKVStep
from winnow_kernels.policies.snapkv.selector import KIND, StoredSelector

V = TypeVar("V", bound=Voted)


class VotedDeclaration(Declaration[V]):
    """What is kept of the prompt, and all that is decoded. Policies differ in what they keep, not in the step."""

    kind = KIND
    crossover = Crossover(cpu=4096, cuda=0)
    columns = Columns(("prompt_length",))
    buffer_bytes = CAPACITY * torch.int32.itemsize
    releases = True

    @abstractmethod
    def state(self, parameters: V, observation: ObservationBuffer, layers: Sequence[int]) -> SnapKVState:
        """Return what a request keeps for the votes of the queries in ``observation``, in ``layers``."""

    def budget(self, parameters: V, prompt_length: int, length: int, page_size: int) -> int:
        return parameters.tokens(prompt_length)

    def covered_until(self, parameters: V, prompt_length: int, page_size: int) -> int:
        return ALWAYS if parameters.tokens(prompt_length) >= prompt_length else 0

    def prompt_selection(self, parameters: V, prompt_length: int, layers: Sequence[int]) -> SnapKVState:
        return self.state(parameters, ObservationBuffer(parameters.observation_window, prompt_length), layers)

    def step(self, batch: PolicyBatch) -> SnapKVStep:
        states = [request.kept for request in batch.requests if isinstance(request.kept, SnapKVState)]
        return SnapKVStep(batch.context, batch.scale, batch.termination, states)

    def own_parameters(self, parameters: V, prompt_length: int, page_size: int) -> OwnParameters:
        return OwnParameters({"prompt_length": prompt_length})

    def selector(self, server: Server) -> StoredSelector:
        return StoredSelector(server)


class SnapKVDeclaration(VotedDeclaration[SnapKV]):
    """The same budget in all layers."""

    def state(self, parameters: SnapKV, observation: ObservationBuffer, layers: Sequence[int]) -> SnapKVState:
        return SnapKVState(parameters, observation)


DECLARATION = SnapKVDeclaration()
