"""What selects on a GPU for one kind of policy: its scratch, and what it launches in a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.attend.gpu_check import CheckPartial, PageSums
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.ranks import Ranks
from winnow_kernels.decode.request import Request
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.pages import PageIndex
from winnow_kernels.indexes.pool_indexes import Indexes

SCRATCH_BYTES = 2**28
"""What a selector's scratch may take; larger batches are selected for in parts."""


class NoRoomError(RuntimeError):
    """There is no memory left for what a request needs: it runs dense."""


@dataclass(frozen=True)
class Entry:
    """What a request's preparation cost.

    Attributes:
        built_tokens: tokens that an index was built of.
        read_bytes: of the KV cache; int64 [1] where it is a tensor.
    """

    built_tokens: int = 0
    read_bytes: Tensor | int = 0


@dataclass(frozen=True, eq=False)
class Server:
    """What selectors are made for.

    Attributes:
        caches: every layer's KV cache, with the heads of this rank.
        scale: what scores are multiplied by before the softmax.
        query_heads: of this rank.
        indexes: of the server.
        attend_buffers: of attention.
        requests: request slots.
        step: the largest that there will be.
        ranks: that share out the heads.
    """

    caches: Sequence[LayerCache]
    scale: float
    query_heads: int
    indexes: Indexes
    attend_buffers: AttendBuffers
    requests: int
    step: Step
    ranks: Ranks


class Selector:
    """What one kind of policy does in a decode step.

    ``enter`` runs on the host before a request's first sparse step in a request slot, and may wait for the device. All
    else is captured in CUDA graphs. ``select`` may run while other kinds' does: it writes to scratch of its own and,
    of what rows share, to its own rows alone.

    Attributes:
        reports_shares: whether ``select`` writes beliefs of its rows to ``Step.reported``, and attention reports the
            share that they have attended to.
        selects_in_layers: whether there is anything to ``select`` in a layer.
        observes_checks: whether there is anything to ``observe`` in passes that check drafts.
        programs_meet: whether programs of a launch in ``select`` wait for each other (``selection.gpu_meeting``).
    """

    reports_shares: ClassVar[bool] = False
    selects_in_layers: ClassVar[bool] = True
    observes_checks: ClassVar[bool] = False
    programs_meet: bool = False

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        """Prepare a request; ``context`` has its row alone."""
        del request, slot, context
        return Entry()

    def stage(self, request: Request, length: int) -> int:
        """Return a number that changes when a request must ``enter`` anew at a context of ``length`` tokens."""
        del request, length
        return 0

    def begin(self, step: Step, *, ordered: bool) -> None:
        """Do what is done once a step; ``ordered`` says whether the order of a selection may matter."""

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        """Write slots and counts of the rows of this kind; ``queries`` are [rows, query heads, head dim]."""

    def attend_at(self, layer: int, queries: Tensor, cache: LayerCache, step: Step, output: Tensor) -> None:
        """Write the ``output`` of rows that attend in ``layer`` by themselves (``Declaration.own_layers``)."""

    def finish(self, step: Step, statistics: Statistics) -> None:
        """Add what only this kind of policy knows to the requests' statistics."""

    def rows_observed(self, new_tokens: int, step: Step) -> int:
        """Return of how many rows at once a check of so many tokens can be observed."""
        del new_tokens
        return step.rows

    def page_sums(self, new_tokens: int, step: Step) -> PageSums | None:
        """Return what the attention of a check of so many tokens leaves of the rows' pages; None for nothing."""
        del new_tokens, step
        return None

    def observe(self, layer: int, new_tokens: int, part: Step, rows: slice, whole: Step, partial: CheckPartial) -> None:
        """See ``rows`` of a layer of a check, after their attention.

        Args:
            layer: its number.
            new_tokens: that are checked, of each row.
            part: the step of these rows.
            rows: which of the whole step they are.
            whole: the step of all.
            partial: has the log-sum-exps of the rows' tokens.
        """

    def observed(self, layer: int, new_tokens: int, step: Step) -> None:
        """See a layer of a check after all its rows have been."""


class MovingSelector(Selector):
    """A kind of policy that keeps a part of the prompt, and can move it: on the host, after ``enter``."""

    @abstractmethod
    def room(self, request: Request) -> int:
        """Return how many slots a request needs for what it keeps of its prompt: on all ranks as many."""

    @abstractmethod
    def move(self, request: Request, slot: int, prompt: Tensor, begin: int) -> None:
        """Move what a request keeps of its prompt, and read it from where it lies then.

        Args:
            request: of which nothing was moved since its prefill.
            slot: its request slot.
            prompt: int64 [tokens]; the slot of each token of the prompt.
            begin: the position from which on it gets slots of the prompt: ``room`` of them.
        """


class PageIndexSelector(Selector):
    """A kind of policy that selects by entries of pages, which are built for a request's complete pages first."""

    def __init__(self, index: PageIndex) -> None:
        self._index = index

    def stage(self, request: Request, length: int) -> int:
        return stage_of_pages(request, length)

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        del request, slot
        generations = self._index.generations
        # The page before the newest token's, if that begins one, is built with the step.
        pages = generations.complete_pages(context, 0, max(0, int(context.lengths[0]) - 2))
        return Entry(built_tokens=self._index.ensure(pages) * generations.page_size)


def rows_within(bytes_of_row: int, rows: int) -> int:
    """Return for how many rows there is scratch: a power of two, or all."""
    fit = max(1, SCRATCH_BYTES // bytes_of_row)
    return rows if fit >= rows else 1 << (fit.bit_length() - 1)


def stage_of_pages(request: Request, length: int) -> int:
    """Return whether the pages of what was prefilled are those that it keeps.

    When SGLang has processed a prefill, it gives the request the radix cache's pages where another has cached the same
    tokens meanwhile. By then the first decode step may have begun.
    """
    return int(length > request.last_prefill + 1)


def count_extended(step: Step, acts: Tensor, statistics: Statistics) -> None:
    """Count the pages of which ``extend`` has built the entries, in rows where ``acts`` is not 0."""
    page_size = step.batch.page_size
    begins = (step.batch.lengths % page_size == 1) & (acts > 0)
    built = statistics.rows[:, Field.INDEX_BUILT_TOKENS]
    built.index_add_(0, step.request_slots, begins.to(built.dtype) * page_size)


def count_shares(step: Step, acts: Tensor, statistics: Statistics) -> None:
    """Count the shares that attention has reported, in rows where ``acts`` is true."""
    table, slots = statistics.rows, step.request_slots
    of_rows = step.reported.shares.mean(1) * acts
    table[:, Field.ESTIMATED_SHARE].index_add_(0, slots, of_rows)
    table[:, Field.ESTIMATES].index_add_(0, slots, acts.to(of_rows.dtype) * step.counts.shape[0])


def count_capped(step: Step, capped: Tensor, acts: Tensor, statistics: Statistics) -> None:
    """Count the step in rows where ``acts`` is true and a cap has cut: where ``capped``, int32 [rows], is not 0."""
    steps = ((capped > 0) & acts).double()
    statistics.rows[:, Field.CAPPED_STEPS].index_add_(0, step.request_slots, steps)


def note_budgets(step: Step, budgets: Tensor, statistics: Statistics) -> None:
    """Note the rows' ``budgets``, int32 [rows], of this step, where they are not 0: those that depend on the length."""
    noted = statistics.rows[:, Field.BUDGET]
    noted.index_copy_(
        0, step.request_slots, torch.where(budgets > 0, budgets.to(noted.dtype), noted[step.request_slots])
    )
