"""Ada-SnapKV, for the runtime. Its crossover is SnapKV's, whose kernels it shares."""

from __future__ import annotations

from collections.abc import Sequence

from winnow_kernels.policies.ada_snapkv.parameters import AdaSnapKV
from winnow_kernels.policies.ada_snapkv.reference import AdaSnapKVState
from winnow_kernels.policies.snapkv.declaration import VotedDeclaration
from winnow_kernels.policies.snapkv.observation import ObservationBuffer


class AdaSnapKVDeclaration(VotedDeclaration[AdaSnapKV]):
    """A layer's budget, which its KV heads share."""

    def state(self, parameters: AdaSnapKV, observation: ObservationBuffer, layers: Sequence[int]) -> AdaSnapKVState:
        return AdaSnapKVState(parameters, observation)


DECLARATION = AdaSnapKVDeclaration()
