"""Teacher forcing on a small random model, beside transformers' own attention with masks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.forced_decoding import DENSE, Forcing, PrefilledBatch, greedy_answers, recall
from benchmarks.offline_model import OfflineModel, make_prompts
from benchmarks.teacher_forced import Interval, main, termination_grid
from sglang_winnow.policy import AttentionPolicy, parse_policy
from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.models import ModelShape, write_model, write_weights
from winnow_kernels.early_termination import EarlyTermination, Termination
from winnow_kernels.gather import Meter
from winnow_kernels.streaming_llm import StreamingLLMParameters, StreamingLLMStep

# No multiples of the page, and answers that fill the page which the prompt has begun.
PROMPTS, ANSWERS = (203, 150), (16, 12)
SPAN = 64
SINKS, WINDOW = 2, 48

SPARSE: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": SINKS, "window": WINDOW},
    "quest": {"budget": 32, "full_layers": 0},
    "snapkv": {"budget": 48, "observation_window": 16},
    "pyramidkv": {"budget": 48, "observation_window": 16},
    "delta": {"budget": 32, "recency": 16, "full_layers": 0, "delta_layers": [0]},
    "tactic": {"p": 0.5, "full_layers": 0},
    "quoka": {"budget": 32},
}
COVERING: dict[str, dict[str, Any]] = {
    "streaming_llm": {"window": 4096},
    "quest": {"budget": 4096},
    "snapkv": {"budget": 4096, "observation_window": 16},
    "pyramidkv": {"budget": 4096, "observation_window": 16},
    "delta": {"budget": 4096, "full_layers": 0, "delta_layers": [0]},
    "tactic": {"p": 1.0, "full_layers": 0},
    "quoka": {"budget": 4096},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), ModelShape(kv_heads=2))
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> OfflineModel:
    return OfflineModel(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return _random_tokens(PROMPTS, seed=0)


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    return _random_tokens(ANSWERS, seed=1)


@pytest.fixture
def forcing(model: OfflineModel, prompts: list[list[int]], answers: list[list[int]]) -> Forcing:
    return _forcing(model, prompts, answers)


def _random_tokens(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 512, (length,), generator=generator).tolist() for length in lengths]


def _forcing(model: OfflineModel, prompts: list[list[int]], answers: list[list[int]]) -> Forcing:
    with torch.inference_mode():
        return Forcing(PrefilledBatch(model, prompts, room=max(ANSWERS), window=16, span=SPAN), answers)


def _policy(name: str, parameters: dict[str, Any], **rest: Any) -> AttentionPolicy:
    return parse_policy({"decode": {"policy": name, **parameters}, **rest})


@torch.inference_mode()
def _expected(folder: Path, prompt: list[int], answer: list[int], visible: Tensor) -> Tensor:
    """Log-probabilities of the tokens after each of the answer's but the last, by transformers under a mask."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    tokens = torch.tensor([prompt + answer[:-1]])
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    logits: Tensor = network(tokens, attention_mask=mask[None, None]).logits[0]
    return logits.log_softmax(-1)[len(prompt) :]


def _scores(dense: Tensor, sparse: Tensor, answer: list[int]) -> tuple[float, float, float]:
    kl = torch.nn.functional.kl_div(sparse, dense, log_target=True, reduction="none").sum(-1).mean()
    agreement = (dense.argmax(-1) == sparse.argmax(-1)).float().mean()
    first = (sparse.argmax(-1) == torch.tensor(answer[1:])).float().mean()
    return float(kl), float(agreement), float(first)


