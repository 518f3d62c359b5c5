"""PyramidKV, for the runtime. Its crossover is taken to be SnapKV's, whose kernels it shares."""

from __future__ import annotations

from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.pyramidkv.reference import PyramidKVParameters
from winnow_kernels.policies.snapkv.declaration import VotedDeclaration


class PyramidKVDeclaration(VotedDeclaration[PyramidKV]):
    """Budgets that shrink from layer to layer."""

    def kept_parameters(self, parameters: PyramidKV, budget: int, layers: int) -> PyramidKVParameters:
        return PyramidKVParameters(budget, parameters.kernel_size, layers, sinks=parameters.sinks)


DECLARATION = PyramidKVDeclaration()
