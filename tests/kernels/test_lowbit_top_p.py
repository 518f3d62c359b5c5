"""``lowbit_top_p`` against a plain float64 version, and what always holds of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_float64 import scores_of_head
from tests.kernels.caches import random_cache, random_softmax
from tests.kernels.coded_cases import CPU, SLOTS, Case, never
from tests.kernels.coded_float64 import Head, kept_positions
from tests.kernels.parameters import lowbit_top_p_parameters, termination_at
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import attend
from winnow_kernels.cache import Context
from winnow_kernels.decode.predicted_attention import PredictedAttention
from winnow_kernels.indexes.key_codes import BITS, KeyCodes, bytes_of_key
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE, LowBitTopP
from winnow_kernels.policies.lowbit_top_p.reference import LowBitTopPStep
from winnow_kernels.selection.tokens import Selection


def step_of(case: Case, parameters: list[LowBitTopP], termination: Termination | None = None) -> LowBitTopPStep:
    return LowBitTopPStep(case.context, case.scale, termination, parameters, case.codes)


def exact_share(case: Case, queries: Tensor, request: int, kv_head: int, head: Head, positions: list[int]) -> float:
    """The share that is told of a KV head: the exact mass of what was read, beside what is predicted of the rest."""
    grouped = queries.double().unflatten(1, (case.cache.kv_heads, -1))[request, kv_head]
    keys = case.cache.keys[case.context.slots[request, positions], kv_head]
    read = scores_of_head(grouped, keys, case.scale, case.cache.softmax.cap).exp().sum(1).tolist()
    shares = []
    for own, rest, total, top in zip(read, head.rest(positions), head.totals, head.highest, strict=True):
        shares.append(own / (own + rest * total * 2**top))
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "bits"),
    [(2, 4, 64, 2), (1, 7, 80, 2), (3, 1, 128, 3), (1, 2, 256, 4), (1, 16, 96, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("in_order", "softmax"), [(False, "plain"), (True, "plain"), (True, "cap and sinks")])
def test_equals_the_plain_version(
    kv_heads: int,
    group: int,
    head_dim: int,
    bits: int,
    dtype: torch.dtype,
    page_size: int,
    in_order: bool,
    softmax: str,
) -> None:
    lengths = [700, 300, 96, 513]
    case = Case.of(lengths, kv_heads, head_dim, bits, page_size, dtype=dtype)
    # Its shares are of the tokens' mass alone, whatever sinks take.
    case = replace(case, cache=replace(case.cache, softmax=random_softmax(softmax, kv_heads * group)))
    asked = [(0.6, 0, None, 16), (0.3, 150, None, 0), (0.9, 0, None, 16), (0.97, 0, 170, 40)]
    parameters = [lowbit_top_p_parameters(p, least, most, sinks) for p, least, most, sinks in asked]
    queries = case.queries(group, sharpness=3.0).to(dtype)
    step = step_of(case, parameters, never(4) if in_order else None)
    meter = Meter(4, CPU)

    selection = step.select(0, queries, case.cache, meter)
    read_bytes = meter.read_bytes.tolist()
    attended = attend(queries, case.cache, selection, case.scale, meter)
    step.note(selection, attended)

    expected, is_capped = [], []
    for request, (p, least, most, sinks) in enumerate(asked):
        kept = kept_positions(lengths[request], sinks, page_size)
        scored = max(0, lengths[request] - 64) // page_size * page_size
        is_scored = len(kept) <= 0.75 * lengths[request]
        of_head = case.cache.vector_bytes * len(kept) + bytes_of_key(head_dim, bits) * scored
        assert read_bytes[request] == round(kv_heads * of_head) * is_scored
        of_heads, shares, capped = [], [], False
        for head in range(kv_heads):
            known = case.head(queries, request, head, sinks)
            taken, is_cut = known.top_p(p, bits, least, most) if is_scored else (set(range(lengths[request])), False)
            positions = known.positions(taken, in_order=in_order)
            assert positions_of(selection, case.context, request, head) == positions
            of_heads.append(positions)
            shares.append(exact_share(case, queries, request, head, known, positions))
            capped |= is_cut
        expected.append(of_heads)
        is_capped.append(capped)
        assert float(step.estimated_share[request]) == pytest.approx(sum(shares) / kv_heads, rel=1e-4)
    assert step.capped.tolist() == is_capped
    assert is_capped[3] or page_size == 64
    assert selection.counts[2].tolist() == [96] * kv_heads
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    outputs = output_over(queries.float(), case.context, case.cache, case.scale, expected)
    torch.testing.assert_close(attended.output.double(), outputs, atol=atol, rtol=0)


@given(
    length=st.integers(65, 600),
    p=st.floats(0.01, 1),
    sinks=st.integers(0, 200),
    least=st.integers(0, 300),
    cap=st.none() | st.integers(16, 400),
    sharpness=st.floats(0.1, 40.0),
    seed=st.integers(0, 1000),
)
# Most tokens weigh nothing, and are taken all the same.
@example(length=500, p=0.999, sinks=0, least=300, cap=None, sharpness=40.0, seed=0)
@example(length=500, p=1.0, sinks=16, least=0, cap=200, sharpness=40.0, seed=1)
@settings(max_examples=60)
def test_what_always_holds(
    length: int, p: float, sinks: int, least: int, cap: int | None, sharpness: float, seed: int
) -> None:
    case = Case.of([length], kv_heads=1, seed=seed)
    queries = case.queries(3, sharpness, seed)
    selections = []
    kept = kept_positions(length, sinks, 16)
    is_scored = len(kept) <= 0.75 * length
    for share in (p, min(1.0, p + 0.1)):
        step = step_of(case, [lowbit_top_p_parameters(share, least, cap, sinks)])
        selection = step.select(0, queries, case.cache, Meter(1, CPU))
        step.note(selection, attend(queries, case.cache, selection, case.scale, Meter(1, CPU)))
        positions = positions_of(selection, case.context, 0, 0)
        if is_scored:
            known = case.head(queries, 0, 0, sinks)
            taken, is_cut = known.top_p(share, case.codes.bits, least, cap)
            assert positions == known.positions(taken, in_order=False)
            assert bool(step.capped[0]) == is_cut
            told = exact_share(case, queries, 0, 0, known, positions)
            # Sharper ones may be predicted so wrong that the rest is a difference of equal numbers.
            if sharpness <= 10:
                assert float(step.estimated_share[0]) == pytest.approx(told, rel=1e-3)
        assert set(kept) <= set(positions)
        if len(positions) == length:
            assert positions == [*range(length - 1, -1, -1)]
            assert float(step.estimated_share[0]) == 1
        else:
            assert positions[: len(kept)] == kept
            assert len(positions) <= 0.75 * length
            assert len(positions) >= min(least, cap or length)
            assert cap is None or len(positions) <= max(cap, len(kept))
        selections.append(set(positions))
    if cap is None:
        assert selections[0] <= selections[1]


@given(p=st.floats(1e-6, 1), more=st.floats(0, 1), bits=st.sampled_from(BITS))
@example(p=0.999, more=0.001, bits=2)
@example(p=0.9990000000000001, more=0, bits=2)
def test_an_aim_is_no_less_than_what_is_asked_for_and_takes_everything_only_if_that_does(
    p: float, more: float, bits: int
) -> None:
    aim = aimed_share(p, bits)
    assert p <= aim <= 1
    assert (aim > WHOLE_ABOVE) == (p > WHOLE_ABOVE)
    assert aim <= aimed_share(min(1, p + more), bits)
    assert aim <= aimed_share(p, 2)


@pytest.mark.parametrize(
    ("p", "bits", "aim"),
    [(0.9, 2, 0.911), (0.5, 2, 0.555), (0.9, 3, 0.9015), (0.9, 4, 0.9), (0.999, 2, 0.999), (0.9995, 2, 0.9995)],
)
def test_fewer_bits_aim_higher(p: float, bits: int, aim: float) -> None:
    assert aimed_share(p, bits) == pytest.approx(aim, abs=1e-12)


def test_a_query_head_takes_no_step_more_than_it_needs() -> None:
    """Of eight tokens with 1/16 of the mass and eight with 1/32, and a quarter exact, 0.7 is reached with the first."""
    kept = torch.full((1, 1, 4), 0.0)
    others = torch.cat([torch.zeros(8), torch.full((8,), -1.0)])[torch.randperm(16)]
    predicted = PredictedAttention.of(kept, others[None, None])
    assert float(predicted.kept_share) == 0.25
    assert torch.equal(predicted.shares, others.double().exp2()[None, None] / 16)
    for share, least, tokens in [(0.1, 0, 0), (0.25, 0, 0), (0.26, 0, 8), (0.75, 0, 8), (0.76, 0, 16), (0.1, 3, 8)]:
        taken = predicted.reaching(share, least)
        assert int(taken.sum()) == tokens, share
        assert bool((others[taken[0, 0]] == 0).all()) == (tokens < 16)
    assert int(predicted.reaching(0.1, 9).sum()) == 16
    assert int(predicted.reaching(0.1, 99).sum()) == 16


def test_scores_within_an_eighth_come_together_and_what_weighs_nothing_does_so_too() -> None:
    kept = torch.zeros(1, 1, 1)
    scores = torch.tensor([-0.01, 0.03, -1.0, -24.4, -26.0, -60.0, -500.0])
    predicted = PredictedAttention.of(kept, scores[None, None])
    assert predicted.shares[0, 0].tolist()[:3] == pytest.approx([0.2857, 0.2857, 0.1429], abs=1e-4)
    assert predicted.shares[0, 0].tolist()[3:] == [0, 0, 0, 0]
    assert predicted.keys()[0].tolist() == [-116, -116, -180, *[-1536] * 4]
    for share, least, tokens in [(0.5, 0, 2), (0.8, 0, 2), (0.9, 0, 3), (0.999, 0, 3), (0.5, 3, 3), (0.5, 4, 7)]:
        assert int(predicted.reaching(share, least).sum()) == tokens, (share, least)


def test_the_newest_token_is_enough_where_it_holds_everything() -> None:
    case = Case.of([400], kv_heads=1)
    queries = case.queries(2)
    case.cache.keys[case.context.slots[0, 399], 0] = 100 * queries[0].mean(0)
    step = step_of(case, [lowbit_top_p_parameters(0.99, sinks=4)])
    selection = step.select(0, queries, case.cache, Meter(1, CPU))
    assert positions_of(selection, case.context, 0, 0) == kept_positions(400, 4, 16)


def test_a_share_of_one_is_dense() -> None:
    case = Case.of([400, 90], kv_heads=2)
    queries = case.queries(2)
    step = step_of(case, [lowbit_top_p_parameters(0.9991), lowbit_top_p_parameters(1.0)])
    output = step.attend(0, queries, case.cache, Meter(2, CPU))
    expected = dense_output(queries, case.context, case.cache, case.scale)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    assert step.estimated_share.tolist() == [1, 1]


def test_early_termination_reads_in_order_and_tells_what_it_left_out() -> None:
    case = Case.of([1500], kv_heads=1, bits=4)
    queries = case.queries(2, sharpness=2.0)
    termination = Termination.of([termination_at(0.5, 0.5, 1)], CPU)
    parameters = [lowbit_top_p_parameters(0.95, sinks=16)]
    step, whole = step_of(case, parameters, termination), step_of(case, parameters, never(1))
    meter = Meter(1, CPU)
    selection = step.select(0, queries, case.cache, meter)
    attended = attend(queries, case.cache, selection, case.scale, meter, termination)
    step.note(selection, attended)
    whole.attend(0, queries, case.cache, Meter(1, CPU))

    count, read = int(selection.counts), int(attended.read)
    assert read < count
    positions = positions_of(selection, case.context, 0, 0)
    keys = [key // 16 for key in case.head(queries, 0, 0, 16).keys]
    kept = kept_positions(1500, 16, 16)
    assert positions[: len(kept)] == kept
    others = sorted(set(range(1500)) - set(kept))
    order = [keys[others.index(position)] for position in positions[len(kept) :]]
    assert order == sorted(order, reverse=True)
    scores = queries[0].double() @ case.cache.keys[case.context.slots[0], 0].double().T * case.scale
    true = (attended.log_sum_exp[0].double() - scores.logsumexp(-1)).exp().mean()
    assert float(step.estimated_share[0]) == pytest.approx(float(true), abs=0.05)
    assert float(step.estimated_share[0]) < float(whole.estimated_share[0])


def test_a_head_that_reads_everything_reads_to_the_end() -> None:
    case = Case.of([900], kv_heads=1)
    case.cache.values[:] = 1.0
    termination = Termination.of([termination_at(1.0, 2.0, 1)], CPU)
    meter = Meter(1, CPU)
    step_of(case, [lowbit_top_p_parameters(1.0)], termination).attend(0, case.queries(2), case.cache, meter)
    assert int(meter.attended) == 900
    assert int(meter.skipped_tiles) == 0


def test_rows_are_alike_whatever_their_neighbours() -> None:
    case = Case.of([700, 300, 513], kv_heads=2)
    parameters = [lowbit_top_p_parameters(0.95, max_tokens=100), *[lowbit_top_p_parameters(0.8, sinks=16)] * 2]
    thresholds = [termination_at(1.0, 2.0, 1), None, termination_at(0.1, 0.1, 1)]
    queries = case.queries(2, sharpness=3.0)
    together = step_of(case, parameters, Termination.of(thresholds, CPU))
    meter = Meter(3, CPU)
    output = together.attend(0, queries, case.cache, meter)
    for row in range(3):
        alone = replace(case, context=case.context.rows([row]))
        step = step_of(alone, parameters[row : row + 1], Termination.of(thresholds[row : row + 1], CPU))
        own_meter = Meter(1, CPU)
        own = step.attend(0, queries[row : row + 1], case.cache, own_meter)
        torch.testing.assert_close(output[row], own[0], atol=1e-6, rtol=1e-6)
        for name, counts in vars(meter).items():
            assert counts[row] == getattr(own_meter, name)[0], name
        torch.testing.assert_close(together.estimated_share[row], step.estimated_share[0])
        assert together.capped[row] == step.capped[0]
    assert together.capped.tolist() == [True, False, False]


class Server:
    """A pool of pages that requests write, share and give back."""

    def __init__(self) -> None:
        self.generations = PageGenerations(SLOTS, 16, CPU)
        self.cache = random_cache(SLOTS, 2, 32)
        self.codes = KeyCodes([self.cache], self.generations)

    def write(self, pages: list[int], begin: int, tokens: Tensor) -> None:
        """Write ``tokens``, keys and values [n, 2, KV heads, head dim], from position ``begin`` on."""
        slots = self.slots(pages)[begin : begin + len(tokens)]
        self.generations.written(slots)
        self.cache.keys[slots], self.cache.values[slots] = tokens[:, 0], tokens[:, 1]

    def slots(self, pages: list[int]) -> Tensor:
        return (torch.tensor(pages)[:, None] * 16 + torch.arange(16)).flatten()

    def selected(self, contexts: list[tuple[list[int], int]], queries: Tensor) -> list[list[list[int]]]:
        """Positions that each request and KV head reads; requests are pages and a length."""
        longest = max(length for _, length in contexts)
        table = torch.full((len(contexts), longest), SLOTS)
        for row, (pages, length) in enumerate(contexts):
            table[row, :length] = self.slots(pages)[:length]
        context = Context(table, torch.tensor([length for _, length in contexts]))
        parameters = [lowbit_top_p_parameters(0.5, sinks=4)] * len(contexts)
        step = LowBitTopPStep(context, 32**-0.5, None, parameters, self.codes)
        selection = step.select(0, queries.expand(len(contexts), -1, -1), self.cache, Meter(len(contexts), CPU))
        return [[positions_of(selection, context, row, head) for head in range(2)] for row in range(len(contexts))]


def alone(tokens: Tensor, queries: Tensor) -> list[list[int]]:
    """What a request with these tokens reads on a fresh server, in pages that follow each other."""
    server = Server()
    pages = [*range(1, -(-len(tokens) // 16) + 1)]
    server.write(pages, 0, tokens)
    return server.selected([(pages, len(tokens))], queries)[0]


def test_requests_that_share_a_prefix_and_fork_inside_a_page_read_what_they_would_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(200, 2, 2, 32, generator=generator)
    first, second = (torch.cat([shared, torch.randn(150, 2, 2, 32, generator=generator)]) for _ in range(2))
    queries = 4 * torch.randn(1, 4, 32, generator=generator)
    server = Server()
    own_pages = [*range(20, 42)]
    server.write(own_pages, 0, first[:230])
    assert server.selected([(own_pages, 230)], queries)[0] == alone(first[:230], queries)
    # The prefix's twelve complete pages are shared, and what lies in the thirteenth is written anew.
    pages = [*own_pages[:12], *range(60, 70)]
    server.write(pages, 192, second[192:210])
    for length in range(230, 330, 7):
        server.write(own_pages, length - 7, first[length - 7 : length])
        server.write(pages, length - 27, second[length - 27 : length - 20])
        both = server.selected([(own_pages, length), (pages, length - 20)], queries)
        assert both == [alone(first[:length], queries), alone(second[: length - 20], queries)]


def test_pages_that_are_given_back_and_written_anew_are_read_as_what_they_hold() -> None:
    generator = torch.Generator().manual_seed(4)
    before, after = torch.randn(2, 330, 2, 2, 32, generator=generator)
    queries = 4 * torch.randn(1, 4, 32, generator=generator)
    server = Server()
    pages = [*range(9, 30)]
    server.write(pages, 0, before)
    assert server.selected([(pages, 330)], queries)[0] == alone(before, queries)
    # Half of the pages, in another order, go to another request.
    others = [*pages[:10:-1], *range(50, 70)]
    server.write(others, 0, after)
    assert server.selected([(others, 330)], queries)[0] == alone(after, queries)


def test_after_a_retraction_the_same_tokens_are_read() -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randn(400, 2, 2, 32, generator=generator)
    queries = 4 * torch.randn(1, 4, 32, generator=generator)
    server = Server()
    pages = [*range(5, 31)]
    server.write(pages, 0, tokens[:300])
    steps = []
    for length in range(301, 401):
        server.write(pages, length - 1, tokens[length - 1 : length])
        steps.append(server.selected([(pages, length)], queries)[0])
    # Computed anew at once, in other pages, and scored for the first time after a dense stretch.
    elsewhere = [*range(90, 60, -1)]
    server.write(elsewhere, 0, tokens[:360])
    for length in range(361, 401):
        server.write(elsewhere, length - 1, tokens[length - 1 : length])
        assert server.selected([(elsewhere, length)], queries)[0] == steps[length - 301]


def test_codes_are_built_once_and_counted() -> None:
    case = Case.of([300, 90])
    parameters = [lowbit_top_p_parameters(0.9)] * 2
    assert step_of(case, parameters).index_built_tokens == [288, 80]
    assert step_of(case, parameters).index_built_tokens == [0, 0]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"p": 0.0}, "p"),
        ({"p": 1.1}, "p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 8}, "max_tokens"),
        ({"max_tokens": 31}, "max_tokens"),
        ({"max_tokens": 500, "min_tokens": 501}, "max_tokens"),
        ({"sinks": -1}, "sinks"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=rf"(?m)^{field}$"):
        LowBitTopP.model_validate(fields)


def test_a_selection_is_of_the_requests_own_tokens() -> None:
    case = Case.of([200, 70, 65, 64, 1])
    step = step_of(case, [lowbit_top_p_parameters(0.5)] * 5)
    selection: Selection = step.select(0, case.queries(2), case.cache, Meter(5, CPU))
    assert selection.counts[2:].tolist() == [[65, 65], [64, 64], [1, 1]]
    for request in range(5):
        positions_of(selection, case.context, request, 0)
