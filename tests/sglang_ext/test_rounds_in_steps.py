"""Batches in which some rows are verified and others not, with a toy model: who gets which token in which step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
from torch import Tensor

from sglang_winnow import verification_worker
from sglang_winnow.crossover import acting_at_every_length
from sglang_winnow.open_drafts import OpenDrafts
from sglang_winnow.verification_worker import VerificationWorker, standing_drafts
from tests.sglang_ext.toy_scheduler import SLOTS, VOCABULARY, Model, Request, Scheduler, chain, worker_of


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(verification_worker, "note_rows", lambda *_: None)
    with acting_at_every_length():
        yield Model()


WINDOW: Final = {"policy": "streaming_llm", "sinks": 1, "window": 16}
DENSE: Final[dict[str, Any]] = {"decode": {"policy": "dense"}}
SPARSE: Final[dict[str, Any]] = {"decode": WINDOW}


def verified(drafts: int | str) -> dict[str, Any]:
    return {"decode": WINDOW, "verify": {"draft_tokens": drafts}}


@pytest.fixture
def watched(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model, beside a check that what is checked is what was drafted."""
    checking: list[list[tuple[Request, int]]] = []
    original = VerificationWorker._verify

    def verify(worker: Any, own: Any, rows: list[int], *others: Any) -> Any:
        checking.append([(own.batch.reqs[row], own.lengths[row]) for row in rows])
        return original(worker, own, rows, *others)

    def standing(drafted: Tensor, drawn: Tensor, limits: Tensor) -> Tensor:
        for (req, length), own, limit in zip(checking.pop(), drafted.tolist(), limits.tolist(), strict=True):
            assert [model.drafted[id(req)][length + place] for place in range(limit)] == own[:limit]
        return standing_drafts(drafted, drawn, limits)

    monkeypatch.setattr(VerificationWorker, "_verify", verify)
    monkeypatch.setattr(verification_worker, "standing_drafts", standing)
    return model


def begun(model: Model, reqs: Sequence[Request], *, overlaps: bool, steps: int = 0) -> Scheduler:
    """Return a scheduler that has admitted requests and run some steps of them."""
    scheduler = Scheduler(worker_of(model, measures=False), model, overlaps=overlaps)
    for req in reqs:
        scheduler.admit(req)
    for _ in range(steps):
        scheduler.step()
    return scheduler


OVERLAP: Final = pytest.mark.parametrize("overlaps", [True, False])


@OVERLAP
@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_requests_alone_whoever_comes_and_goes(watched: Model, seed: int, overlaps: bool) -> None:
    draw = random.Random(seed)
    scheduler = Scheduler(worker_of(watched, measures=seed % 2 == 0), watched, overlaps=overlaps)
    kinds = [DENSE, SPARSE, verified(1), verified(3), verified(8), verified("auto"), verified(16)]
    waiting = [
        Request(
            [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))], draw.choice(kinds), draw.randint(1, 60)
        )
        for _ in range(40)
    ]
    admitted = len(waiting)
    aborted = 0
    for _ in range(5000):
        chance = draw.random()
        if waiting and len(scheduler.running) < SLOTS - 4 and chance < 0.3:
            scheduler.admit(waiting.pop(0))
        elif scheduler.running and chance > 0.95:
            left = draw.choice(scheduler.running)
            if not left.output_ids:
                continue
            # After a retraction a sparse answer goes on from a dense prefill.
            scheduler.leave(left, retract=chance > 0.96 and left.asked is not SPARSE)
            aborted += left.ended
            if left.is_retracted:
                waiting.append(left)
        scheduler.step()
        if not waiting and not scheduler.running:
            break
    scheduler.step()
    assert len(scheduler.ended) + aborted == admitted
    for req in scheduler.ended:
        assert req.output_ids == chain(req.prompt, req.wanted, req.asked)
    assert scheduler.bursts.keys() == {1}
    assert len(watched.widths) > 50


