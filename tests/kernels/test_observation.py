"""The observation window: what is recorded, chunk by chunk, and its votes against a plain float64 version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.window_votes import window_votes
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.snapkv import observation
from winnow_kernels.policies.snapkv.observation import ObservationBuffer

SLOTS, DIM = 1024, 32
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def _votes(buffer: ObservationBuffer, kv_heads: int, layer: int = 0, meter: Meter | None = None) -> Tensor:
    cache = random_cache(SLOTS, kv_heads, DIM)
    slots = scattered_context([buffer.prompt_length], SLOTS).slots[0]
    return buffer.votes(layer, cache, slots, SCALE, meter or Meter(1, CPU))


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize(("prompt", "window"), [(200, 32), (33, 32), (20, 32), (1, 1)])
@pytest.mark.parametrize("softmax", ["plain", "cap and sinks"])
def test_votes_equal_the_plain_version(kv_heads: int, group: int, prompt: int, window: int, softmax: str) -> None:
    cache = replace(random_cache(SLOTS, kv_heads, DIM), softmax=random_softmax(softmax, kv_heads * group))
    slots = scattered_context([prompt], SLOTS).slots[0]
    queries = random_queries(prompt, kv_heads * group, DIM)
    buffer = ObservationBuffer(window, prompt)
    buffer.record(0, queries, 0)
    meter = Meter(1, CPU)
    votes = buffer.votes(0, cache, slots, SCALE, meter)
    assert votes.dtype == torch.float32
    expected = window_votes(queries, slots, cache, window, SCALE)
    torch.testing.assert_close(votes.double(), expected, atol=1e-5, rtol=1e-5)
    assert meter.read_bytes.tolist() == [prompt * kv_heads * cache.vector_bytes]
    assert meter.attended.tolist() == [0]


def test_votes_do_not_depend_on_how_many_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ObservationBuffer(32, 150)
    buffer.record(0, random_queries(150, 4, DIM), 0)
    at_once = _votes(buffer, 2)
    monkeypatch.setattr(observation, "_MAX_SCORES", 4 * 150 * 5)
    torch.testing.assert_close(_votes(buffer, 2), at_once, atol=1e-5, rtol=1e-5)


@given(
    prompt=st.integers(1, 120),
    window=st.integers(1, 64),
    cuts=st.lists(st.integers(1, 119), max_size=5),
    overlap=st.integers(0, 9),
)
@settings(max_examples=40)
def test_chunks_lose_nothing_wherever_they_end(prompt: int, window: int, cuts: list[int], overlap: int) -> None:
    generated = 7
    queries = random_queries(prompt + generated, 4, DIM)
    whole, chunked = ObservationBuffer(window, prompt), ObservationBuffer(window, prompt)
    ends = sorted({*(cut for cut in cuts if cut < prompt), prompt + generated})
    start = 0
    for layer in range(2):
        whole.record(layer, (1 + layer) * queries, 0)
    for end in ends:
        # A chunk may begin before the last one ended, as after a retraction.
        first = max(0, start - overlap)
        for layer in range(2):
            chunked.record(layer, (1 + layer) * queries[first:end], first)
        start = end
    for layer in range(2):
        assert torch.equal(_votes(chunked, 2, layer), _votes(whole, 2, layer))
    assert whole.first_position == prompt - min(window, prompt)


def test_a_window_with_a_gap_does_not_vote() -> None:
    buffer = ObservationBuffer(8, 100)
    buffer.record(0, random_queries(95, 4, DIM), 0)
    buffer.record(0, random_queries(3, 4, DIM), 97)
    with pytest.raises(ValueError, match="layer 0, 2 of 8 queries were not recorded, the first at position 95"):
        _votes(buffer, 2)


def test_forgotten_layers_have_nothing_left() -> None:
    buffer = ObservationBuffer(8, 100)
    for layer in range(2):
        buffer.record(layer, random_queries(100, 4, DIM), 0)
    buffer.forget(0)
    assert _votes(buffer, 2, layer=1).shape == (2, 92)
    with pytest.raises(ValueError, match="8 of 8"):
        _votes(buffer, 2, layer=0)


def test_the_buffer_keeps_no_more_than_the_window() -> None:
    buffer = ObservationBuffer(8, 100)
    buffer.record(0, random_queries(100, 4, DIM), 0)
    [kept] = buffer._queries.values()
    assert kept.untyped_storage().nbytes() == 8 * 4 * DIM * 4


@pytest.mark.parametrize(("window", "prompt", "field"), [(0, 4, "window"), (4, 0, "prompt_length")])
def test_bad_sizes_are_refused_by_name(window: int, prompt: int, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        ObservationBuffer(window, prompt)