def test_scores_are_those_of_transformers_with_masks(
    folder: Path, forcing: Forcing, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    with torch.inference_mode():
        forced = forcing.run(_policy("streaming_llm", SPARSE["streaming_llm"]))
    for prompt, answer, score in zip(prompts, answers, forced.scores, strict=True):
        places = torch.arange(len(prompt) + len(answer) - 1)
        causal = places <= places[:, None]
        window = causal & ((places < SINKS) | (places > places[:, None] - WINDOW))
        in_answer = (places >= len(prompt))[:, None]
        dense = _expected(folder, prompt, answer, causal)
        sparse = _expected(folder, prompt, answer, torch.where(in_answer, window, causal))
        assert score.tokens == len(answer) - 1
        assert (score.kl, score.agreement, score.forced_first) == pytest.approx(
            _scores(dense, sparse, answer), abs=1e-4
        )
        assert score.kl > 0.01


def test_what_was_read_is_counted_layer_by_layer(forcing: Forcing) -> None:
    with torch.inference_mode():
        forced = forcing.run(_policy("streaming_llm", SPARSE["streaming_llm"]))
    for meter in forced.meters:
        steps = [answer - 1 for answer in ANSWERS]
        context = [
            2 * sum(prompt + 1 + step for step in range(count)) for prompt, count in zip(PROMPTS, steps, strict=True)
        ]
        assert meter.context.tolist() == context
        assert meter.attended.tolist() == [2 * count * (SINKS + WINDOW) for count in steps]


@pytest.mark.parametrize("name", COVERING)
def test_a_policy_that_reads_everything_is_dense(name: str, forcing: Forcing) -> None:
    with torch.inference_mode():
        forced = forcing.run(_policy(name, COVERING[name]), measure_recall=True)
    for score in forced.scores:
        assert score.kl == pytest.approx(0, abs=1e-5)
        assert score.agreement == 1
    assert forced.recall == pytest.approx([sum(ANSWERS) - len(ANSWERS)] * len(forced.meters), rel=1e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_nothing_leaks_from_one_policy_to_the_next(
    name: str, model: OfflineModel, prompts: list[list[int]], answers: list[list[int]], forcing: Forcing
) -> None:
    policy = _policy(name, SPARSE[name])
    with torch.inference_mode():
        alone = _forcing(model, prompts, answers).run(policy)
        forcing.run(policy)
        forcing.run(_policy("streaming_llm", {"sinks": 0, "window": 16}))
        after = forcing.run(policy)
    assert after.scores == alone.scores
    assert all(score.kl > 0 for score in alone.scores)
    for meter, other in zip(after.meters, alone.meters, strict=True):
        assert meter.attended.tolist() == other.attended.tolist()
    # The first layer is DELTA's Δ-layer, in which it attends to everything.
    assert (after.meters[-1].attended < after.meters[-1].context).all()


def test_indexes_are_of_the_answer_that_is_being_decoded(
    model: OfflineModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    page = slice(PROMPTS[0] // 16 * 16, PROMPTS[0] // 16 * 16 + 16)
    with torch.inference_mode():
        batch = PrefilledBatch(model, prompts, room=max(ANSWERS))
        forcing = Forcing(batch, answers)
        built = []
        for budget in (32, 128):
            forcing.run(_policy("quest", {"budget": budget, "full_layers": 0}))
            bounds = batch.indexes.page_bounds.bounds[1][page.start // 16].clone()
            keys = batch.caches[1].keys[page]
            assert torch.equal(bounds, torch.cat((keys.amax(0), keys.amin(0)), dim=-1))
            built.append(bounds)
    assert not torch.equal(*built)


@pytest.mark.parametrize("name", SPARSE)
def test_prompts_of_a_batch_are_as_alone(
    name: str, model: OfflineModel, prompts: list[list[int]], answers: list[list[int]], forcing: Forcing
) -> None:
    policy = _policy(name, SPARSE[name], early_termination={"scale": 0.5, "direction": 0.5, "patience": 1})
    with torch.inference_mode():
        together = forcing.run(policy)
        for row in range(len(prompts)):
            alone = _forcing(model, prompts[row : row + 1], answers[row : row + 1]).run(policy)
            assert together.scores[row].kl == pytest.approx(alone.scores[0].kl, rel=1e-3)
            for meter, own in zip(together.meters, alone.meters, strict=True):
                assert meter.attended[row] == own.attended[0]
                assert meter.skipped_tiles[row] == own.skipped_tiles[0]


def test_greedy_answers_are_ranked_first_by_dense_attention(model: OfflineModel, prompts: list[list[int]]) -> None:
    with torch.inference_mode():
        batch = PrefilledBatch(model, prompts, room=8)
        answers = greedy_answers(batch, most=8)
        forced = Forcing(batch, answers).run(DENSE)
    assert [answer[0] for answer in answers] == batch.first.argmax(-1).tolist()
    for answer, score in zip(answers, forced.scores, strict=True):
        assert len(answer) == 8 or answer[-1] in model.end_tokens
        assert score.forced_first == (1 if score.tokens else 0)
        assert score.kl == 0


@pytest.mark.parametrize("stops", [False, True])
def test_recall_is_the_mass_of_the_tokens_read(*, stops: bool) -> None:
    cache, lengths, scale = random_cache(1024, 2, 16), [300, 200], 0.25
    context = scattered_context(lengths, 1024)
    queries = random_queries(2, 4, 16)
    # One calm tile is enough, and every tile is calm: two of the three tiles of 64 are read.
    thresholds = Termination.of([EarlyTermination(1e6, 2.0, 1)] * 2, context.device) if stops else None
    step = StreamingLLMStep(context, scale, thresholds, [StreamingLLMParameters(0, 150)] * 2)
    meter = Meter(2, context.device)
    meter.count_context(context, cache)
    step.attend(0, queries, cache, meter)
    found = recall(step, 0, queries, cache, meter)
    read = 128 if stops else 150
    for request, length in enumerate(lengths):
        keys = cache.keys[context.slots[request, :length]].double()
        shares = []
        for head in range(4):
            weights = (keys[:, head // 2] @ queries[request, head].double() * scale).softmax(0)
            shares.append(float(weights[-read:].sum()))
        assert float(found[request]) == pytest.approx(math.fsum(shares) / 4, rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_an_interval_holds_its_mean(values: list[float]) -> None:
    interval = Interval.of(values)
    assert min(values) - 1e-9 <= interval.low <= interval.mean + 1e-9
    assert interval.mean - 1e-9 <= interval.high <= max(values) + 1e-9
    assert interval == Interval.of(values)


def test_the_grid_is_of_policies_that_differ() -> None:
    policies = {label: parse_policy(policy) for label, policy in termination_grid().items()}
    assert len({policy.fingerprint() for policy in policies.values()}) == len(policies)
    assert [label for label, policy in policies.items() if policy.early_termination is None] == [
        "tactic p=0.9",
        "snapkv 1024",
    ]


def test_prompts_fit_their_length_and_are_the_same_for_the_same_seed(model: OfflineModel) -> None:
    prompts = make_prompts(model, "niah_single_1", 2048, 2, seed=3)
    assert prompts == make_prompts(model, "niah_single_1", 2048, 2, seed=3)
    assert all(0.8 * 2048 < len(prompt.tokens) + len(prompt.answer) <= 2048 for prompt in prompts)
    with pytest.raises(ValueError, match="niah_single_1: needs at least"):
        make_prompts(model, "niah_single_1", 64, 1, seed=3)


def test_greedy_answers_that_end_at_once_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A random model ends no answer at once, unless every token does.
    monkeypatch.setattr(OfflineModel, "end_tokens", list(range(512)))
    arguments = ["--model", str(folder), "--tasks", "vt", "--lengths", "2k", "--samples", "1", "--answers", "greedy"]
    result = _invoke([*arguments, "--policy", '{"decode": {"policy": "snapkv"}}'])
    assert result.exit_code == 1
    assert "vt at 2048: every answer ends with its first token" in result.output


def _invoke(arguments: list[str]) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


def test_the_command_writes_every_policy_and_layer(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    stop = '{"decode": {"policy": "snapkv", "budget": 256}, "early_termination": {"scale": 1.0, "direction": 2.0}}'
    arguments = ["--model", str(folder), "--tasks", "niah_single_1,vt", "--lengths", "2k", "--samples", "2"]
    arguments += ["--policy", 'snap={"decode": {"policy": "snapkv", "budget": 256}}', "--policy", f"snap stop={stop}"]
    result = _invoke([*arguments, "--steps", "6", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "snap stop" in result.stdout
    document = json.loads(output.read_text())
    assert list(document["policies"]) == ["dense", "snap", "snap stop"]
    rows = {(row["task"], row["policy"]): row for row in document["rows"]}
    assert len(rows) == 9
    for row in rows.values():
        assert len(row["by_layer"]) == 2
        assert row["kl"]["low"] <= row["kl"]["mean"] <= row["kl"]["high"]
    assert rows["all", "dense"]["attended_ratio"] == 1
    assert rows["all", "dense"]["prompts"] == 4
    assert rows["all", "snap"]["attended_ratio"] < 0.2
    stopped, snap = rows["vt", "snap stop"], rows["vt", "snap"]
    assert stopped["kl_added_by_termination"]["mean"] == pytest.approx(stopped["kl"]["mean"] - snap["kl"]["mean"])
    assert stopped["skipped_ratio"] is not None
    assert snap["kl_added_by_termination"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", '{"prefill": {"policy": "quoka"}}'], "must be dense"),
        (["--policy", '{"decode": {"policy": "tactic", "p": 2}}'], "decode.p"),
        (["--policy", '{"decode": {"policy": "delta"}}'], "delta_layers"),
        (["--policy", 'dense={"decode": {"policy": "quest"}}'], "'dense' is the name of another policy"),
        (["--tasks", "nothing"], "nothing"),
        (["--lengths", "16k"], "more than the model's context of 8192"),
    ],
)
def test_what_cannot_be_compared_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    result = _invoke(["--model", str(folder), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
