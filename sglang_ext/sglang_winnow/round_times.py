"""What rounds of drafts and checks take beside dense decode passes, as they were measured in this server."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch

from winnow_kernels.contract.verification import CHECKED_WIDTHS, checked_width

_MEMORY: Final = 0.9
_MIN_OF_ROUND: Final = 0.1
_MAX_UNREAD: Final = 64
_DENSE: Final = "dense"
_DRAFT: Final = "draft"


@dataclass(frozen=True)
class RoundCosts:
    """What the passes of a round take, relative to a dense decode pass of the same batch.

    Attributes:
        draft: of a pass that drafts.
        checks: of what checks, with all that a round takes beside passes, for each of ``CHECKED_WIDTHS`` that is known.
    """

    draft: float
    checks: Mapping[int, float]

    def check(self, drafts: int) -> float:
        """Return what it costs to check so many drafts of every row: that of the nearest width that is known."""
        own = checked_width(drafts + 1)
        return self.checks[min(self.checks, key=lambda width: abs(width - own))]


ASSUMED: Final = RoundCosts(draft=0.2, checks={CHECKED_WIDTHS[0]: 1.0})
"""As long as nothing has been measured."""


class BatchSize(NamedTuple):
    """Batches that are taken to take as long: by powers of two.

    Attributes:
        rows: bits of their number.
        tokens: bits of the number of tokens in all contexts.
        in_steps: whether each pass of a round is a step of its own.
    """

    rows: int
    tokens: int
    in_steps: bool

    @classmethod
    def of(cls, lengths: Sequence[int], *, in_steps: bool = False) -> BatchSize:
        """Return that of a batch with contexts of these ``lengths``."""
        return cls(len(lengths).bit_length(), sum(lengths).bit_length(), in_steps)


class Clock:
    """Marks moments of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Mark the moment when the device has come to what is launched next."""
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return what lies between two moments; None if the device has not come to the second yet."""
        if not self._is_cuda:
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1000 if end.query() else None


@dataclass(frozen=True)
class _Measured:
    """So many passes of a kind between two moments, or a round that checks a width.

    Attributes:
        drafts: between the moments where a round is checked, which are not to count.
    """

    size: BatchSize
    kind: str | int
    passes: int
    begin: Any
    end: Any
    drafts: int = 0


class RoundTimes:
    """Fading means of what passes take, by the size of the batch. Nothing waits for the device."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._unread: deque[_Measured] = deque(maxlen=_MAX_UNREAD)
        self._seconds: dict[tuple[BatchSize, str | int], float] = {}
        self._begun: set[tuple[BatchSize, str | int]] = set()

    def costs(self, size: BatchSize) -> RoundCosts | None:
        """Return what rounds of a batch of ``size`` cost; None while no dense pass of one has been measured."""
        self._read()
        dense, draft = (self._seconds.get((size, kind)) for kind in (_DENSE, _DRAFT))
        checks = {width: self._seconds.get((size, width)) for width in CHECKED_WIDTHS}
        if dense is None:
            return None
        known = {width: seconds / dense for width, seconds in checks.items() if seconds is not None}
        if draft is None or not known:
            return ASSUMED
        return RoundCosts(draft / dense, known)

    def note_dense(self, size: BatchSize, begin: Any) -> None:
        """Note a round of one decode pass in which nobody drafts, from ``begin`` until now."""
        self._unread.append(_Measured(size, _DENSE, 1, begin, self.clock.mark()))

    def note_draft(self, size: BatchSize, begin: Any) -> None:
        """Note a step that drafts and checks nothing, from ``begin`` until now."""
        self._unread.append(_Measured(size, _DRAFT, 1, begin, self.clock.mark()))

    def note_round(
        self,
        size: BatchSize,
        begin: Any,
        drafting: Any,
        drafted: Any,
        drafts: int,
        *,
        drafts_ahead: int = 0,
        earlier: int = 0,
    ) -> None:
        """Note a round of drafts and checks, or its last step, from ``begin`` until now.

        Args:
            size: of the batch.
            begin: where the round before has ended, so that all that lies between two rounds counts.
            drafting: where passes begin that draft.
            drafted: where they end.
            drafts: how many there are.
            drafts_ahead: how many of them lie between ``begin`` and ``drafting``.
            earlier: how many of them lie before ``begin``, in steps of their own.
        """
        here = drafts - earlier
        if here > drafts_ahead:
            self._unread.append(_Measured(size, _DRAFT, here - drafts_ahead, drafting, drafted))
        self._unread.append(_Measured(size, checked_width(drafts + 1), 1, begin, self.clock.mark(), here))

    def _read(self) -> None:
        while self._unread:
            first = self._unread[0]
            if (seconds := self.clock.seconds(first.begin, first.end)) is None:
                return
            self._unread.popleft()
            key = (first.size, first.kind)
            if first.drafts:
                if (draft := self._seconds.get((first.size, _DRAFT))) is None:
                    continue
                # A check takes some of it, whatever drafts have taken in other rounds.
                seconds = max(_MIN_OF_ROUND * seconds, seconds - first.drafts * draft)
            if key not in self._begun:
                # The first of its kind allocates, or compiles, what the others find.
                self._begun.add(key)
                continue
            each = seconds / first.passes
            before = self._seconds.get(key, each)
            # Of passes that were held up, by a capture or other work, the mean is not to tell.
            self._seconds[key] = _MEMORY * before + (1 - _MEMORY) * min(each, 4 * before)
