"""Dense attention, decode and prefill, against a plain float64 version."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_float64 import attend_head
from tests.kernels.caches import random_cache, random_queries, random_softmax, scattered_context
from winnow_kernels.attend import dense
from winnow_kernels.attend.dense import SHORTEST_RUN, Layout, attend_all, prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache

SLOTS, DIM = 8192, 64
SCALE = DIM**-0.5
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def slots_of_runs(*runs: tuple[int, int]) -> Tensor:
    """Slots of runs, each given by its first slot and its length."""
    return torch.cat([torch.arange(first, first + length) for first, length in runs])


def context_of(requests: list[Tensor], slots: int = SLOTS) -> Context:
    table = torch.full((len(requests), max(map(len, requests))), slots)
    for row, own in zip(table, requests, strict=True):
        row[: len(own)] = own
    return Context(table, torch.tensor([len(own) for own in requests]))


def plain_rows(queries: Tensor, slots: Tensor, cache: LayerCache, window: int | None) -> Tensor:
    """Row by row and head by head in float64; the rows are the context's newest tokens."""
    group = queries.shape[1] // cache.kv_heads
    outputs = torch.empty(queries.shape, dtype=torch.float64)
    softmax = cache.softmax
    for row in range(len(queries)):
        position = len(slots) - len(queries) + row
        seen = slots[0 if window is None else max(0, position - window) : position + 1]
        for head in range(cache.kv_heads):
            of_group = slice(head * group, (head + 1) * group)
            outputs[row, of_group], _ = attend_head(
                queries[row, of_group],
                cache.keys[seen, head],
                cache.values[seen, head],
                SCALE,
                softmax.cap,
                None if softmax.sink_logits is None else softmax.sink_logits[of_group],
            )
    return outputs


RUNS = [
    slots_of_runs((16, 3000)),
    slots_of_runs((5000, 1), (4000, 16), (16, 1100), (3104, 530), (7000, 77)),
    slots_of_runs((64, 1)),
    slots_of_runs(*((slot, 16) for slot in range(8000, 100, -48))),
]


