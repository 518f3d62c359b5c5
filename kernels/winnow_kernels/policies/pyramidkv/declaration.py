"""PyramidKV, for the runtime. Its crossover is taken to be SnapKV's, whose kernels it shares."""

from __future__ import annotations

from collections.abc import Sequence

from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.pyramidkv.reference import PyramidKVState
from winnow_kernels.policies.snapkv.declaration import VotedDeclaration
from winnow_kernels.policies.snapkv.observation import ObservationBuffer


class PyramidKVDeclaration(VotedDeclaration[PyramidKV]):
    """Budgets that shrink from layer to layer."""

    def state(self, parameters: PyramidKV, observation: ObservationBuffer, layers: Sequence[int]) -> PyramidKVState:
        return PyramidKVState(parameters, observation, layers)


DECLARATION = PyramidKVDeclaration()
