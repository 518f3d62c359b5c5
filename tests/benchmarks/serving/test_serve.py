"""What the benchmark of a GPU server makes of its arguments and measurements. Nothing is timed, no server started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.model_shapes import SHAPES, shape_named, write_model
from benchmarks.records import Record, merged
from benchmarks.serving.batch_timing import BatchTiming, Stream, median_timing, read_stream, timing_of
from benchmarks.serving.serve import (
    Cell,
    Contestant,
    Measured,
    Plan,
    Prompts,
    arguments_of,
    environment_of,
    halves_of,
    kinds_asked,
    measure,
    parse_contestant,
    read_share,
    rows_of,
    table,
    with_attending,
    with_borrowed_baselines,
)
from benchmarks.serving.server_plugins import NOOP_ATTENTION
from sglang_winnow.delta_profiles import delta_profile

MODEL = "Llama-3.1-8B"
TIMING = BatchTiming(1.0, 2.0, 0.010, 0.01, 0.010, 0.012, 100, 800.0, 0, None, None)


def timing(tpot: float, **more: Any) -> BatchTiming:
    return BatchTiming(**vars(TIMING) | {"tpot": tpot} | more)


def measured(backend: str, tpot: float, policy: str = "dense", **more: Any) -> Measured:
    contestant = Contestant(policy, None if policy == "dense" else {"decode": {"policy": policy}})
    memory = more.pop("peak_memory_bytes", None)
    return Measured(backend, Cell(32768, 8), contestant, 128, timing(tpot, **more), 300_000, memory)


def event(tokens: int, **more: Any) -> str:
    meta = {"completion_tokens": tokens, "cached_tokens": 3, "finish_reason": None} | more
    return "data: " + json.dumps({"meta_info": meta})


def test_a_stream() -> None:
    lines = [
        (1.0, event(1)),
        (1.0, ""),
        (1.5, event(2)),
        (1.6, event(2)),
        (2.0, event(4, finish_reason={"type": "length"}, attention={"decode": {"kv_read_ratio": 0.1}})),
        (2.1, "data: [DONE]"),
    ]
    stream = read_stream(0.5, lines)
    assert stream.arrivals == [(1.0, 1), (1.5, 2), (2.0, 4)]
    assert (stream.ttft, stream.tokens, stream.cached_tokens) == (0.5, 4, 3)
    assert stream.decode == {"kv_read_ratio": 0.1}


def test_a_stream_that_breaks_off_or_fails() -> None:
    with pytest.raises(RuntimeError, match="broke off"):
        read_stream(0.0, [(1.0, event(1))])
    with pytest.raises(RuntimeError, match="out of memory"):
        read_stream(0.0, [(1.0, 'data: {"error": "out of memory"}')])


def test_only_steps_in_which_all_decode_count() -> None:
    # Slow until the second request decodes, at 10 s; then 0.1 s a step, once two tokens at a time; alone from 11 s on.
    slow = [(float(second), second + 1) for second in range(10)]
    together = [(10 + 0.1 * step, 11 + step) for step in range(11) if step != 6]
    alone = [(11 + 0.01 * step, 21 + step) for step in range(1, 50)]
    watched = Stream(-1.0, [*slow, *together, *alone], 0, {"kv_read_ratio": 0.2, "attended_ratio": 0.1})
    other = Stream(0.0, [(9.95, 1), (11.0, 11)], 16, {"kv_read_ratio": 0.4, "attended_ratio": 0.3})
    found = timing_of([watched, other])
    assert found.tpot == pytest.approx(0.1)
    assert found.tpot_spread == pytest.approx(0, abs=1e-9)
    assert found.mean_tpot == pytest.approx(0.1)
    assert found.steps == 8
    assert 0.1 < found.p99_gap <= 0.2
    assert (found.ttft, found.longest_ttft) == pytest.approx((5.475, 9.95))
    assert found.throughput == pytest.approx((70 + 11) / (11.49 + 1))
    assert (found.kv_read_ratio, found.attended_ratio) == pytest.approx((0.3, 0.2))
    assert found.cached_tokens == 16


def test_tokens_that_come_together_after_unequal_times() -> None:
    """As after checks of drafts: the median of times a token is that of either kind, their mean is what counts."""
    seconds = [0.4 * step for step in range(9)]
    tokens = [1 + 4 * step - (step + 1) // 2 * 3 for step in range(9)]
    stream = Stream(-1.0, list(zip(seconds, tokens, strict=True)), 0, {})
    found = timing_of([stream])
    assert found.mean_tpot == pytest.approx((seconds[-1] - seconds[2]) / (tokens[-1] - tokens[2]))
    assert found.tpot != pytest.approx(found.mean_tpot)
    # Tokens that come with others wait for nothing, the first of them for all.
    assert found.p99_gap == pytest.approx(0.4)


def test_too_few_steps_together() -> None:
    streams = [Stream(0.0, [(1.0, 1), (2.0, 2)], 0, {}), Stream(0.0, [(1.9, 1), (2.0, 2)], 0, {})]
    with pytest.raises(ValueError, match="more output tokens"):
        timing_of(streams)


def test_policies() -> None:
    assert parse_contestant("tactic").policy == {"decode": {"policy": "tactic"}}
    asked = {"decode": {"policy": "quest", "budget": 64}}
    named = parse_contestant("small=" + json.dumps(asked))
    assert (named.name, named.policy) == ("small", asked)
    mixed, beside = halves_of(parse_contestant("tactic"))
    assert mixed.name == "half tactic, half dense"
    assert mixed.policies(4) == [{"decode": {"policy": "tactic"}}, None] * 2
    assert beside.name == "dense beside half tactic"
    assert beside.policies(4) == [None, {"decode": {"policy": "tactic"}}] * 2
    assert kinds_asked([named, mixed, Contestant("dense", None)]) == {"quest", "tactic"}
    with pytest.raises(typer.BadParameter, match="nonsense"):
        parse_contestant("nonsense")


def test_prompts_are_distinct_and_in_the_vocabulary() -> None:
    prompts = Prompts(512, 0)
    found = [*prompts(64, 8), *prompts(64, 8)]
    assert len({tuple(prompt[:16]) for prompt in found}) == 16
    assert all(10 <= token < 512 for prompt in found for token in prompt)
    assert Prompts(512, 0)(64, 1) == [found[0]]


class Server:
    """Answers at once, and notes what it is asked."""

    def __init__(self, alone: Any = None) -> None:
        """Requests with the policy ``alone`` are answered one after the other."""
        self.alone = alone
        self.asked: list[tuple[tuple[int, ...], int, tuple[Any, ...]]] = []
        self.flushes = 0

    def empty_cache(self) -> None:
        self.flushes += 1

    def cache_tokens(self) -> int:
        return 1024

    def ask(self, prompts: list[list[int]], tokens: int, policies: list[Any], interval: int = 1) -> list[Stream]:
        self.asked.append((tuple(prompts[0]), tokens, tuple(policies)))
        apart = 10.0 if policies[0] is not None and policies[0] == self.alone else 0.0
        return [
            Stream(0.0, [(1.0 + apart * index + 0.01 * token, token) for token in range(1, tokens + 1)], 0, {})
            for index in range(len(prompts))
        ]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_cell_is_asked_densely_then_with_each_policy(fresh: bool) -> None:
    sparse = parse_contestant("tactic")
    plan = Plan("tiny", [Cell(64, 2), Cell(32, 1)], [sparse], 16, 1, fresh, seed=0)
    server: Any = Server()
    failures: list[str] = []
    found = list(measure(server, "winnow", plan, shape_named("tiny"), failures))
    assert [(each.cell, each.contestant.name) for each in found] == [
        (Cell(64, 2), "dense"),
        (Cell(64, 2), "tactic"),
        (Cell(32, 1), "dense"),
        (Cell(32, 1), "tactic"),
    ]
    dense, tactic = server.asked[-4:-2]
    assert dense[2] == (None, None)
    assert tactic[2] == (sparse.policy, sparse.policy)
    assert (dense[0] == tactic[0]) == (not fresh)
    assert server.flushes == (4 if fresh else 2)
    assert len(list(measure(server, "fa3", plan, shape_named("tiny"), failures))) == 2
    assert failures == []


def test_the_share_that_is_attended_to_is_searched_for() -> None:
    class Attending(Server):
        def ask(self, prompts: list[list[int]], tokens: int, policies: list[Any], interval: int = 1) -> list[Stream]:
            return [
                replace(stream, decode={"attended_ratio": 0.5 * policy["decode"].get("p", 0.9) ** 2} if policy else {})
                for stream, policy in zip(super().ask(prompts, tokens, policies, interval), policies, strict=True)
            ]

    [contestant] = with_attending([parse_contestant("lowbit_top_p")], ["lowbit_top_p=0.06"])
    plan = Plan("tiny", [Cell(64, 2)], [contestant], 16, 1, False, seed=0)
    server: Any = Attending()
    _, found = measure(server, "winnow", plan, shape_named("tiny"), [])
    assert found.timing.attended_ratio == pytest.approx(0.06, rel=0.02)
    assert found.contestant.policy == {
        "decode": {"policy": "lowbit_top_p", "p": pytest.approx((0.06 / 0.5) ** 0.5, rel=0.02)}
    }
    # What is asked to find it lies in the radix cache, and is one prompt.
    dense = next(prompt for prompt, tokens, _ in server.asked if tokens == 16)
    last_try, _ = server.asked[-2:]
    assert (last_try[0], len(last_try[2])) == (dense, 1)
    silent: Any = Server()
    with pytest.raises(RuntimeError, match="does not say"):
        list(measure(silent, "winnow", plan, shape_named("tiny"), []))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("quest=0.1", "quest has no p"),
        ("tactic=0.1", "must be one of quest, lowbit_top_p"),
        ("lowbit_top_p=6", "between 0 and 1; it is 6"),
        ("lowbit_top_p=x", "between 0 and 1; it is x"),
        ("lowbit_top_p", "must be NAME=VALUE"),
    ],
)
def test_what_is_no_share_to_attend_to_is_refused(asked: str, message: str) -> None:
    contestants = [parse_contestant("quest"), parse_contestant("lowbit_top_p")]
    with pytest.raises(typer.BadParameter, match=message):
        with_attending(contestants, [asked])


def test_a_batch_that_did_not_decode_together_is_told_and_the_others_go_on() -> None:
    plan = Plan("tiny", [Cell(64, 2)], [parse_contestant("tactic"), parse_contestant("quest")], 16, 1, False, seed=0)
    server: Any = Server(alone=parse_contestant("tactic").policy)
    failures: list[str] = []
    found = list(measure(server, "winnow", plan, shape_named("tiny"), failures))
    assert [each.contestant.name for each in found] == ["dense", "quest"]
    [failure] = failures
    assert failure.startswith("winnow, 64 × 2, tactic: all requests decoded together for 0 arrivals only")


def test_servers_have_room_for_the_longest_request() -> None:
    plan = Plan("tiny", [Cell(64, 2), Cell(32, 4)], [], 16, 1, fresh=False, seed=0)
    arguments = arguments_of(plan, "winnow", ["fa3", "winnow"])
    assert arguments[arguments.index("--context-length") + 1] == "96"
    assert arguments[arguments.index("--max-running-requests") + 1] == "6"
    assert arguments[arguments.index("--cuda-graph-max-bs") + 1] == "4"


def test_fresh_prompts_are_asked_several_times_over() -> None:
    plan = Plan("tiny", [Cell(64, 1)], [parse_contestant("tactic")], 16, 1, True, seed=0, repeats=3)
    server: Any = Server()
    found = list(measure(server, "winnow", plan, shape_named("tiny"), []))
    assert [each.timing.batches for each in found] == [3, 3]
    asked = [prompt for prompt, tokens, _ in server.asked if tokens == 16]
    assert (len(asked), len(set(asked)), server.flushes) == (6, 6, 6)
    assert {each.cache_tokens for each in found} == {1024}


def test_repeats_end_with_their_time() -> None:
    plan = Plan("tiny", [Cell(64, 1)], [], 16, 1, True, seed=0, repeats=3, repeat_seconds=0)
    server: Any = Server()
    [found] = measure(server, "fa3", plan, shape_named("tiny"), [])
    assert found.timing.batches == 1


def test_long_contexts_may_be_left_to_policies() -> None:
    policy = parse_contestant("tactic")
    plan = Plan("tiny", [Cell(32, 1), Cell(64, 1)], [policy], 16, 1, True, seed=0, winnow_dense_up_to=32)
    server: Any = Server()
    found = list(measure(server, "winnow", plan, shape_named("tiny"), []))
    assert [(each.cell.context, each.contestant.name) for each in found] == [
        (32, "dense"),
        (32, "tactic"),
        (64, "tactic"),
    ]
    # Other backends are what policies are compared with.
    assert len(list(measure(server, "fa3", plan, shape_named("tiny"), []))) == 2


def test_what_acts_in_prefill_is_warmed_up_over_several_chunks() -> None:
    prefill = Contestant("quoka prefill", {"prefill": {"policy": "quoka"}})
    plan = Plan("tiny", [Cell(9000, 2)], [prefill, parse_contestant("tactic")], 16, 1, True, seed=0, chunk=1024)
    server: Any = Server()
    list(measure(server, "winnow", plan, shape_named("tiny"), []))
    warm_ups = [(len(prompt), len(policies)) for prompt, tokens, policies in server.asked if tokens == 8]
    assert warm_ups == [(3072, 1), (2048, 2), (3072, 1), (2048, 2), (2048, 1), (2048, 2)]


def test_the_median_of_several_batches() -> None:
    batches = [timing(0.01 * number, ttft=1.0 * number, steps=number, kv_read_ratio=0.1) for number in (1, 2, 4)]
    found = median_timing(batches)
    assert (found.ttft, found.tpot, found.steps, found.batches) == (2.0, 0.02, 7, 3)
    assert found.ttft_spread == pytest.approx((3.0 - 1.5) / 2.0)
    assert found.kv_read_ratio == pytest.approx(0.1)
    assert found.attended_ratio is None
    assert median_timing(batches[:1]) is batches[0]
    with pytest.raises(ValueError, match="at least"):
        median_timing([])


def test_attention_that_does_nothing_takes_the_place_of_the_first_dense_backend() -> None:
    plan = Plan("tiny", [Cell(64, 2)], [], 16, 1, fresh=False, seed=0)
    arguments = arguments_of(plan, "noop", ["winnow", "noop", "fa3", "flashinfer"])
    assert arguments[arguments.index("--attention-backend") + 1] == "fa3"
    assert arguments == arguments_of(plan, "fa3", ["winnow", "noop", "fa3", "flashinfer"])
    chunk = arguments.index("--chunked-prefill-size")
    assert arguments[chunk : chunk + 2] == ["--chunked-prefill-size", "8192"]
    with pytest.raises(typer.BadParameter, match="noop needs a backend"):
        arguments_of(plan, "noop", ["noop", "winnow"])
    environment = environment_of("noop", {"WINNOW_POLICIES": ""})
    assert environment["SGLANG_PLUGINS"].split(",") == ["winnow_cpu", NOOP_ATTENTION.name]
    assert str(NOOP_ATTENTION.folder) in environment["PYTHONPATH"]
    assert environment_of("winnow", {"WINNOW_POLICIES": ""}) == {"WINNOW_POLICIES": ""}
    assert NOOP_ATTENTION.name not in environment_of("fa3", {})["SGLANG_PLUGINS"]


def test_a_gain_is_told_as_a_part_of_its_bound() -> None:
    bound = Measured("noop", Cell(32768, 8), Contestant("no-op", None), 128, timing(0.002, ttft=0.25), 300_000, None)
    found = [measured("fa3", 0.010), measured("winnow", 0.009), bound, measured("winnow", 0.004, "delta", ttft=0.4)]
    rows = rows_of(found, MODEL)
    [noop] = [row for row in rows if row.policy == "no-op" and row.parameters["figure"] == "ttft"]
    # The bound is beside dense attention, and never dense itself.
    assert (noop.dense, noop.speedup) == (1000, 4)
    assert "part_of_bound" not in noop.parameters
    [delta] = [row for row in rows if row.policy == "delta" and row.parameters["figure"] == "ttft"]
    assert (delta.dense, delta.speedup) == pytest.approx((1000, 2.5))
    assert noop.speedup is not None
    assert delta.speedup is not None
    assert delta.parameters["part_of_bound"] == pytest.approx(delta.speedup / noop.speedup)
    [throughput] = [row for row in rows if row.policy == "delta" and row.parameters["figure"] == "throughput"]
    assert throughput.parameters["part_of_bound"] == pytest.approx(1)
    # A step without attention reads the weights alone.
    [tpot] = [row for row in rows if row.policy == "no-op" and row.parameters["figure"] == "tpot"]
    assert tpot.parameters["kv_read_ratio"] == 0
    assert tpot.floor_ratio == pytest.approx(5 * read_share(shape_named(MODEL), Cell(32768, 8), 128, 0.0))
    assert table(rows).row_count == len(rows)


def test_memory_beyond_dense() -> None:
    found = [
        measured("fa3", 0.010, peak_memory_bytes=90 * 2**30),
        measured("flashinfer", 0.020, ttft=2.0, peak_memory_bytes=10 * 2**30),
        measured("winnow", 0.004, "delta", peak_memory_bytes=92 * 2**30),
    ]
    [row] = [row for row in rows_of(found, MODEL) if row.policy == "delta" and row.parameters["figure"] == "ttft"]
    assert row.parameters["memory_beyond_dense_bytes"] == 2 * 2**30
    assert row.parameters["cache_bytes"] == 300_000 * 32 * 2 * 8 * 128 * 2
    # A larger cache is not the policy's doing.
    smaller = Measured(**vars(found[0]) | {"cache_tokens": 200_000})
    [row] = [
        row
        for row in rows_of([smaller, found[2]], MODEL)
        if row.policy == "delta" and row.parameters["figure"] == "ttft"
    ]
    assert row.parameters["memory_beyond_dense_bytes"] == 2 * 2**30 - 100_000 * 32 * 2 * 8 * 128 * 2
    [row] = [row for row in rows_of([measured("fa3", 0.01), found[2]], MODEL) if row.policy == "delta"][:1]
    assert "memory_beyond_dense_bytes" not in row.parameters


def test_rows_are_beside_the_fastest_dense_backend() -> None:
    found = [
        measured("fa3", 0.010),
        measured("flashinfer", 0.012, throughput=1000.0),
        measured("winnow", 0.004, "delta", kv_read_ratio=0.1, cached_tokens=8 * 32752),
    ]
    rows = rows_of(found, MODEL)
    assert [row.parameters["figure"] for row in rows if row.policy == "delta"] == [
        "tpot",
        "mean tpot",
        "p99 between tokens",
    ]
    [delta] = [row for row in rows if row.policy == "delta" and row.parameters["figure"] == "tpot"]
    assert (delta.dense, delta.measured) == pytest.approx((10, 4))
    assert delta.unit == "ms"
    assert delta.speedup == pytest.approx(2.5)
    share = read_share(shape_named(MODEL), Cell(32768, 8), 128, 0.1)
    assert delta.floor_ratio == pytest.approx(share * 2.5)
    throughput = [row for row in rows if row.parameters["figure"] == "throughput"]
    assert [row.speedup for row in throughput] == [pytest.approx(0.8), pytest.approx(1)]
    assert [row.floor_ratio for row in throughput] == [None, None]
    assert table(rows).row_count == len(rows)


def test_a_step_must_read_the_weights_and_its_share_of_the_cache() -> None:
    shape = shape_named(MODEL)
    # Seven billion weights in the layers, half a billion for the output.
    assert shape.weight_bytes == pytest.approx(2 * 7.5e9, rel=0.01)
    cell = Cell(32768, 8)
    assert read_share(shape, cell, 128, None) == 1
    assert read_share(shape, cell, 128, 0.0) == pytest.approx(15.0 / (15.0 + 34.4), rel=0.01)


def test_merged_runs_borrow_what_they_lack(tmp_path: Path) -> None:
    records = []
    for number, (device, found) in enumerate(
        [
            ("H200", [measured("fa3", 0.010)]),
            ("H100", [measured("fa3", 0.020)]),
            ("H200", [measured("winnow", 0.005, "delta")]),
        ]
    ):
        path = tmp_path / f"{number}.json"
        Record({"device": device, "number": number}, rows_of(found, MODEL)).write(path)
        records.append(Record.read(path))
    # Merging what was merged changes nothing.
    whole = with_borrowed_baselines(merged([merged(records[:2]), records[2]]))
    assert [header["number"] for header in whole.header["runs"]] == [0, 1, 2]
    [tpot] = [row for row in whole.rows if row.policy == "delta" and row.parameters["figure"] == "tpot"]
    assert tpot.parameters["run"] == 2
    assert tpot.parameters["dense_of_another_run"] is True
    assert (tpot.dense, tpot.speedup) == pytest.approx((10, 2))
    own = [row for row in whole.rows if row.policy == "dense"]
    assert all("dense_of_another_run" not in row.parameters for row in own)


def test_records_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"results": []}')
    with pytest.raises(ValueError, match=r"other\.json is no record"):
        Record.read(path)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_served_from_folders(name: str, tmp_path: Path) -> None:
    shape = shape_named(name)
    folder = write_model(tmp_path, name, 200_000, shape.delta_layers)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 200_000
    assert config["hidden_size"] % config["num_attention_heads"] == 0
    assert delta_profile(folder) == (shape.delta_layers or None)
    with pytest.raises(ValueError, match=r"Llama-3\.1-8B"):
        shape_named("Llama-9")
