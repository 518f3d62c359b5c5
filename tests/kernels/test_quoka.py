"""QUOKA, prefill and decode, against a plain float64 version."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import codes_float64
from tests.kernels.attention_float64 import attend_head
from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.parameters import quoka_decode_parameters, quoka_prefill_parameters
from tests.kernels.quoka_float64 import plain_prefill
from tests.kernels.selected_tokens import positions_of
from winnow_kernels.attend.dense import attend_all, prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.key_codes import DEFAULT_BITS, KeyCodes
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.quoka import reference as quoka
from winnow_kernels.policies.quoka.parameters import QuokaDecode, QuokaPrefill
from winnow_kernels.policies.quoka.reference import (
    PrefillReads,
    QuokaStep,
    cosine_steps,
    quoka_prefill,
    select_for_blocks,
)

PAGE, SLOTS, DIM = 16, 4096, 32
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def slots_of(length: int, *, scattered: bool) -> Tensor:
    return scattered_context([length], SLOTS).slots[0] if scattered else torch.arange(32, 32 + length)


@pytest.mark.parametrize(("kv_heads", "group", "scattered"), [(2, 2, False), (1, 4, True), (3, 1, True)])
@pytest.mark.parametrize(
    ("new_tokens", "length", "options"),
    [
        (300, 300, {"budget": 40, "block": 32, "kept": 4}),
        (50, 178, {"budget": 40, "block": 64, "kept": 100}),
        (90, 250, {"budget_ratio": 0.3, "block": 32, "kept": 8, "dense_prefix": 170}),
        (75, 235, {"budget": 1, "block": 64, "kept": 1}),
        (300, 300, {"budget": 40, "block": 32, "kept": 4, "sinks": 16, "recency_ratio": 0.5}),
        (100, 300, {"budget_ratio": 0.2, "block": 64, "kept": 8, "sinks": 5, "recency_ratio": 0.3}),
        (300, 300, {"budget_ratio": 0.1, "block": 32, "kept": 8, "sinks": 24, "recency_ratio": 1.0}),
    ],
)
def test_prefill_equals_the_plain_version(
    new_tokens: int, length: int, options: dict[str, Any], kv_heads: int, group: int, scattered: bool
) -> None:
    cache = random_cache(SLOTS, kv_heads, DIM)
    queries = random_queries(new_tokens, kv_heads * group, DIM) + 0.5
    slots = slots_of(length, scattered=scattered)
    plain = plain_prefill(queries, slots.tolist(), cache, SCALE, **options)
    parameters = quoka_prefill_parameters(queries=options["kept"], **{k: v for k, v in options.items() if k != "kept"})

    outputs, reads = quoka_prefill(queries, slots, cache, SCALE, parameters)
    selections = dict(select_for_blocks(queries, slots, cache, parameters))

    assert {
        start: [set(row) for row in positions.tolist()] for start, positions in selections.items()
    } == plain.selected
    assert selections
    torch.testing.assert_close(outputs.double(), plain.outputs, atol=5e-6, rtol=0)
    assert asdict(reads) == {name: getattr(plain, name) for name in asdict(reads)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_prefill_in_half_precision(dtype: torch.dtype, softmax: str) -> None:
    cache = replace(random_cache(SLOTS, 2, DIM, dtype=dtype), softmax=random_softmax(softmax, 4))
    queries, slots = random_queries(200, 4, DIM).to(dtype), slots_of(200, scattered=True)
    plain = plain_prefill(queries, slots.tolist(), cache, SCALE, budget=40, block=32, kept=4)
    outputs, _ = quoka_prefill(queries, slots, cache, SCALE, quoka_prefill_parameters(budget=40, block=32, queries=4))
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs.double(), plain.outputs, atol=2e-2, rtol=0)


@given(
    length=st.integers(1, 700),
    cuts=st.lists(st.integers(1, 20), max_size=5),
    budget=st.one_of(st.integers(20, 300), st.floats(0.05, 1.0)),
    dense_prefix=st.sampled_from([0, 100, 5000]),
    always=st.sampled_from([{}, {"sinks": 16}, {"sinks": 20, "recency_ratio": 0.4}]),
    with_norms=st.booleans(),
    seed=st.integers(0, 100),
)
# Derandomized: scores that differ by rounding alone may be ranked otherwise in another batch of blocks.
@settings(max_examples=60, derandomize=True)
def test_chunks_change_nothing(
    length: int,
    cuts: list[int],
    budget: float,
    dense_prefix: int,
    always: dict[str, Any],
    with_norms: bool,
    seed: int,
) -> None:
    block = 32
    options: dict[str, Any] = {"budget" if isinstance(budget, int) else "budget_ratio": budget, **always}
    parameters = quoka_prefill_parameters(block=block, queries=4, dense_prefix=dense_prefix, **options)
    cache = random_cache(SLOTS, 2, DIM, seed)
    queries, slots = random_queries(length, 4, DIM, seed), slots_of(length, scattered=bool(seed % 2))
    at_once, reads_at_once = quoka_prefill(queries, slots, cache, SCALE, parameters)
    selected_at_once = dict(select_for_blocks(queries, slots, cache, parameters))
    ends = sorted({cut * block for cut in cuts if cut * block < length} | {length})
    reads = PrefillReads()
    selected: dict[int, Tensor] = {}
    for begin, end in pairwise([0, *ends]):
        norms = None
        if with_norms:
            index = KeyNorms([cache], PageGenerations(SLOTS, PAGE, CPU))
            index.ensure(slots[: begin // PAGE * PAGE : PAGE] // PAGE)
            norms = index.reciprocals[0]
        outputs, of_chunk = quoka_prefill(queries[begin:end], slots[:end], cache, SCALE, parameters, norms)
        torch.testing.assert_close(outputs, at_once[begin:end], atol=5e-6, rtol=0)
        reads += of_chunk
        selected |= dict(select_for_blocks(queries[begin:end], slots[:end], cache, parameters, norms))
    assert reads == reads_at_once
    assert {s: [set(row) for row in p.tolist()] for s, p in selected.items()} == {
        s: [set(row) for row in p.tolist()] for s, p in selected_at_once.items()
    }


def test_batches_of_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, queries, slots = random_cache(SLOTS, 2, DIM), random_queries(900, 4, DIM), slots_of(900, scattered=False)
    parameters = quoka_prefill_parameters(budget=64, block=32, queries=4)
    many = dict(select_for_blocks(queries, slots, cache, parameters))
    monkeypatch.setattr(quoka, "SCORES_IN_BATCH", 1)
    for start, positions in select_for_blocks(queries, slots, cache, parameters):
        assert torch.equal(positions.sort().values, many.pop(start).sort().values)
    assert not many


@given(
    length=st.integers(1, 500),
    sinks=st.integers(0, 64),
    budget=st.one_of(st.integers(0, 200), st.floats(0, 1, exclude_min=True)),
    recency_ratio=st.floats(0, 1),
    block=st.sampled_from([16, 48]),
)
@settings(max_examples=60)
def test_a_budget_holds_sinks_and_what_is_recent(
    length: int, sinks: int, budget: float, recency_ratio: float, block: int
) -> None:
    amount: dict[str, Any] = {"budget_ratio": budget}
    if isinstance(budget, int):
        amount = {"budget": max(1, sinks + budget)}
    parameters = quoka_prefill_parameters(block=block, queries=4, sinks=sinks, recency_ratio=recency_ratio, **amount)
    cache, queries, slots = (
        random_cache(SLOTS, 2, DIM),
        random_queries(length, 4, DIM),
        slots_of(length, scattered=True),
    )
    selections = dict(select_for_blocks(queries, slots, cache, parameters))
    assert sorted(selections) == [s for s in range(0, length, block) if s > parameters.tokens(s)]
    for start, positions in selections.items():
        assert positions.shape == (2, parameters.tokens(start))
        recent = parameters.recent(start)
        assert recent == min(int(recency_ratio * parameters.tokens(start)), parameters.tokens(start) - sinks)
        for row in positions.tolist():
            assert len(set(row)) == len(row)
            assert {*range(sinks), *range(start - recent, start)} <= set(row) <= set(range(start))


@pytest.mark.parametrize(
    "parameters",
    [
        quoka_prefill_parameters(budget=600),
        quoka_prefill_parameters(budget_ratio=1.0),
        quoka_prefill_parameters(budget_ratio=1.0, sinks=16, recency_ratio=0.5),
        quoka_prefill_parameters(budget_ratio=0.1, sinks=500),
    ],
)
def test_a_budget_of_everything_is_dense(parameters: QuokaPrefill) -> None:
    cache, queries, slots = random_cache(SLOTS, 2, DIM), random_queries(500, 4, DIM), slots_of(500, scattered=True)
    outputs, reads = quoka_prefill(queries, slots, cache, SCALE, parameters)
    assert torch.equal(outputs, prefill(queries, slots, cache, SCALE))
    assert reads == PrefillReads.of_dense(0, 500, 128, cache)
    assert reads.attended == reads.context == 2 * 500 * 501 // 2


def test_what_is_selected_is_what_the_odd_query_looks_for() -> None:
    """One query of a block looks elsewhere than all others; its key must be selected though it is but one of 32."""
    cache = random_cache(SLOTS, 1, DIM)
    common, odd = torch.eye(DIM)[:2]
    queries = common.repeat(256, 1)[:, None] + 0.01 * random_queries(256, 1, DIM)
    queries[200] = 3 * odd
    slots = slots_of(256, scattered=False)
    cache.keys[slots[57], 0] = 0.1 * odd
    parameters = quoka_prefill_parameters(budget=1, block=32, queries=1)
    assert dict(select_for_blocks(queries, slots, cache, parameters))[192].tolist() == [[57]]


def test_sinks_are_selected_though_nothing_looks_like_them() -> None:
    """A sink's key lies opposite to all queries, and its value matters; the paper's selection leaves it out."""
    cache, slots = random_cache(SLOTS, 1, DIM), slots_of(256, scattered=False)
    queries = torch.eye(DIM)[0].repeat(256, 1)[:, None] + 0.01 * random_queries(256, 1, DIM)
    cache.keys[slots[:4], 0] = -torch.eye(DIM)[0]
    for sinks, expected in ((0, False), (4, True)):
        parameters = quoka_prefill_parameters(budget=20, block=64, queries=8, sinks=sinks)
        for positions in dict(select_for_blocks(queries, slots, cache, parameters)).values():
            assert ({0, 1, 2, 3} <= set(positions[0].tolist())) is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None}, "must be given when budget_ratio is not"),
        ({"budget": 64, "budget_ratio": 0.5}, "must not be given together with budget_ratio"),
        ({"budget": 0}, r"(?m)^budget$"),
        ({"budget_ratio": 0.0}, r"(?m)^budget_ratio$"),
        ({"budget_ratio": 1.1}, r"(?m)^budget_ratio$"),
        ({"budget_ratio": math.nan}, r"(?m)^budget_ratio$"),
    ],
)
def test_bad_budgets_are_refused(options: dict[str, Any], message: str) -> None:
    for parameters in (QuokaPrefill, QuokaDecode):
        with pytest.raises(ValueError, match=message):
            parameters(**options)


@pytest.mark.parametrize("name", ["block", "queries", "dense_prefix"])
def test_bad_prefill_parameters_are_refused(name: str) -> None:
    options: dict[str, Any] = {name: -1}
    with pytest.raises(ValueError, match=rf"(?m)^{name}$"):
        QuokaPrefill(**options)


def _step(context: Context, cache: LayerCache, parameters: list[QuokaDecode]) -> tuple[QuokaStep, Meter]:
    codes = KeyCodes([cache], PageGenerations(SLOTS, PAGE, CPU))
    return QuokaStep(context, SCALE, None, parameters, codes), Meter(context.requests, CPU)


def _cosine_steps(queries: Tensor, keys: Tensor) -> list[float]:
    """What codes tell of the cosines of a group's mean query, [group, head dim], with keys, [tokens, head dim]."""
    mean = (queries / queries.norm(dim=-1, keepdim=True)).mean(0).numpy()
    levels, step = codes_float64.levels_of(mean)
    length = float(np.linalg.norm(levels)) * step / math.sqrt(len(mean))
    steps: list[float] = []
    for block in keys.unflatten(0, (-1, PAGE)).numpy() if len(keys) else []:
        products = codes_float64.scores(block, mean[None], DEFAULT_BITS, math.log(2))[0]
        steps += np.floor(1024 * products / (codes_float64.norms(block, DEFAULT_BITS) * length)).tolist()
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 2), (1, 4), (3, 1)])
@pytest.mark.parametrize("sinks", [0, 4, 30])
def test_decode_equals_the_plain_version(kv_heads: int, group: int, dtype: torch.dtype, sinks: int) -> None:
    cache = random_cache(SLOTS, kv_heads, DIM, dtype=dtype)
    lengths = [333, 1, 16, 17, 500, 40]
    parameters = [
        quoka_decode_parameters(budget=50, sinks=sinks),
        quoka_decode_parameters(budget=5, sinks=sinks),
        quoka_decode_parameters(budget=3, sinks=sinks),
        quoka_decode_parameters(budget=9, sinks=sinks),
        quoka_decode_parameters(budget_ratio=0.11, sinks=sinks),
        quoka_decode_parameters(budget=4000, sinks=sinks),
    ]
    context = scattered_context(lengths, SLOTS)
    queries = random_queries(len(lengths), kv_heads * group, DIM).to(dtype)
    step, meter = _step(context, cache, parameters)

    selection = step.select(0, queries, cache, meter)
    expected_bytes = [0] * len(lengths)
    for request, (length, own) in enumerate(zip(lengths, parameters, strict=True)):
        slots = context.slots[request, :length].tolist()
        newest = (length - 1) // PAGE * PAGE
        budget = own.budget if own.budget is not None else math.ceil(own.budget_ratio * (length - 1)) + 1  # type: ignore[operator]
        always = length - newest + min(sinks, newest)
        count = max(always, min(length, budget))
        for head in range(kv_heads):
            of_group = queries[request, head * group : (head + 1) * group].double()
            scores = _cosine_steps(of_group, cache.keys[slots[:newest], head].double())
            ranked = sorted(range(min(sinks, newest), newest), key=lambda token: -scores[token])[: count - always]
            got = selection.slots[request, head, : int(selection.counts[request, head])].tolist()
            assert sorted(got[: length - newest]) == sorted(slots[newest:])
            assert sorted(got[length - newest : always]) == sorted(slots[: always - length + newest])
            # What is on the edge of two steps may get either.
            taken = [scores[slots.index(slot)] for slot in got[always:]]
            assert taken == pytest.approx([scores[token] for token in ranked], abs=1)
        # Codes of 2 bits, a factor, and a sixteenth of a mean of 4 bits and its factor; blocks of 16 fill 32 bytes.
        of_block = math.ceil((16 * (DIM / 4 + 2) + DIM / 2 + 4) / 32) * 32
        expected_bytes[request] = kv_heads * newest // 16 * of_block
    assert meter.read_bytes.tolist() == expected_bytes
    assert step.index_built_tokens == [(length - 1) // PAGE * PAGE for length in lengths]

    outputs = step.attend(0, queries, cache, Meter(len(lengths), CPU))
    tolerance = 5e-6 if dtype == torch.float32 else 2e-2
    for request, head in ((0, 0), (4, kv_heads - 1)):
        seen = selection.slots[request, head, : int(selection.counts[request, head])]
        heads = slice(head * group, (head + 1) * group)
        expected, _ = attend_head(queries[request, heads], cache.keys[seen, head], cache.values[seen, head], SCALE)
        torch.testing.assert_close(outputs[request, heads].double(), expected, atol=tolerance, rtol=0)


def test_decode_of_neighbouring_slots_equals_that_of_scattered_ones() -> None:
    scattered = scattered_context([400], SLOTS)
    run = Context(torch.arange(64, 464)[None], torch.tensor([400]))
    cache = random_cache(SLOTS, 2, DIM)
    moved = LayerCache(cache.keys.clone(), cache.values.clone())
    moved.keys[scattered.slots[0]], moved.values[scattered.slots[0]] = cache.keys[64:464], cache.values[64:464]
    queries = random_queries(1, 4, DIM)
    outputs = []
    for context, own in ((run, cache), (scattered, moved)):
        step, meter = _step(context, own, [quoka_decode_parameters(budget=50)])
        outputs.append(step.attend(0, queries, own, meter))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=0)


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=4), seed=st.integers(0, 100))
@settings(max_examples=30)
def test_decode_with_a_budget_of_everything_is_dense(lengths: list[int], seed: int) -> None:
    cache, context = random_cache(SLOTS, 2, DIM, seed), scattered_context(lengths, SLOTS, seed=seed)
    queries = random_queries(len(lengths), 4, DIM, seed)
    step, meter = _step(context, cache, [quoka_decode_parameters(budget=length) for length in lengths])
    dense = attend_all(queries, context, cache, SCALE, Meter(len(lengths), CPU))
    torch.testing.assert_close(step.attend(0, queries, cache, meter), dense, atol=5e-6, rtol=0)
    assert meter.attended.tolist() == [2 * length for length in lengths]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 300])
