"""What is read by predicted scores, one KV head and one token at a time, straight from the policies' definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

WINDOW = 64
FLOOR = 2.0**-24


@dataclass(frozen=True)
class Head:
    """What is known of a KV head's attention.

    Attributes:
        length: of the context.
        kept: positions that are always attended to, in order.
        exact: of each query head, the scores of these, to base 2.
        predicted: of each query head, the scores of all others, in the context's order.
    """

    length: int
    kept: Sequence[int]
    exact: Sequence[Sequence[float]]
    predicted: Sequence[Sequence[float]]

    @cached_property
    def others(self) -> list[int]:
        kept = set(self.kept)
        return [position for position in range(self.length) if position not in kept]

    @cached_property
    def levels(self) -> list[list[int]]:
        """Of each query head, in eighths."""
        return [[round(8 * score) for score in scores] for scores in self.predicted]

    @cached_property
    def highest(self) -> list[float]:
        return [max(*e, *(level / 8 for level in p), -math.inf) for e, p in zip(self.exact, self.levels, strict=True)]

    @cached_property
    def totals(self) -> list[float]:
        """Of each query head, the mass of all tokens, in units of the highest score's."""
        return [
            math.fsum([2 ** (score - top) for score in e] + [2 ** (level / 8 - top) for level in p])
            for e, p, top in zip(self.exact, self.levels, self.highest, strict=True)
        ]

    @cached_property
    def kept_shares(self) -> list[float]:
        return [
            math.fsum(2 ** (score - top) for score in e) / total
            for e, top, total in zip(self.exact, self.highest, self.totals, strict=True)
        ]

    @cached_property
    def shares(self) -> list[list[float]]:
        """Of each query head, what each of the others is predicted to hold."""
        of_heads = [
            [2 ** (level / 8 - top) / total for level in levels]
            for levels, top, total in zip(self.levels, self.highest, self.totals, strict=True)
        ]
        return [[share if share >= FLOOR else 0.0 for share in shares] for shares in of_heads]

    @cached_property
    def keys(self) -> list[int]:
        """Of each of the others."""
        means = [math.fsum(shares) / len(shares) for shares in zip(*self.shares, strict=True)]
        return [max(-24 * 64, math.floor(64 * math.log2(mean))) if mean else -24 * 64 for mean in means]

    def needed(self, head: int, p: float, least: int) -> set[int]:
        """Which of the others, by number, a query head takes step by step until it has enough."""
        shares, levels = self.shares[head], self.levels[head]
        steps: dict[float, list[int]] = {}
        for number, share in enumerate(shares):
            steps.setdefault(levels[number] if share else -math.inf, []).append(number)
        taken: list[int] = []
        held = self.kept_shares[head]
        for step in sorted(steps, reverse=True):
            if held >= p and len(taken) >= least:
                break
            taken += steps[step]
            held += math.fsum(shares[number] for number in steps[step])
        return set(taken)

    def first(self, numbers: set[int], count: int) -> set[int]:
        """Those of the ``count`` highest keys; of equal ones the first."""
        return set(sorted(numbers, key=lambda number: (-self.keys[number], number))[: max(0, count)])

    def in_order(self, numbers: set[int]) -> list[int]:
        """In steps of 16 keys; of equal ones the first."""
        return sorted(numbers, key=lambda number: (-(self.keys[number] // 16), number))

    def top_p(self, p: float, bits: int, min_tokens: int, max_tokens: int | None) -> tuple[set[int], bool]:
        """Which of the others a KV head takes by codes of so many bits, by number, and whether the cap has cut them."""
        kept, aim = len(self.kept), aimed(p, bits)
        heads = range(len(self.exact))
        taken = set[int]().union(*(self.needed(head, aim, min_tokens - kept) for head in heads))
        if p > 0.999:
            taken = set(range(len(self.others)))
        if max_tokens is None or len(taken) <= max(0, max_tokens - kept) or max_tokens > 0.75 * self.length:
            return taken, False
        return set(self.in_order(taken)[: max(0, max_tokens - kept)]), True

    def top_k(self, tokens: int) -> set[int]:
        return self.first(set(range(len(self.others))), tokens - len(self.kept))

    def positions(self, taken: set[int], *, in_order: bool) -> list[int]:
        """What is attended to, in order; everything, newest first, where that is so much."""
        if len(self.kept) + len(taken) > 0.75 * self.length:
            return [*range(self.length - 1, -1, -1)]
        numbers = self.in_order(taken) if in_order else sorted(taken)
        return [*self.kept, *(self.others[number] for number in numbers)]

    def rest(self, positions: Sequence[int]) -> list[float]:
        """Of each query head, the share that is predicted for what is not read."""
        read = set(positions)
        if len(read) == self.length:
            return [0.0] * len(self.exact)
        return [
            1 - kept - math.fsum(share for share, position in zip(shares, self.others, strict=True) if position in read)
            for kept, shares in zip(self.kept_shares, self.shares, strict=True)
        ]


def aimed(p: float, bits: int) -> float:
    """The predicted share with which p is held, up to 0.999: a greater one takes everything."""
    if p > 0.999 or bits == 4:
        return p
    return min(1 - {2: 0.89, 3: 0.985}[bits] * (1 - p), 0.999)


def kept_positions(length: int, sinks: int, page_size: int) -> list[int]:
    """The newest tokens, at least 64 and back to where a page begins, and the sinks in blocks of 16."""
    begin = max(0, length - WINDOW) // page_size * page_size
    return [*range(length - 1, begin - 1, -1), *range(min(math.ceil(sinks / 16) * 16, begin))]
