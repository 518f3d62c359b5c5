"""Losses over the vocabulary, a chunk of tokens at a time: the logits of all tokens are never there at once.

Each chunk's gradient is computed with its loss, so that nothing of the logits is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096
"""Tokens whose logits are there at once: 800 MB in float32 at 49,152 words."""


def _cross_entropy_chunk(
    hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss of each token, whether it was predicted, and the gradient for ``hidden``."""
    logits = F.linear(hidden, embedding).float()
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    loss = (log_total - logits.gather(1, targets[:, None]))[:, 0] * weights
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = ((logits - log_total).exp() - is_target.float()) * weights[:, None]
    return loss, logits.argmax(-1) == targets, gradient.to(hidden.dtype) @ embedding


def _divergence_chunk(
    hidden: Tensor, embedding: Tensor, teacher: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted KL(teacher ‖ student) of each token, whether both prefer the same, and the gradient for ``hidden``."""
    student_logits = F.linear(hidden, embedding).float()
    teacher_logits = F.linear(teacher, embedding).float()
    student_log = student_logits.log_softmax(-1)
    teacher_log = teacher_logits.log_softmax(-1)
    expected = teacher_log.exp()
    loss = (expected * (teacher_log - student_log)).sum(-1) * weights
    gradient = (student_log.exp() - expected) * weights[:, None]
    same = student_logits.argmax(-1) == teacher_logits.argmax(-1)
    return loss, same, gradient.to(hidden.dtype) @ embedding


_Chunk = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@cache
def _compiled(chunk: _Chunk) -> _Chunk:
    return torch.compile(chunk, dynamic=False)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        embedding: Tensor,
        targets: Tensor,
        weights: Tensor,
        chunk: _Chunk,
    ) -> tuple[Tensor, Tensor]:
        # Whole chunks only, so that one compilation serves all; padding has no weight.
        count = hidden.shape[0]
        padding = -count % CHUNK
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), device=hidden.device)
        right = torch.empty(count, dtype=torch.bool, device=hidden.device)
        for start in range(0, count, CHUNK):
            end = min(start + CHUNK, count)
            parts = [hidden[start:end], targets[start:end], weights[start:end]]
            if end - start < CHUNK:
                parts = [torch.cat((part, part.new_zeros(padding, *part.shape[1:]))) for part in parts]
            loss, same, slope = chunk(parts[0], embedding, parts[1], parts[2])
            total += loss.sum()
            right[start:end] = same[: end - start]
            gradient[start:end] = slope[: end - start]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None


def cross_entropy(
    hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Sum of weighted cross-entropies.

    Args:
        hidden: [n, hidden], what predicts.
        embedding: [vocabulary, hidden]; no gradient flows to it.
        targets: int64 [n], what comes next.
        weights: float32 [n].
        compiled: fuse each chunk's arithmetic; for a GPU.

    Returns:
        The sum, and bool [n]: which targets were the most probable.
    """
    chunk = _compiled(_cross_entropy_chunk) if compiled else _cross_entropy_chunk
    total, right = _Chunked.apply(hidden, embedding, targets, weights, chunk)  # type: ignore[no-untyped-call]
    return total, right


def divergence(
    hidden: Tensor, embedding: Tensor, teacher: Tensor, weights: Tensor, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Sum of weighted divergences KL(teacher ‖ student) over the whole vocabulary.

    Args:
        hidden: [n, hidden] of the model being trained.
        embedding: [vocabulary, hidden], of both.
        teacher: [n, hidden] of the model that it started from.
        weights: float32 [n].
        compiled: fuse each chunk's arithmetic; for a GPU.

    Returns:
        The sum, and bool [n]: where both find the same token most probable.
    """
    chunk = _compiled(_divergence_chunk) if compiled else _divergence_chunk
    total, same = _Chunked.apply(hidden, embedding, teacher, weights, chunk)  # type: ignore[no-untyped-call]
    return total, same
