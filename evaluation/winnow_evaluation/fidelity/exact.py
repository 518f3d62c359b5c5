"""Exact attention from many tokens of a text to what is before each: one product for all that share a prompt.

What follows a prompt is computed at once, not token by token: each token is a row of the queries that sees the keys up
to its own. Shapes below: [prompts, KV heads, tokens, group, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_kernels.softmax import PLAIN, Softmax, capped

_COPIES: Final = 4
"""Tensors of the scores' shape that are held at once."""


@dataclass(frozen=True)
class Following:
    """The tokens behind some prompts that one pass computes.

    Attributes:
        batch: all prompts.
        prompts: which of them.
        first: how many tokens behind the prompts were computed before.
        tokens: how many this pass computes.
        memory: bytes that scores may take at a time.
    """

    batch: PrefilledBatch
    prompts: range
    first: int
    tokens: int
    memory: int

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [prompts, tokens]: the context of each token, itself included."""
        device = self.batch.model.device
        after = self.first + 1 + torch.arange(self.tokens, device=device)
        own = self.batch.lengths[self.prompts.start : self.prompts.stop]
        return torch.tensor(own, device=device)[:, None] + after

    @cached_property
    def slots(self) -> Tensor:
        """int64 [prompts, tokens]: where their keys and values go."""
        return self.batch.slots[self.prompts.start : self.prompts.stop].gather(1, self.lengths - 1)

    def parts(self) -> Iterator[slice]:
        """Yield the prompts, counted from the first of them, as many at a time as fit."""
        model = self.batch.model
        of_prompt = model.query_heads * self.tokens * int(self.lengths.max()) * torch.float32.itemsize
        at_once = max(1, self.memory // (_COPIES * of_prompt))
        for begin in range(0, len(self.prompts), at_once):
            yield slice(begin, min(begin + at_once, len(self.prompts)))


@dataclass(frozen=True)
class Scores:
    """Exact scores of some prompts' tokens.

    Attributes:
        scores: float32 [prompts, KV heads, tokens, group, context]; -inf where nothing is visible.
        visible: bool [prompts, 1, tokens, context].
        values: float32 [prompts, KV heads, context, head dim].
        softmax: of the layer; its cap is in the scores.
    """

    scores: Tensor
    visible: Tensor
    values: Tensor
    softmax: Softmax = PLAIN

    @classmethod
    def of(cls, following: Following, layer: int, queries: Tensor, part: slice) -> Scores:
        """Score ``queries``, [prompts, tokens, query heads, head dim], of the prompts of a part.

        What is before the layer's sliding window, if it has one, is not visible.
        """
        lengths = following.lengths[part]
        longest = int(lengths.max())
        keys, values = following.batch.vectors(layer, following.prompts[part], longest)
        grouped = queries[part].float().unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
        scores = (grouped.flatten(2, 3) @ keys.mT).mul_(following.batch.scale).unflatten(2, grouped.shape[2:4])
        softmax = following.batch.model.softmaxes[layer]
        scores = capped(scores, softmax.cap)
        places = torch.arange(longest, device=lengths.device)
        visible = places < lengths[..., None]
        if (window := following.batch.model.windows[layer]) is not None:
            visible &= places >= lengths[..., None] - 1 - window
        scores.masked_fill_(~visible[:, None, :, None], -torch.inf)
        return cls(scores, visible[:, None], values, softmax)

    def log_sum_exp(self) -> Tensor:
        """Return that of the scores, without sinks: float32 [prompts, tokens, query heads]."""
        return _of_query_heads(self.scores.logsumexp(-1))

    def weights(self) -> Tensor:
        """Return the attention weights among tokens, without sinks, in the form of the scores."""
        weights: Tensor = self.scores.softmax(-1)
        return weights

    def attend(self, read: Tensor | None = None) -> Tensor:
        """Attend to all that is visible, or of it to what is ``read``; return [prompts, tokens, query heads, head dim].

        Args:
            read: bool [prompts, KV heads, tokens, context], or None.
        """
        scores = self.scores if read is None else self.scores.masked_fill(~read[:, :, :, None], -torch.inf)
        output = (scores.softmax(-1).flatten(2, 3) @ self.values).unflatten(2, scores.shape[2:4])
        heads_inside: Tensor = output.transpose(1, 2).flatten(2, 3)
        if self.softmax.sink_logits is None:
            return heads_inside
        return self.softmax.with_sinks(heads_inside, _of_query_heads(scores.logsumexp(-1)))


def _of_query_heads(numbers: Tensor) -> Tensor:
    """Return ``numbers``, [prompts, KV heads, tokens, group], as [prompts, tokens, query heads]."""
    return numbers.transpose(1, 2).flatten(2)
