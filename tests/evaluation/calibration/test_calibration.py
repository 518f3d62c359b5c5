"""A calibration from its options to profile and report, on a small random model; cut off, and gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_winnow.profile_parts import StoppedPoint, StoppedPolicy, kept_thresholds
from sglang_winnow.quality_profile import ModelIdentity, Profile
from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.calibration.__main__ import _powers_of_two, app
from winnow_evaluation.calibration.candidates import candidates, fits
from winnow_evaluation.calibration.drafts import rounds
from winnow_evaluation.calibration.early_termination import THRESHOLDS, StoppingPart, relative_distance
from winnow_evaluation.calibration.fronts import pareto_front
from winnow_evaluation.calibration.parts import Subject
from winnow_evaluation.calibration.quality import QualityPart, uncertainty
from winnow_evaluation.calibration.speed import SpeedPart
from winnow_evaluation.calibration.unfinished import Unfinished, Unit
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

QUEST = '{"decode": {"policy": "quest", "budget": 64, "full_layers": 0}}'
LOWBIT = '{"decode": {"policy": "lowbit_top_k", "budget": 208}}'
PREFILL = '{"policy": "quoka", "budget": 64, "block": 64}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), ModelShape(kv_heads=2))
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [" ".join(f"{letter}{number}" for number in range(400)) for letter in "abcd"]
    lines: list[Any] = [texts[0], {"text": texts[1], "user": 3}, {"prompt": texts[2]}, texts[3]]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def invoke(folder: Path, prompts: Path, output: Path, *more: str) -> Any:
    options = ["--lengths", "192,320", "--count", "2", "--tokens", "4", "--scored", "32", "--device", "cpu"]
    options += ["--policy", QUEST, "--policy", LOWBIT, "--prefill", PREFILL]
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--output", str(output), *options, *more]
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def profile(folder: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("profile") / "profile.json"
    result = invoke(folder, prompts, output)
    assert result.exit_code == 0, result.output
    assert f"WINNOW_PROFILE={output}" in result.output
    assert {path.name for path in output.parent.iterdir()} == {"profile.json", "profile.html"}
    return output


def test_a_profile_has_the_curves_of_every_policy_after_each_prefill(profile: Path, folder: Path) -> None:
    read = Profile.read(profile)
    read.check_model(folder, read.key_bits)
    assert (read.lengths, read.data.prompts, read.data.source) == ((192, 320), 2, "prompts.jsonl")
    quest, lowbit, prefill = json.loads(QUEST), json.loads(LOWBIT), {"prefill": json.loads(PREFILL)}
    asked = [quest, lowbit, prefill, quest | prefill, lowbit | prefill]
    assert [curve.attention for curve in read.curves] == [parse_policy(each) for each in asked]
    # 208 tokens hold a prompt of 192.
    lengths = [[point.length for point in curve.points] for curve in read.curves]
    assert lengths == [[192, 320], [320], [192, 320], [192, 320], [320]]
    for curve in read.curves:
        for point in curve.points:
            assert 0 < point.kl <= point.kl_high
            assert point.top1_low <= point.top1
            assert (point.true_share is None) == (curve.attention.decode.policy == "dense")
    assert [point.kl for point in read.floor] == pytest.approx([0, 0], abs=1e-6)
    assert [point.kv_read_ratio for point in read.floor] == [1, 1]


def test_uncertainty_covers_the_mean_of_few_values_as_often_as_it_says() -> None:
    assert uncertainty([0.5]) == 0
    # Quantile 3.182 of three degrees of freedom, standard deviation 1.291, of four values.
    assert uncertainty([1, 2, 3, 4]) == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    samples = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0)).tolist()
    covered = sum(abs(fmean(sample)) <= uncertainty(sample) for sample in samples)
    assert covered / len(samples) == pytest.approx(0.95, abs=0.015)


def test_speed_is_that_of_each_way_to_decode_beside_dense_attention(profile: Path) -> None:
    speed = Profile.read(profile).speed
    assert speed is not None
    assert speed.threads == torch.get_num_threads()
    assert [time.length for time in speed.dense] == [192, 320]
    assert [timed.attention for timed in speed.policies] == [parse_policy(json.loads(each)) for each in (QUEST, LOWBIT)]
    assert [[point.length for point in timed.points] for timed in speed.policies] == [[192, 320], [320]]
    # After another prefill it decodes alike.
    assert speed.of(parse_policy(json.loads(QUEST) | {"prefill": json.loads(PREFILL)})) == speed.policies[0]
    assert speed.of(parse_policy({"decode": {"policy": "quest", "budget": 128}})) is None


def test_times_are_medians_over_steps_and_ratios_those_of_each_step() -> None:
    quest, lowbit = (parse_policy(json.loads(each)) for each in (QUEST, LOWBIT))
    subject: Any = SimpleNamespace(
        lengths=[192, 320], decodes=lambda _: [quest, lowbit], model=SimpleNamespace(device=torch.device("cuda"))
    )
    dense = AttentionPolicy().canonical()
    found = {
        (192, 0): {dense: [1.0, 8.0, 2.0], quest.canonical(): [2.0, 4.0, 4.0]},
        (320, 0): {dense: [4.0, 2.0, 8.0], quest.canonical(): [1.0, 1.0, 1.0], lowbit.canonical(): [4.0, 4.0, 4.0]},
    }
    speed = SpeedPart(subject).result(found)
    assert speed.threads is None
    assert [(time.length, time.seconds) for time in speed.dense] == [(192, 2.0), (320, 4.0)]
    points = [[(point.length, point.seconds, point.ratio) for point in timed.points] for timed in speed.policies]
    assert points == [[(192, 4.0, 2.0), (320, 1.0, 0.25)], [(320, 4.0, 1.0)]]
    assert [timed.faster_from for timed in speed.policies] == [320, None]


def test_drafts_stand_as_often_as_they_are_dense_attentions_next_tokens(profile: Path) -> None:
    drafts = Profile.read(profile).drafts
    assert drafts is not None
    assert (drafts.prompts, drafts.tokens) == (2, 4)
    for policy in drafts.policies:
        for point in policy.points:
            assert 1 <= point.tokens_per_check <= point.draft_tokens + 1
        # Of 4 tokens nobody drafts 8.
        assert {point.draft_tokens for point in policy.points} == {1, 2, 4}


@pytest.mark.parametrize(
    ("stand", "draft_tokens", "tokens", "checks"),
    [
        ([1, 1, 1, 1, 1, 1], 2, 6, 2),
        ([0, 0, 0, 0], 3, 2, 2),
        # Two stand and the check says a third; then none stands; then one that is followed by another, cut off.
        ([1, 1, 0, 0, 1, 0, 1], 2, 6, 3),
        ([1, 1], 4, 0, 0),
    ],
)
def test_rounds_of_drafts(stand: list[int], draft_tokens: int, tokens: int, checks: int) -> None:
    assert rounds(stand, draft_tokens) == (tokens, checks)


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 16))
def test_a_check_comes_to_one_token_at_least_and_all_drafts_and_one_at_most(stand: list[bool], drafted: int) -> None:
    tokens, checks = rounds(stand, drafted)
    assert checks <= tokens <= (drafted + 1) * checks
    # No longer round fits.
    assert tokens <= len(stand) + 1
    assert tokens + drafted > len(stand)


def test_the_thresholds_that_keep_the_error_and_read_least_are_kept() -> None:
    policy, other = (parse_policy(json.loads(each)) for each in (LOWBIT, QUEST))

    def stopped(attention: AttentionPolicy, scale: float, *points: tuple[float, float]) -> StoppedPolicy:
        made = (
            StoppedPoint(length=length, error=worst / 2, worst=worst, kv_read_ratio=read, kv_read_ratio_to_the_end=0.5)
            for length, (worst, read) in zip((192, 320), points, strict=True)
        )
        return StoppedPolicy(attention=attention, early_termination=EarlyTermination(scale=scale), points=tuple(made))

    found = [
        stopped(policy, 0.01, (0.001, 0.49), (0.002, 0.48)),
        stopped(policy, 0.03, (0.01, 0.45), (0.019, 0.4)),
        # At one length it loses too much.
        stopped(policy, 0.1, (0.01, 0.4), (0.021, 0.3)),
        # It reads no less.
        stopped(other, 0.01, (0.0, 0.5), (0.0, 0.5)),
    ]
    kept = kept_thresholds(found, 0.02)
    assert [(each.attention, each.early_termination) for each in kept] == [
        (policy, EarlyTermination(scale=0.03)),
        (other, None),
    ]


def test_early_termination_reads_less_and_loses_more_the_looser_its_thresholds(folder: Path) -> None:
    model = OfflineModel(folder, torch.device("cpu"))
    tokens = torch.randint(2, 512, (2, 1305), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = {1300: [Continued(own[:1300], own[1300:]) for own in tokens]}
    decodes = [{"policy": "lowbit_top_k", "budget": budget} for budget in (256, 768)]
    policies = [Measured(parse_policy({"decode": decode})) for decode in decodes]
    part = StoppingPart(Subject(model, prompts, 4, policies), max_error=0.02)
    found = part.measure(1300, 0, lambda _: None)
    # 256 tokens are four tiles: reading never stops before their end.
    assert list(found) == [policies[1].policy.canonical()]
    result = part.result({(1300, 0): found})
    points = [each.points[0] for each in result.policies]
    assert [each.early_termination for each in result.policies] == list(THRESHOLDS)
    reads, errors = ([getattr(point, name) for point in points] for name in ("kv_read_ratio", "error"))
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] < points[0].kv_read_ratio_to_the_end
    assert errors == sorted(errors)
    assert 0 < errors[-1] < 1
    [kept] = result.kept
    assert kept.attention == policies[1].policy


def test_a_distance_is_relative_to_what_should_be() -> None:
    exact = torch.tensor([[[[3.0, 4.0], [0.0, 2.0]]]])
    found = exact + torch.tensor([[[[0.0, 0.5], [1.0, 0.0]]]])
    assert relative_distance([found, exact], [exact, exact]) == pytest.approx((0.1 + 0.5) / 4)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1))))
def test_what_is_on_the_front_is_beaten_by_nothing(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    for cost, loss in points:
        beaten = any(
            own <= cost and other <= loss and (own, other) != (cost, loss) for own, other in [*points, (1.0, 0.0)]
        )
        assert ((cost, loss) in front) == (cost < 1 and not beaten)


def test_the_report_needs_nothing_beside_it(profile: Path) -> None:
    page = profile.with_suffix(".html").read_text()
    # Of each length one by KV read and one by time.
    assert page.count("<svg") == 4
    for heading in ("Speed", "Early termination", "Drafts for verify"):
        assert f"<h2>{heading}</h2>" in page
    assert "quest budget 64, quoka prefill 64" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)


def test_a_run_that_was_killed_goes_on_where_it_was(
    profile: Path, folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = QualityPart.measure
    measured: list[tuple[int, int]] = []

    def killed(self: QualityPart, length: int, number: int, *others: Any) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((length, number))
        return measure(self, length, number, *others)

    output = tmp_path / "profile.json"
    monkeypatch.setattr(QualityPart, "measure", killed)
    quick = ("--parts", "quality")
    assert invoke(folder, prompts, output, *quick).exit_code != 0
    assert measured == [(192, 0), (192, 1), (320, 0)]
    [unfinished] = tmp_path.iterdir()
    # It was killed while it wrote.
    unfinished.write_text(unfinished.read_text()[:-20])
    measured.clear()
    assert invoke(folder, prompts, output, *quick, "--tokens", "5").exit_code == 1
    assert measured == []
    assert invoke(folder, prompts, output, *quick).exit_code == 0
    assert measured == [(320, 0), (320, 1)]
    once, twice = Profile.read(profile), Profile.read(output)
    assert (once.curves, once.floor, once.data) == (twice.curves, twice.floor, twice.data)
    assert (twice.speed, twice.early_termination, twice.drafts) == (None, None, None)
    assert once.seconds.keys() == {"quality", "speed", "drafts", "early-termination"}
    assert twice.seconds.keys() == {"quality"}


def test_what_is_unfinished_belongs_to_one_calibration(tmp_path: Path) -> None:
    unit = Unit("quality", 128, 0)
    Unfinished.begin(tmp_path / "kept", "one").add(unit, {"dense": {"kl": 0.5}}, 2.0)
    again = Unfinished.begin(tmp_path / "kept", "one")
    assert (again.measured, again.seconds) == ({unit: {"dense": {"kl": 0.5}}}, {"quality": 2.0})
    assert again.of("quality") == {(128, 0): {"dense": {"kl": 0.5}}}
    assert again.of("speed") == {}
    with pytest.raises(ValueError, match="another model, other prompts or other options"):
        Unfinished.begin(tmp_path / "kept", "two")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("3", "line 2: must be a text, or an object with text, prompt or messages"),
        ('{"prompts": "a"}', "line 2: must be a text, or an object with text, prompt or messages"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(folder: Path, tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"text"\n{line}\n')
    result = invoke(folder, path, tmp_path / "profile.json")
    assert result.exit_code == 1
    assert problem in result.output


@pytest.mark.parametrize(
    ("parts", "problem"),
    [("speed", "quality must be among them"), ("quality,spee", "'spee' is none of quality, speed")],
)
def test_a_part_that_is_none_is_named(folder: Path, prompts: Path, tmp_path: Path, parts: str, problem: str) -> None:
    result = invoke(folder, prompts, tmp_path / "profile.json", "--parts", parts)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--policy", '{"prefill": {"policy": "quoka"}}'], "attention.prefill: must be absent"),
        (["--policy", '{"decode": {"policy": "quest"}, "keep": true}'], "must be without verify, keep, audit"),
        (["--prefill", '{"policy": "quest"}'], "attention.prefill.policy: must be one of dense, quoka"),
        (["--lengths", "100k"], "more than the model's context"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    folder: Path, prompts: Path, tmp_path: Path, options: list[str], problem: str
) -> None:
    result = invoke(folder, prompts, tmp_path / "profile.json", *options)
    assert result.exit_code == 1
    assert problem in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_is_measured_by_default() -> None:
    found = candidates([], {"policy": "quoka", "budget_ratio": 0.25})
    dense = [policy for policy in found if policy.has_dense_prefill]
    assert {policy.decode.policy for policy in dense} == {"lowbit_top_p", "lowbit_top_k"}
    assert len(found) == 2 * len(dense) + 1
    assert candidates([], None) == dense
    with pytest.raises(PolicyError):
        candidates([{"decode": {"policy": "snapkv", "release": True}}], None)
    assert not fits(parse_policy({"decode": {"policy": "streaming_llm", "window": 256}}), 256)
    assert fits(parse_policy({"decode": {"policy": "streaming_llm", "window": 255}}), 256)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(700, [700]), (1024, [1024]), (8127, [1024, 2048, 4096, 8100]), (5000, [1024, 2048, 4096])],
)
def test_lengths_reach_to_the_models_context(longest: int, lengths: list[int]) -> None:
    assert _powers_of_two(longest) == lengths


def test_another_model_is_told_from_the_measured_one(profile: Path, folder: Path, tmp_path: Path) -> None:
    read = Profile.read(profile)
    other = write_model(tmp_path / "other", ModelShape(kv_heads=1))
    write_weights(other)
    with pytest.raises(ValueError, match="of another configuration"):
        read.check_model(other, read.key_bits)
    [weights] = folder.glob("*.safetensors")
    (tmp_path / "same").mkdir()
    for path in folder.iterdir():
        (tmp_path / "same" / path.name).write_bytes(path.read_bytes())
    assert ModelIdentity.of(tmp_path / "same").model_copy(update={"name": read.model.name}) == read.model
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "same" / weights.name).write_bytes(changed)
    with pytest.raises(ValueError, match="of other weights"):
        read.check_model(tmp_path / "same", read.key_bits)
    with pytest.raises(ValueError, match="low-bit keys of 2 bits"):
        read.check_model(folder, 4)
    (tmp_path / "older").write_text(profile.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ValueError, match="no profile of version 2: version"):
        Profile.read(tmp_path / "older")
