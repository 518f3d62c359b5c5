"""Decode over whole contexts, as a policy among others."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.attend.dense import attend_all
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.selection.tokens import Selection


class DenseStep(DecodeStep):
    """Attend to every token; with early termination the newest are read first (ART, section 3.3)."""

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        """Return all tokens, newest first."""
        del layer, queries, meter
        newest_first = self.context.lengths[:, None] - 1 - self.context.positions
        slots = self.context.slots_at(newest_first.clamp_min(0))
        heads = (-1, cache.kv_heads, -1)
        return Selection(slots[:, None].expand(heads), self.context.lengths[:, None].expand(-1, cache.kv_heads))

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        if self.termination is None:
            return attend_all(queries, self.context, cache, self.scale, meter)
        return super().attend(layer, queries, cache, meter)
