"""``lowbit_top_k`` in the decode steps of a server on a GPU."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.decode.gpu_selector import note_budgets
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.policies.lowbit_top_p.gpu.state import Policies
from winnow_kernels.policies.lowbit_top_p.selector import CodedSelector

KIND = "lowbit_top_k"


class LowBitTopKSelector(CodedSelector):
    """As many tokens as the budget, with the largest shares of the attention mass."""

    kind = KIND
    by_key = True

    def asked(self, part: Step, rows: slice, acts: Tensor) -> Policies:
        del rows
        own = part.parameters
        nothing = self.nothing[: part.rows]
        return Policies(acts, own.shares, own.sinks, nothing, nothing, own.own(KIND, "budget"), own.by_score)

    def finish(self, step: Step, statistics: Statistics) -> None:
        super().finish(step, statistics)
        note_budgets(step, step.parameters.own(KIND, "budget"), statistics)