@OVERLAP
def test_drafts_are_made_in_steps_and_checked_together(watched: Model, overlaps: bool) -> None:
    """A row that drafts fewer decodes densely until the others have only as many to draft."""
    reqs = [Request(list(range(20)), kind, 50) for kind in (DENSE, verified(4), verified(2))]
    scheduler = begun(watched, reqs, overlaps=overlaps)
    opened = []
    for _ in range(10):
        scheduler.step()
        own = [req.winnow_state.open_drafts for req in reqs]
        opened.append([None if drafts is None else (drafts.made, drafts.missing) for drafts in own])
    steps = [[None, (1, 3), None], [None, (2, 2), None], [None, (3, 1), (1, 1)], [None, (4, 0), (2, 0)]]
    assert opened == [*steps, [None] * 3] * 2
    # On a CPU those that drafted as many are checked in a pass; the dense row is, too, and has drafted nothing.
    assert watched.widths == [0, 2, 4] * 2


@OVERLAP
def test_a_check_follows_the_last_drafts_at_once_beside_rows_that_need_a_pass_of_their_own(
    watched: Model, overlaps: bool
) -> None:
    reqs = [Request(list(range(20)), kind, 50) for kind in (SPARSE, verified(3))]
    begun(watched, reqs, overlaps=overlaps, steps=3)
    assert reqs[1].winnow_state.open_drafts is None
    assert watched.widths == [3]


@OVERLAP
def test_the_last_draft_is_made_once_more_where_a_row_comes_that_needs_a_pass(watched: Model, overlaps: bool) -> None:
    reqs = [Request(list(range(20)), kind, 50) for kind in (DENSE, verified(2))]
    scheduler = begun(watched, reqs, overlaps=overlaps, steps=2)
    assert reqs[1].winnow_state.open_drafts == OpenDrafts(2, 0)
    scheduler.admit(Request(list(range(25)), SPARSE, 50))
    scheduler.step()
    assert reqs[1].winnow_state.open_drafts is None
    assert watched.widths == [2]
    while scheduler.running:
        scheduler.step()
    for req in scheduler.ended:
        assert req.output_ids == chain(req.prompt, req.wanted, req.asked)


@OVERLAP
@pytest.mark.parametrize("retract", [False, True])
def test_open_drafts_are_checked_when_the_last_row_that_is_not_verified_leaves(
    watched: Model, overlaps: bool, retract: bool
) -> None:
    leaving, staying = Request([1, 2, 3] * 5, DENSE, 50), Request(list(range(20)), verified(5), 50)
    scheduler = begun(watched, (staying, leaving), overlaps=overlaps, steps=3)
    assert staying.winnow_state.open_drafts is not None
    scheduler.leave(leaving, retract=retract)
    while staying.winnow_state.open_drafts is not None:
        scheduler.step()
    assert watched.widths == [5]
    while not staying.ended:
        scheduler.step()
        # In whole rounds from then on.
        assert staying.winnow_state.open_drafts is None
    assert staying.output_ids == chain(staying.prompt, 50, staying.asked)


@OVERLAP
def test_who_is_prefilled_anew_has_no_drafts(watched: Model, overlaps: bool) -> None:
    beside, req = Request([1, 2, 3] * 5, DENSE, 100), Request(list(range(20)), verified(8), 50)
    scheduler = begun(watched, (beside, req), overlaps=overlaps, steps=4)
    assert req.winnow_state.open_drafts is not None
    scheduler.leave(req, retract=True)
    scheduler.step()
    scheduler.admit(req)
    assert req.winnow_state.open_drafts is None
    while not req.ended:
        scheduler.step()
    assert req.output_ids == chain(req.prompt, 50, req.asked)


@OVERLAP
def test_a_round_that_begins_where_a_policy_reads_everything_is_dense_behind_that(
    watched: Model, overlaps: bool
) -> None:
    """In a round in which another row drafts, a verified row that does not draft decodes a token in every pass."""
    reqs = [Request(list(range(length)), verified(8), 30) for length in (14, 25)]
    scheduler = begun(watched, reqs, overlaps=overlaps)
    while scheduler.running:
        scheduler.step()
    assert [req.output_ids for req in reqs] == [chain(req.prompt, 30, req.asked) for req in reqs]
