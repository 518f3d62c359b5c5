"""Greedy answers without a server: prompts are read one by one, then decoded together from a KV cache of fixed size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smollm2_training.network import Network, Weights

_CHECK_EVERY = 8
"""Decode steps between two looks at whether every answer has ended."""


class Decoder:
    """Answers for one model.

    Args:
        network: not compiled.
        weights: base or merged.
        rope_base: base of the rotary frequencies.
    """

    def __init__(self, network: Network, weights: Weights, rope_base: float) -> None:
        self._network, self._weights, self._rope_base = network, weights, rope_base

    @torch.inference_mode()
    def answers(self, prompts: list[list[int]], most: int, end: int) -> list[list[int]]:
        """Greedy continuations of ``prompts``, each of up to ``most`` tokens, without ``end`` and what follows it."""
        shape, weights = self._network.shape, self._weights
        device, dtype = weights.embedding.device, weights.embedding.dtype
        capacity = max(len(prompt) for prompt in prompts) + most
        size = (shape.layers, len(prompts), shape.kv_heads, capacity, shape.head_dim)
        keys, values = (torch.zeros(size, device=device, dtype=dtype) for _ in range(2))
        first = []
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor(prompt, device=device)
            whole = self._network.causal(1)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, row: int = row) -> Tensor:
                keys[layer, row, :, : len(k)] = k.transpose(0, 1)
                values[layer, row, :, : len(v)] = v.transpose(0, 1)
                return whole(layer, q, k, v)  # noqa: B023

            hidden = self._network.hidden(
                weights, tokens, torch.arange(len(prompt), device=device), self._rope_base, attend
            )
            first.append(hidden[-1])
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        token = F.linear(torch.stack(first), weights.embedding).float().argmax(-1)
        written = [token]
        rows = torch.arange(len(prompts), device=device)
        places = torch.arange(capacity, device=device)

        def attend_cached(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer, rows, :, lengths] = k
            values[layer, rows, :, lengths] = v
            query = q.view(len(prompts), shape.kv_heads, shape.group, shape.head_dim)
            scores = (query @ keys[layer].transpose(2, 3)).float() * shape.head_dim**-0.5
            scores.masked_fill_(places > lengths[:, None, None, None], float("-inf"))
            attended: Tensor = scores.softmax(-1).to(dtype) @ values[layer]
            return attended.view(len(prompts), shape.heads, shape.head_dim)

        ended = token == end
        for step in range(1, most):
            if step % _CHECK_EVERY == 0 and bool(ended.all()):
                break
            hidden = self._network.hidden(weights, token, lengths, self._rope_base, attend_cached)
            token = F.linear(hidden, weights.embedding).float().argmax(-1)
            lengths += 1
            ended |= token == end
            written.append(token)
        table = torch.stack(written, 1).tolist()
        return [row[: row.index(end)] if end in row else row for row in table]