def test_decode_with_a_share_of_one_keeps_every_token(length: int) -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([length], SLOTS)
    step, meter = _step(context, cache, [quoka_decode_parameters(budget_ratio=1.0)])
    selection = step.select(0, random_queries(1, 4, DIM), cache, meter)
    for head in range(2):
        assert sorted(positions_of(selection, context, 0, head)) == list(range(length))


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    options=st.builds(lambda budget: {"budget": budget}, st.integers(1, 450))
    | st.builds(lambda ratio: {"budget_ratio": ratio}, st.floats(0.001, 1)),
    sinks=st.integers(0, 80),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_decode_keeps_sinks_and_the_newest_page_within_the_budget(
    lengths: list[int], options: dict[str, Any], sinks: int, seed: int
) -> None:
    cache, context = random_cache(SLOTS, 2, DIM, seed), scattered_context(lengths, SLOTS, seed=seed)
    parameters = quoka_decode_parameters(**options, sinks=sinks)
    step, meter = _step(context, cache, [parameters] * len(lengths))
    selection = step.select(0, random_queries(len(lengths), 4, DIM, seed), cache, meter)
    for request, length in enumerate(lengths):
        always = {*range(min(sinks, length)), *range((length - 1) // PAGE * PAGE, length)}
        for head in range(2):
            positions = positions_of(selection, context, request, head)
            assert always <= set(positions)
            assert len(positions) == max(len(always), min(length, parameters.tokens(length - 1)))


def test_cosines_that_codes_predict_are_near() -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([1600], SLOTS)
    codes = KeyCodes([cache], PageGenerations(SLOTS, PAGE, CPU), bits=4)
    pages = codes.generations.complete_pages(context, 0, 1584)
    codes.ensure(pages)
    mean = F.normalize(random_queries(2, 2, DIM), dim=-1).mean(1, keepdim=True)
    steps = cosine_steps(codes, 0, mean, codes.blocks_of(pages))[:, 0]
    assert torch.equal(steps, steps.round())
    for head in range(2):
        exact = F.cosine_similarity(cache.keys[context.slots[0, :1584], head], mean[head], dim=-1)
        found = steps[head] / 1024
        assert float((found - exact).abs().max()) < 0.25
        assert float(torch.corrcoef(torch.stack((found, exact)))[0, 1]) > 0.97


def test_of_equal_cosines_the_first_are_taken() -> None:
    cache, context = random_cache(SLOTS, 1, DIM), scattered_context([600], SLOTS)
    # All pages alike.
    cache.keys[:] = cache.keys[:PAGE].repeat(SLOTS // PAGE, 1, 1)
    step, meter = _step(context, cache, [quoka_decode_parameters(budget=108)])
    queries = random_queries(1, 2, DIM)
    [scores] = step.scores(0, queries, cache, meter)
    best = int(scores[0, :PAGE].argmax())
    slots = step.select(0, queries, cache, meter).slots[0, 0]
    # Eight tokens of the newest page, the best of each of 37, and of the next best the first.
    assert slots[8:45].tolist() == context.slots[0, best:592:PAGE].tolist()
    assert (slots[45:82] % PAGE).unique().numel() == 1
    positions = [context.slots[0].tolist().index(slot) for slot in slots[82:108].tolist()]
    assert positions == sorted(positions)
    assert len({position % PAGE for position in positions}) == 1


def test_keys_and_queries_of_nothing_have_a_cosine_of_0() -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([200], SLOTS)
    cache.keys[context.slots[0, 32:48]] = 0
    step, meter = _step(context, cache, [quoka_decode_parameters(budget=60)])
    [scores] = step.scores(0, random_queries(1, 4, DIM), cache, meter)
    assert (scores[:, 32:48].ceil() == 0).all()
    [scores] = step.scores(0, torch.zeros(1, 4, DIM), cache, meter)
    assert (scores.ceil() == 0).all()
