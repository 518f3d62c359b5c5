"""StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, 3.2).

Every KV head of every layer attends to the first tokens of the context, the attention sinks, and to the newest ones.
Keys keep the rotary positions that they were cached with: the paper, which evicts, numbers them anew within its
cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.selection.tokens import Selection


class StreamingLLMStep(DecodeStep):
    """Attend to the sinks, then to the window from the newest token back. The same in all layers."""

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[StreamingLLM],
    ) -> None:
        super().__init__(context, scale, termination)
        limits = torch.tensor([(p.sinks, p.window) for p in parameters], device=context.device)
        sinks = torch.minimum(limits[:, 0], context.lengths)
        self._counts = sinks + torch.minimum(limits[:, 1], context.lengths - sinks)
        width = min(max(p.sinks + p.window for p in parameters), context.longest)
        index = context.positions[:width]
        newest_first = context.lengths[:, None] - 1 - (index - sinks[:, None])
        positions = torch.where(index < sinks[:, None], index, newest_first)
        self._slots = context.slots_at(positions.where(index < self._counts[:, None], 0))

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        heads = cache.kv_heads
        return Selection(self._slots[:, None].expand(-1, heads, -1), self._counts[:, None].expand(-1, heads))