@pytest.mark.parametrize("window", [None, 0, 700])
@pytest.mark.parametrize(
    ("kv_heads", "group", "threads", "softmax"),
    [
        (2, 4, 1, "plain"),
        (1, 8, 2, "plain"),
        (4, 1, 1, "plain"),
        (2, 4, 1, "cap"),
        (1, 8, 2, "sinks"),
        (2, 2, 2, "cap and sinks"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_equals_the_plain_version(
    kv_heads: int, group: int, dtype: torch.dtype, window: int | None, threads: int, softmax: str
) -> None:
    cache = random_cache(SLOTS, kv_heads, DIM, dtype=dtype)
    cache = replace(cache, softmax=random_softmax(softmax, kv_heads * group))
    queries = random_queries(len(RUNS), kv_heads * group, DIM).to(dtype)
    context = context_of(RUNS)
    meter = Meter(len(RUNS), torch.device("cpu"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outputs = attend_all(queries, context, cache, SCALE, meter, window)
    finally:
        torch.set_num_threads(before)

    assert outputs.dtype == dtype
    for request, slots in enumerate(RUNS):
        expected = plain_rows(queries[request : request + 1], slots, cache, window)
        torch.testing.assert_close(outputs[request : request + 1].double(), expected, atol=TOLERANCE[dtype], rtol=0)
    visible = [len(slots) if window is None else min(len(slots), window + 1) for slots in RUNS]
    assert meter.attended.tolist() == [kv_heads * tokens for tokens in visible]
    assert meter.read_bytes.tolist() == [kv_heads * tokens * 2 * cache.vector_bytes for tokens in visible]


def test_layers_of_a_step_may_differ_in_cache_and_window() -> None:
    context = context_of(RUNS)
    meter = Meter(len(RUNS), torch.device("cpu"))
    queries = random_queries(len(RUNS), 8, DIM)
    for seed, kv_heads, window in [(0, 2, None), (1, 2, 600), (2, 4, None)]:
        cache = random_cache(SLOTS, kv_heads, DIM, seed)
        outputs = attend_all(queries, context, cache, SCALE, meter, window)
        for request, slots in enumerate(RUNS):
            expected = plain_rows(queries[request : request + 1], slots, cache, window)
            torch.testing.assert_close(outputs[request : request + 1].double(), expected, atol=5e-6, rtol=0)


def test_a_neighbour_does_not_change_a_result() -> None:
    cache, queries = random_cache(SLOTS, 2, DIM), random_queries(len(RUNS), 8, DIM)
    together = attend_all(queries, context_of(RUNS), cache, SCALE, Meter(len(RUNS), torch.device("cpu")))
    for request, slots in enumerate(RUNS):
        own = queries[request : request + 1]
        alone = attend_all(own, context_of([slots]), cache, SCALE, Meter(1, torch.device("cpu")))
        assert torch.equal(together[request : request + 1], alone)


def test_queries_of_another_dtype_than_the_cache() -> None:
    cache, queries = random_cache(SLOTS, 2, DIM, dtype=torch.bfloat16), random_queries(1, 8, DIM)
    outputs = attend_all(queries, context_of(RUNS[1:2]), cache, SCALE, Meter(1, torch.device("cpu")))
    torch.testing.assert_close(outputs.double(), plain_rows(queries, RUNS[1], cache, None), atol=5e-6, rtol=0)


@given(
    runs=st.lists(st.integers(1, 1400), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    kv_heads=st.integers(1, 3),
)
@settings(max_examples=50)
def test_a_layout_has_every_slot_once_and_copies_no_long_run(runs: list[int], order: object, kv_heads: int) -> None:
    starts = torch.tensor([0, *runs]).cumsum(0).tolist()
    pieces = [(start + gap, length) for gap, (start, length) in enumerate(zip(starts, runs, strict=False))]
    order.shuffle(pieces)  # type: ignore[attr-defined]
    slots = slots_of_runs(*pieces)

    layout = Layout.of(slots, kv_heads)

    in_place = [torch.arange(r.start, r.start + r.splits * r.length) for r in layout.runs]
    assert torch.cat([*in_place, layout.scattered]).sort().values.tolist() == slots.sort().values.tolist()
    splits = max((run.splits for run in layout.runs), default=1)
    assert len(layout.scattered) <= sum(length for length in runs if length < SHORTEST_RUN) + len(runs) * splits


@pytest.mark.parametrize("slots", [torch.tensor([16, 1024]), torch.arange(16, 1025)], ids=["scattered", "run"])
def test_a_slot_beyond_the_pool_raises(slots: Tensor) -> None:
    cache = random_cache(1024, 2, DIM)
    context = context_of([slots], slots=1024)
    with pytest.raises((IndexError, RuntimeError)):
        attend_all(random_queries(1, 8, DIM), context, cache, SCALE, Meter(1, torch.device("cpu")))


@pytest.mark.parametrize("window", [None, 0, 700])
@pytest.mark.parametrize(
    ("kv_heads", "group", "softmax"),
    [(2, 2, "plain"), (1, 2, "plain"), (2, 2, "cap"), (1, 2, "sinks"), (2, 1, "cap and sinks")],
)
@pytest.mark.parametrize("new_tokens", [1, 37, 600])
@pytest.mark.parametrize("slots", [RUNS[0][:1500], RUNS[1], RUNS[3][:600]], ids=["run", "runs", "scattered"])
def test_prefill_equals_the_plain_version(
    slots: Tensor,
    new_tokens: int,
    kv_heads: int,
    group: int,
    window: int | None,
    softmax: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So few that rows are computed in several parts.
    monkeypatch.setattr(dense, "CAPPED_SCORES", 2**20)
    cache = replace(random_cache(SLOTS, kv_heads, DIM), softmax=random_softmax(softmax, kv_heads * group))
    queries = random_queries(new_tokens, kv_heads * group, DIM)
    outputs = prefill(queries, slots, cache, SCALE, window)
    rows = [0, new_tokens // 2, new_tokens - 1]
    for row in rows:
        seen = slots[: len(slots) - new_tokens + row + 1]
        expected = plain_rows(queries[row : row + 1], seen, cache, window)
        torch.testing.assert_close(outputs[row : row + 1].double(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 300])
def test_prefill_in_chunks_equals_prefill_at_once(dtype: torch.dtype, window: int | None) -> None:
    cache = random_cache(SLOTS, 2, DIM, dtype=dtype)
    slots = RUNS[1]
    queries = random_queries(len(slots), 8, DIM).to(dtype)
    at_once = prefill(queries, slots, cache, SCALE, window)
    assert at_once.dtype == dtype
    bounds = [0, 1, 130, 1024, len(slots)]
    for begin, end in pairwise(bounds):
        chunk = prefill(queries[begin:end], slots[:end], cache, SCALE, window)
        torch.testing.assert_close(chunk, at_once[begin:end], atol=TOLERANCE[dtype], rtol=0)


def test_prefill_of_scattered_pages() -> None:
    cache = random_cache(SLOTS, 2, DIM)
    slots = scattered_context([900], SLOTS).slots[0]
    queries = random_queries(64, 8, DIM)
    torch.testing.assert_close(
        prefill(queries, slots, cache, SCALE).double(), plain_rows(queries, slots, cache, None), atol=5e-6, rtol=0
    )


@pytest.mark.parametrize("window", [None, 0, 700])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 4), (1, 8), (4, 1)])
def test_padded_decode_equals_decode_in_place(kv_heads: int, group: int, window: int | None) -> None:
    """The path of other devices, whose operations a CPU has too."""
    cache, queries = random_cache(SLOTS, kv_heads, DIM), random_queries(len(RUNS), kv_heads * group, DIM)
    context = context_of(RUNS)
    expected = attend_all(queries, context, cache, SCALE, Meter(len(RUNS), torch.device("cpu")), window)
    visible = context.lengths if window is None else context.lengths.clamp_max(window + 1)
    padded = dense._attend_padded(queries, context, cache, SCALE, visible)
    torch.testing.assert_close(padded, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 4), (1, 8), (4, 1)])
@pytest.mark.parametrize("new_tokens", [1, 300, 1724])
def test_lower_right_prefill_equals_prefill_in_parts(kv_heads: int, group: int, new_tokens: int) -> None:
    """The path of other devices, whose operations a CPU has too."""
    cache, queries = random_cache(SLOTS, kv_heads, DIM), random_queries(new_tokens, kv_heads * group, DIM)
    torch.testing.assert_close(
        dense._prefill_lower_right(queries, RUNS[1], cache, SCALE),
        prefill(queries, RUNS[1], cache, SCALE),
        atol=5e-6,
        rtol=0,
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_mass_has_the_same_shapes_on_other_devices(is_causal: bool) -> None:
    on_cpu, elsewhere = (
        dense.attend_with_mass(vectors, vectors, vectors, SCALE, is_causal=is_causal)
        for vectors in (torch.randn(2, 3, 37, DIM, device=device) for device in ("cpu", "meta"))
    )
    assert [(t.shape, t.dtype) for t in on_cpu] == [(t.shape, t.dtype) for t in elsewhere]


def test_refilled_tensors_are_looked_at_anew() -> None:
    """A server may fill the same tensors for every step; each step has a Context of its own."""
    cache, queries = random_cache(SLOTS, 2, DIM), random_queries(1, 8, DIM)
    slots, lengths = torch.arange(16, 1016)[None].clone(), torch.tensor([1000])
    earlier = Context(slots, lengths)
    attend_all(queries, earlier, cache, SCALE, Meter(1, torch.device("cpu")))
    slots += 3000
    outputs = attend_all(queries, Context(slots, lengths), cache, SCALE, Meter(1, torch.device("cpu")))
    torch.testing.assert_close(outputs.double(), plain_rows(queries, slots[0], cache, None), atol=5e-6, rtol=0)
    assert earlier in dense._layouts


def test_a_layout_lives_as_long_as_its_context() -> None:
    others = len(dense._layouts)
    context = context_of(RUNS[:1])
    attend_all(random_queries(1, 8, DIM), context, random_cache(SLOTS, 2, DIM), SCALE, Meter(1, torch.device("cpu")))
    assert len(dense._layouts) == others + 1
    del context
    assert len(dense._layouts) == others
