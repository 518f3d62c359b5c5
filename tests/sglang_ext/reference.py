"""What a dense server must answer, by transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

NARROW = "narrow"
"""Attention called ``eager``, to keys and values that were stored in 8 bits."""


def _narrow_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
    stored = (states.to(torch.float8_e4m3fn).to(states.dtype) for states in (key, value))
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, *stored, *rest, **more)


AttentionInterface.register(NARROW, _narrow_attention)
AttentionMaskInterface.register(NARROW, eager_mask)


class Reference:
    """The model of a folder, in float32 on the CPU.

    Of soft caps, of which transformers' ``sdpa`` knows nothing, only the ``attention`` called ``eager`` takes account,
    and ``NARROW``.
    """

    def __init__(self, folder: Path, attention: str | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        self.model = model.eval()

    def logprobs(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Return the log-probability of each token of ``answer``."""
        logprobs: list[float] = self._chosen(self._logits(prompt, answer).log_softmax(dim=1), answer).tolist()
        return logprobs

    def logit_gaps(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Return, for each token of ``answer``, how far its logit is below the likeliest token's.

        Zeros, but for rounding, if and only if ``answer`` is greedy; where two tokens tie, either is.
        """
        logits = self._logits(prompt, answer)
        gaps: list[float] = (logits.max(dim=1).values - self._chosen(logits, answer)).tolist()
        return gaps

    @torch.inference_mode()
    def _logits(self, prompt: list[int], answer: list[int]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        return logits

    @staticmethod
    def _chosen(of_tokens: Tensor, answer: list[int]) -> Tensor:
        return of_tokens.gather(1, torch.tensor(answer)[:, None])[:, 0]
