"""What a dense server must answer, by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """The model of a folder, in float32 on the CPU.

    Of soft caps, of which transformers' ``sdpa`` knows nothing, only the ``attention`` called ``eager`` takes account.
    """

    def __init__(self, folder: Path, attention: str | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        self.model = model.eval()

    @torch.inference_mode()
    def logit_gaps(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Return, for each token of ``answer``, how far its logit is below the likeliest token's.

        Zeros, but for rounding, if and only if ``answer`` is greedy; where two tokens tie, either is.
        """
        logits = self.model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gaps: list[float] = (logits.max(dim=1).values - chosen).tolist()
        return gaps
