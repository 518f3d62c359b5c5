"""Batches of random tokens that teach the network to copy and to recall before it sees any text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Token rows and which of their tokens are learned.

    Attributes:
        tokens: int64 [batch, length].
        weights: float32 [batch, length]; the weight of predicting each token from those before it, 0 for most.
    """

    tokens: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Batch:
        """A copy on ``device``."""
        return Batch(self.tokens.to(device, non_blocking=True), self.weights.to(device, non_blocking=True))


def copying(rows: int, length: int, first_token: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """Random tokens in which one segment comes twice; its repetition is learned, from the second token on."""
    device = generator.device
    tokens = torch.randint(first_token, vocabulary, (rows, length), generator=generator, device=device)
    fraction = torch.rand(3, rows, 1, generator=generator, device=device)
    size = (4 + fraction[0] * (length // 2 - 4)).long()
    start = (fraction[1] * (length - 2 * size)).long()
    again = start + size + (fraction[2] * (length - 2 * size - start)).long()
    place = torch.arange(length, device=device).expand(rows, length)
    repeated = (place >= again) & (place < again + size)
    tokens = tokens.gather(1, torch.where(repeated, place - again + start, place))
    return Batch(tokens, (repeated & (place > again)).float())


def recall(
    rows: int,
    length: int,
    first_token: int,
    vocabulary: int,
    generator: torch.Generator,
    key_size: int,
    link_size: int,
    value_size: int,
    filler: int,
) -> Batch:
    """Records of key, linking tokens (one set a row) and value among filler, then the same again in another order.

    The values of the second part, a quarter of the row, are learned.
    """
    device = generator.device
    record = key_size + link_size + value_size
    slot = record + filler
    records = max(2, length * 3 // 4 // slot)
    queries = min(records, (length - records * slot) // record)

    def draw(*size: int) -> Tensor:
        return torch.randint(first_token, vocabulary, size, generator=generator, device=device)

    if key_size == 1:
        distinct = torch.rand(rows, vocabulary - first_token, generator=generator, device=device)
        keys = first_token + distinct.topk(records, dim=1).indices[:, torch.randperm(records, device=device)][..., None]
    else:
        keys = draw(rows, records, key_size)
    link = draw(rows, 1, link_size).expand(rows, records, link_size)
    table = torch.cat((keys, link, draw(rows, records, value_size)), dim=2)
    told = torch.cat((table, draw(rows, records, filler)), dim=2).flatten(1)
    order = torch.rand(rows, records, generator=generator, device=device).argsort(dim=1)[:, :queries]
    asked = table.gather(1, order[..., None].expand(-1, -1, record)).flatten(1)
    padding = draw(rows, length - told.shape[1] - asked.shape[1])
    tokens = torch.cat((told, padding, asked), dim=1)
    weights = torch.zeros(rows, length, device=device)
    is_value = torch.arange(record, device=device) >= key_size + link_size
    weights[:, length - asked.shape[1] :] = is_value.repeat(queries).float()
    return Batch(tokens, weights)
