"""With a trace each query head takes as many tokens as that says, off its own list; without one nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from torch import Tensor

from benchmarks.kernels.decode_requests import Contexts, Heads, Requests
from benchmarks.kernels.tactic_trace.given_fit import GivenFit
from benchmarks.kernels.tactic_trace.lengths import LengthTrace, Recorded, ServedLengths
from benchmarks.kernels.tactic_trace.serving import hooks_of
from sglang_winnow import crossover
from tests.kernels.gpu.compiling import compile_launches
from tests.kernels.gpu.test_tactic import SCALE, UNTOUCHED, Case, case, check, launch_at_128k, queries_of, run
from tests.kernels.parameters import tactic_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.batch import WHOLE_TO_THE_END
from winnow_kernels.indexes.clusters import SPAN
from winnow_kernels.policies.attention_policy import parse_policy
from winnow_kernels.policies.tactic.gpu import selection as tactic
from winnow_kernels.policies.tactic.gpu.fit import fit_kernel
from winnow_kernels.policies.tactic.reference import TacticStep
from winnow_kernels.policies.tactic.selector import TacticSelector

LENGTHS, CLUSTERED = [460, 90, 400, 333], [384, 64, 320, 256]
PARAMETERS = [tactic_parameters(0.5), None, tactic_parameters(0.75), tactic_parameters(0.75, 80)]
UNCAPPED = [0, 2]
GROUP, KV_HEADS = 3, 2
HEADS = GROUP * KV_HEADS


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> GivenFit:
    fit = GivenFit()
    monkeypatch.setattr(tactic, "fit_kernel", fit)
    return fit


def a_case(device: torch.device) -> Case:
    return case(list(PARAMETERS), LENGTHS, CLUSTERED, device, "clustered", KV_HEADS)


def served(device: torch.device, most: int = 40) -> ServedLengths:
    """Of two layers, two shares and two steps, some of them 0, in contexts with 192 tokens in clusters."""
    tokens = torch.randint(0, most, (2, 2, 2, HEADS), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    tokens[1, 0, :, ::2] = 0
    shares = torch.tensor([0.5, 0.75], dtype=torch.float64, device=device)
    return ServedLengths(tokens.to(device), shares, 192)


def expected_tokens(lengths: ServedLengths, layer: int, row: int) -> Tensor:
    """What each query head of a row takes: int64 [KV heads, group]."""
    of_row = PARAMETERS[row]
    assert of_row is not None
    share = lengths.shares.tolist().index(of_row.p)
    taken = lengths.tokens[layer, share, (LENGTHS[row] + row) % 2].long() * CLUSTERED[row] // lengths.clustered
    return taken.view(KV_HEADS, GROUP)


def expected_slots(the_case: Case, queries: Tensor, row: int, taken: Tensor) -> list[set[int]]:
    """The slots of each KV head's union, when query heads take ``taken`` off their lists, and all in no cluster."""
    context = the_case.context.rows([row])
    # Takes everything, so that the lists are whole.
    step = TacticStep(context, SCALE, None, the_case.index, [tactic_parameters(1.0)], the_case.clustered[[row]])
    ranking = step.estimate(0, queries[[row]], the_case.cache, Meter(1, queries.device)).ranking
    found = []
    for kv_head in range(KV_HEADS):
        slots = set(context.slots[0, CLUSTERED[row] : LENGTHS[row]].tolist())
        for head in range(GROUP):
            places = torch.arange(int(taken[kv_head, head]), device=queries.device)
            at = torch.searchsorted(ranking.ends[0, kv_head, head], places, right=True)
            clusters = ranking.clusters[0, kv_head, head, at]
            ranks = places - ranking.starts[0, kv_head, head, at]
            of_heads = (1, KV_HEADS, len(places))
            positions = the_case.index.members(0, step.spans, clusters.expand(of_heads), ranks.expand(of_heads))
            slots |= set(context.slots[0, positions[0, kv_head]].tolist())
        found.append(slots)
    return found


