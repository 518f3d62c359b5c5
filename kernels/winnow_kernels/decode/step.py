"""What every decode policy is: a way to attend, in each layer of a step, for the requests that chose it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import Attended, attend
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.selection.tokens import Selection


class DecodeStep(ABC):
    """One decode step of the requests that share a policy; made anew for each step, called layer by layer.

    Attributes:
        context: where the requests' tokens lie, the newest included; its key and value are in the cache.
        scale: what scores are multiplied by before the softmax.
        termination: early termination of each request's selections; None if none of them asks for it.
    """

    def __init__(self, context: Context, scale: float, termination: Termination | None) -> None:
        self.context = context
        self.scale = scale
        self.termination = termination

    @abstractmethod
    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        """Return what ``queries``, [requests, query heads, head dim], attend to in ``layer``."""

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        """Return the attention output, [requests, query heads, head dim], in the queries' dtype."""
        selection = self.select(layer, queries, cache, meter)
        attended = attend(queries, cache, selection, self.scale, meter, self.termination)
        self.note(selection, attended)
        return attended.output

    def note(self, selection: Selection, attended: Attended) -> None:  # noqa: B027
        """Take note of what was read of the selection that ``select`` has just returned."""

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:  # noqa: B027
        """Add what only this policy knows to the requests' statistics, after the last of ``layers`` layers."""
