"""SparQ (Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", arXiv 2312.04985, section 4).

A key's approximate score is its product with the query in the channels in which the query is largest. The tokens that
score highest are attended to, with the newest page and the sinks (the paper keeps a local window and has no sinks).

A group's query heads share the channels, those of the largest sum of magnitudes, as in the paper. A key's rank is that
of the query head of the group that scores it highest, as with Quest here; the paper adds up their weights. The mean
value that the paper mixes in for what is not read is left out: attention to a selection is the same for all policies.

The paper saves bandwidth with a second copy of the keys, by channel. Here whole keys are read, and counted so: what the
policy shows is how well the approximate scores select.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.attend import dense
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.top_tokens import TopTokensStep
from winnow_kernels.policies.sparq.parameters import SparQ


def largest_channels(grouped: Tensor, channels: Tensor) -> Tensor:
    """Return the queries with all but their largest channels set to 0.

    Args:
        grouped: [requests, KV heads, group, head dim].
        channels: int64 [requests]; how many each keeps. Of equal ones the first count first.
    """
    magnitudes = grouped.float().abs().sum(2)
    rank = magnitudes.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return grouped.where((rank < channels[:, None, None])[:, :, None], 0)


class SparQStep(TopTokensStep):
    """Attend to the newest page, then to the sinks, then to keys in the order of their approximate scores."""

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[SparQ],
        page_size: int,
    ) -> None:
        super().__init__(context, scale, termination, parameters, page_size)
        self._channels = torch.tensor([p.channels for p in parameters], device=context.device)

    def scores(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> list[Tensor]:
        kept = largest_channels(group(queries, cache.kv_heads), self._channels)
        meter.count_bytes(self.scored * (cache.kv_heads * cache.vector_bytes))
        keys = (dense.take(cache.keys, span).float().permute(1, 2, 0) for span in self.spans)
        return [(own @ of_request).amax(1) for own, of_request in zip(kept, keys, strict=True)]
