from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

from sglang_winnow.allocator import TorchPagedAllocator


def make_allocator(*, pages: int, page_size: int, need_sort: bool = False) -> TorchPagedAllocator:
    return TorchPagedAllocator(
        pages * page_size, page_size=page_size, dtype=torch.float32, device="cpu", kvcache=None, need_sort=need_sort
    )


def extend(
    allocator: TorchPagedAllocator, prefixes: list[int], lengths: list[int], last: list[int]
) -> torch.Tensor | None:
    starts, ends = torch.tensor(prefixes), torch.tensor(lengths)
    slots: torch.Tensor | None = allocator.alloc_extend(
        starts, starts, ends, ends, torch.tensor(last), int((ends - starts).sum())
    )
    return slots


def decode(allocator: TorchPagedAllocator, lengths: list[int], last: list[int]) -> torch.Tensor | None:
    ends = torch.tensor(lengths)
    slots: torch.Tensor | None = allocator.alloc_decode(ends, ends, torch.tensor(last))
    return slots


@dataclass
class Sequence:
    """A request's KV slots in order; the first ``shared`` belong to the request that it branched from."""

    slots: list[int] = field(default_factory=list)
    shared: int = 0

    @property
    def last(self) -> int:
        return self.slots[-1] if self.slots else -1


class AllocatorMachine(RuleBasedStateMachine):
    """Requests that start, continue, branch, decode and finish, against a count of pages."""

    allocator: TorchPagedAllocator

    @initialize(pages=st.integers(1, 24), page_size=st.sampled_from([1, 2, 4, 16]), need_sort=st.booleans())
    def start(self, pages: int, page_size: int, need_sort: bool) -> None:
        self.pages, self.page_size = pages, page_size
        self.allocator = make_allocator(pages=pages, page_size=page_size, need_sort=need_sort)
        self.sequences: list[Sequence] = []

    def owned(self) -> list[int]:
        return [slot for sequence in self.sequences for slot in sequence.slots[sequence.shared :]]

    def free_pages(self) -> int:
        return self.pages - len({slot // self.page_size for slot in self.owned()})

    def grow(self, sequences: list[Sequence], counts: list[int], *, decoding: bool = False) -> bool:
        """Allocate ``counts`` more tokens; return whether the allocator had them."""
        before = [len(sequence.slots) for sequence in sequences]
        after = [length + count for length, count in zip(before, counts, strict=True)]
        last = [sequence.last for sequence in sequences]
        free = self.free_pages()
        needed = sum(-(-b // self.page_size) - -(-a // self.page_size) for a, b in zip(before, after, strict=True))
        result = decode(self.allocator, after, last) if decoding else extend(self.allocator, before, after, last)
        assert (result is None) == (needed > free)
        if result is None:
            return False
        assert result.dtype == torch.int64
        slots = result.tolist()
        assert len(slots) == sum(counts)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.slots += slots[:count]
            del slots[:count]
        return True

    @rule(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4))
    def prefill(self, lengths: list[int]) -> None:
        new = [Sequence() for _ in lengths]
        if self.grow(new, lengths):
            self.sequences += new

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def prefill_next_chunk(self, data: st.DataObject) -> None:
        chosen = [each for each in self.sequences if data.draw(st.booleans())] or self.sequences[:1]
        self.grow(chosen, [data.draw(st.integers(1, 40)) for _ in chosen])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def decode_step(self, data: st.DataObject) -> None:
        chosen = [each for each in self.sequences if data.draw(st.booleans())] or self.sequences[:1]
        self.grow(chosen, [1] * len(chosen), decoding=True)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def branch_from_full_pages(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([each for each in self.sequences if not each.shared] or [Sequence()]))
        shared = data.draw(st.integers(0, len(parent.slots) // self.page_size)) * self.page_size
        child = Sequence(parent.slots[:shared], shared)
        if self.grow([child], [data.draw(st.integers(1, 40))]):
            self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        done = data.draw(st.sampled_from(self.sequences))
        if any(each.shared and each.slots[0] == done.slots[0] and not done.shared for each in self.sequences):
            return
        self.sequences.remove(done)
        self.allocator.free(torch.tensor(done.slots[done.shared :], dtype=torch.int64))

    @invariant()
    def pages_are_accounted_for(self) -> None:
        assert self.allocator.available_size() == self.free_pages() * self.page_size

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        owned = self.owned()
        assert len(owned) == len(set(owned))
        owners = [{s // self.page_size for s in each.slots[each.shared :]} for each in self.sequences]
        assert sum(map(len, owners)) == len(set().union(*owners))

    @invariant()
    def sequences_are_page_aligned(self) -> None:
        for sequence in self.sequences:
            for position, slot in enumerate(sequence.slots):
                assert self.page_size <= slot < (self.pages + 1) * self.page_size
                assert slot % self.page_size == position % self.page_size
                if position % self.page_size:
                    assert slot == sequence.slots[position - 1] + 1


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=120, stateful_step_count=25)


@given(
    page_size=st.sampled_from([1, 4, 16]),
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=5),
)
@settings(max_examples=150)
def test_extend_gives_the_slots_of_sglangs_reference(page_size: int, requests: list[tuple[int, int]]) -> None:
    allocator = make_allocator(pages=400, page_size=page_size)
    prefixes = [prefix for prefix, _ in requests]
    lengths = [prefix + new for prefix, new in requests]
    # The prefixes lie in pages of their own above those that the allocator can hand out.
    last = [(1000 + i) * page_size + (prefix - 1) % page_size if prefix else -1 for i, prefix in enumerate(prefixes)]
    expected = torch.empty(sum(lengths) - sum(prefixes), dtype=torch.int64)
    starts, ends = torch.tensor(prefixes), torch.tensor(lengths)
    alloc_extend_naive(starts, ends, torch.tensor(last), allocator.free_pages, expected, page_size, "cpu")
    slots = extend(allocator, prefixes, lengths, last)
    assert slots is not None
    assert slots.tolist() == expected.tolist()


def test_extend_fills_the_rest_of_a_page_first() -> None:
    allocator = make_allocator(pages=4, page_size=16)
    first = extend(allocator, [0], [10], [-1])
    assert first is not None
    assert first.tolist() == list(range(16, 26))
    rest = extend(allocator, [10], [20], [25])
    assert rest is not None
    assert rest.tolist() == [*range(26, 32), *range(32, 36)]
    assert allocator.available_size() == 2 * 16


@pytest.mark.parametrize("need_sort", [False, True])
def test_refusal_takes_nothing(need_sort: bool) -> None:
    allocator = make_allocator(pages=2, page_size=16, need_sort=need_sort)
    assert extend(allocator, [0, 0], [16, 17], [-1, -1]) is None
    assert allocator.available_size() == 2 * 16
    taken = extend(allocator, [0], [32], [-1])
    assert taken is not None
    assert decode(allocator, [33], [int(taken[-1])]) is None
    allocator.free(taken)
    assert allocator.available_size() == 2 * 16
    assert extend(allocator, [0], [32], [-1]) is not None


def test_decode_crosses_into_a_new_page_only_at_its_end() -> None:
    allocator = make_allocator(pages=3, page_size=16)
    taken = extend(allocator, [0, 0], [15, 16], [-1, -1])
    assert taken is not None
    slots = decode(allocator, [16, 17], [int(taken[14]), int(taken[30])])
    assert slots is not None
    assert slots.tolist() == [31, 48]
    assert allocator.available_size() == 0