def test_heads_take_what_the_trace_says(given: GivenFit, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    the_case = a_case(device)
    queries = queries_of(the_case, GROUP, 2.0)
    given.lengths, given.layer = served(device), 1
    traced = run(the_case, queries)
    counts = traced.selection.counts.tolist()
    assert set(counts[1]) == {UNTOUCHED}
    for row in UNCAPPED:
        unions = expected_slots(the_case, queries, row, expected_tokens(given.lengths, 1, row))
        for kv_head, union in enumerate(unions):
            assert LENGTHS[row] - CLUSTERED[row] < len(union) < 0.75 * LENGTHS[row]
            slots = traced.selection.slots[row, kv_head, : counts[row][kv_head]].tolist()
            assert len(slots) == len(union)
            assert set(slots) == union
    assert counts[3] == [80, 80]

    monkeypatch.setattr(tactic, "fit_kernel", fit_kernel)
    own = run(the_case, queries)
    check(the_case, own)
    assert own.selection.counts[UNCAPPED].tolist() != traced.selection.counts[UNCAPPED].tolist()
    # The fit has been made all the same: what it believes is what it is without a trace, but for whole contexts.
    fitted = (own.selection.counts > 0).repeat_interleave(GROUP, 1)[UNCAPPED]
    assert bool(fitted.any())
    reported, own_reported = traced.statistics.reported, own.statistics.reported
    assert torch.equal(reported.beliefs[UNCAPPED][fitted], own_reported.beliefs[UNCAPPED][fitted])


def test_no_token_and_all(given: GivenFit, device: torch.device) -> None:
    the_case = a_case(device)
    lengths = served(device)
    tokens = torch.zeros_like(lengths.tokens)
    # The second share, which rows 2 and 3 have.
    tokens[:, 1] = 192
    given.lengths = replace(lengths, tokens=tokens)
    counts = run(the_case, queries_of(the_case, GROUP, 2.0)).selection.counts.tolist()
    assert counts[0] == [LENGTHS[0] - CLUSTERED[0]] * KV_HEADS
    assert counts[2:] == [[WHOLE_TO_THE_END, WHOLE_TO_THE_END], [80, 80]]


def test_a_share_that_the_trace_does_not_know_takes_nothing(given: GivenFit, device: torch.device) -> None:
    the_case = a_case(device)
    lengths = served(device)
    given.lengths = replace(lengths, shares=lengths.shares + 0.01)
    counts = run(the_case, queries_of(the_case, GROUP, 2.0)).selection.counts
    assert counts[0].tolist() == [LENGTHS[0] - CLUSTERED[0]] * KV_HEADS


def test_without_lengths_nothing_is_launched(given: GivenFit, device: torch.device) -> None:
    the_case = a_case(device)
    with pytest.raises(RuntimeError, match="how many tokens"):
        run(the_case, queries_of(the_case, GROUP, 2.0))


def launch_given_at_128k() -> None:
    fit = GivenFit()
    fit.lengths = ServedLengths(torch.zeros(1, 7, 4, 32, dtype=torch.int32), torch.zeros(7, dtype=torch.float64), 192)
    vars(tactic)["fit_kernel"] = fit
    launch_at_128k()


def test_hopper_needs_no_local_memory() -> None:
    of_fit = [kernel for kernel in compile_launches(launch_given_at_128k) if "given_fit" in kernel.kernel]
    assert of_fit
    for kernel in of_fit:
        assert kernel.local_bytes == 0
        assert kernel.shared_bytes < 80 * 1024


def test_a_server_with_the_plugin(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of each group takes something, so that the union is as large as that."""
    tokens = [[[300, 0, 0, 200], [7, 0, 0, 100]]]
    recorded = Recorded(p=0.75, tokens=tokens, tokens_per_head=75.9, union_percent=29.6)
    trace = LengthTrace(about={}, clustered=SPAN, group=2, correlation=0.5, recorded=[recorded])
    monkeypatch.setattr(tactic, "fit_kernel", fit_kernel)
    for method in ("__init__", "enter", "select"):
        monkeypatch.setattr(TacticSelector, method, getattr(TacticSelector, method))
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry._hooks.clear()
    for hook in hooks_of(trace):
        if hook.target.startswith("winnow_kernels."):
            HookRegistry.register(hook.target, hook.function, hook.kind)
    HookRegistry.apply_hooks()

    monkeypatch.setenv(crossover.ENVIRONMENT, "0")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    contexts = Contexts(Heads(query=4, kv=2, dim=64), SPAN + 40, 1, 4, device, dtype)
    asked = {"policy": "tactic", "p": 0.75, "full_layers": 1, "sinks": 0}
    requests = Requests(contexts, parse_policy({"decode": asked}))
    for layer in range(contexts.layers):
        requests.select(layer)
    counts = [requests.step.selection(layer).counts.tolist() for layer in range(1, contexts.layers)]
    assert counts == [[[40 + 300, 40 + 200]], [[40 + 7, 40 + 100]], [[40 + 7, 40 + 100]]]
    with pytest.raises(ValueError, match="p: must be one of the trace's"):
        requests.serve(parse_policy({"decode": asked | {"p": 0.76}}))
