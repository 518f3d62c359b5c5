"""The observation window of a prompt: its last queries, kept during prefill, and what they vote for."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter, gather_keys
from winnow_kernels.attend.reference import group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.selection.tokens import select_positions
from winnow_kernels.softmax import capped

_MAX_SCORES = 2**25
"""Scores of one pass while votes are counted: 128 MiB."""


class ObservationBuffer:
    """The queries of a prompt's last tokens, layer by layer, collected from one prefill chunk after another.

    Attributes:
        prompt_length: tokens in the prompt.
        window: tokens whose queries are kept; fewer than asked for if the prompt is shorter.
    """

    def __init__(self, window: int, prompt_length: int) -> None:
        if window < 1:
            raise ValueError(f"window: must be at least 1; it is {window}")
        if prompt_length < 1:
            raise ValueError(f"prompt_length: must be at least 1; it is {prompt_length}")
        self.prompt_length = prompt_length
        self.window = min(window, prompt_length)
        self._queries: dict[int, Tensor] = {}
        self._recorded: dict[int, set[int]] = {}

    @property
    def first_position(self) -> int:
        """Position of the window's first token."""
        return self.prompt_length - self.window

    def record(self, layer: int, queries: Tensor, first_position: int) -> None:
        """Keep those of a chunk's queries that lie in the window.

        Args:
            layer: the layer's number.
            queries: [new tokens, query heads, head dim], rotated.
            first_position: position of the first of them.
        """
        start = max(first_position, self.first_position)
        end = min(first_position + len(queries), self.prompt_length)
        if start >= end:
            return
        if layer not in self._queries:
            self._queries[layer] = queries.new_empty(self.window, *queries.shape[1:])
            self._recorded[layer] = set()
        place = slice(start - self.first_position, end - self.first_position)
        self._queries[layer][place] = queries[start - first_position : end - first_position]
        self._recorded[layer].update(range(start, end))

    def votes(self, layer: int, cache: LayerCache, slots: Tensor, scale: float, meter: Meter) -> Tensor:
        """Return how much attention the window pays to each token before it (SnapKV, arXiv 2404.14469, section 4.1).

        That is the softmax of each query's causal scores over the whole prompt, the window's own tokens included,
        summed over the window's queries and averaged over the query heads of a group.

        Args:
            layer: the layer's number.
            cache: the layer's KV cache.
            slots: int64 [prompt length]; where the prompt's tokens lie.
            scale: what scores are multiplied by before the softmax.
            meter: counts the prompt's keys, once; of one row.

        Returns:
            float32 [KV heads, prompt length − window].

        Raises:
            ValueError: not all of the window's queries were recorded.
        """
        missing = set(range(self.first_position, self.prompt_length)) - self._recorded.get(layer, set())
        if missing:
            raise ValueError(
                f"observation window: of layer {layer}, {len(missing)} of {self.window} queries were not recorded, the"
                f" first at position {min(missing)}"
            )
        prompt = Context(slots[None], torch.tensor([self.prompt_length], device=slots.device))
        everything = prompt.positions.expand(1, cache.kv_heads, -1)
        counts = prompt.lengths[:, None].expand(-1, cache.kv_heads)
        keys = gather_keys(cache, select_positions(prompt, everything, counts), meter)[0].float().mT
        total = keys.new_zeros(cache.kv_heads, 1, self.first_position)
        queries = self._queries[layer].float() * scale
        at_once = max(1, _MAX_SCORES // (queries.shape[1] * self.prompt_length))
        for first in range(0, self.window, at_once):
            # [KV heads, queries × group, head dim]: one product for all query heads of a group.
            grouped = group(queries[first : first + at_once], cache.kv_heads).transpose(0, 1)
            scores = capped(grouped.flatten(1, 2) @ keys, cache.softmax.cap)
            own = self.first_position + first + torch.arange(grouped.shape[1], device=slots.device)
            later = prompt.positions[self.first_position :] > own.repeat_interleave(grouped.shape[2])[:, None]
            scores[..., self.first_position :].masked_fill_(later, -torch.inf)
            mean = scores.new_full((cache.kv_heads, 1, scores.shape[1]), 1 / grouped.shape[2])
            total += mean @ scores.softmax(-1)[..., : self.first_position]
        return total[:, 0]

    def forget(self, layer: int) -> None:
        """Drop a layer's queries, once they have voted."""
        self._queries.pop(layer, None)
        self._recorded.pop(layer, None)
