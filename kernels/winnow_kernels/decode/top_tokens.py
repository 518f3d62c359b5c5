"""Steps that score every key before the newest page and attend to those that score highest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.attend import dense
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.contract.fields import StepBudgeted
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.selection.tokens import Selection, select_positions

# Above any score, and below the newest page's.
_PROMISE_OF_SINKS = torch.finfo(torch.float32).max


class TopTokensStep(DecodeStep):
    """Attend to the newest page, then to the sinks, then to keys in the order of their scores.

    Attributes:
        spans: for each request, where the tokens before its newest page lie.
        scored: int64 [requests]; how many these are.
    """

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[StepBudgeted],
        page_size: int,
    ) -> None:
        super().__init__(context, scale, termination)
        lengths = context.lengths.tolist()
        self._earlier = [(length - 1) // page_size * page_size for length in lengths]
        self.spans = [
            dense.span_of(slots[:earlier]) for slots, earlier in zip(context.slots, self._earlier, strict=True)
        ]
        self.scored = torch.tensor(self._earlier, device=context.device)
        self._sinks = [min(p.sinks, earlier) for p, earlier in zip(parameters, self._earlier, strict=True)]
        counts = [
            max(length - earlier + sinks, min(length, p.tokens(length - 1)))
            for p, length, earlier, sinks in zip(parameters, lengths, self._earlier, self._sinks, strict=True)
        ]
        self._width = max(counts)
        self._counts = torch.tensor(counts, device=context.device)
        # Promise of what is not scored: the newest page is always kept, and nothing lies beyond the context.
        self._promise = torch.where(context.inside, torch.inf, -torch.inf)

    @abstractmethod
    def scores(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> list[Tensor]:
        """Return for each request the scores of the tokens before its newest page: [KV heads, tokens], of one dtype.

        Args:
            layer: the layer's number.
            queries: [requests, query heads, head dim].
            cache: the layer's KV cache.
            meter: counts what is read.
        """

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        scores = self.scores(layer, queries, cache, meter)
        promise = self._promise[:, None].repeat(1, cache.kv_heads, 1).to(scores[0].dtype)
        for request, own in enumerate(scores):
            promise[request, :, : self._earlier[request]] = own
            promise[request, :, : self._sinks[request]] = _PROMISE_OF_SINKS
        positions = promise.topk(self._width, dim=-1, sorted=True).indices
        return select_positions(self.context, positions, self._counts[:, None].expand(-1, cache.kv_heads))
