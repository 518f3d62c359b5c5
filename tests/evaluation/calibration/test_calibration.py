"""A calibration from its options to profile and report, on a small random model; cut off, and gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_winnow.quality_profile import ModelIdentity, Profile
from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.calibration.__main__ import _powers_of_two, app
from winnow_evaluation.calibration.calibrating import Calibration
from winnow_evaluation.calibration.candidates import candidates, fits
from winnow_evaluation.calibration.unfinished import Unfinished
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import parse_policy

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


def test_the_report_needs_nothing_beside_it(profile: Path) -> None:
    page = profile.with_suffix(".html").read_text()
    assert page.count("<svg") == 2
    assert "quest budget 64, quoka prefill 64" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)


def test_a_run_that_was_killed_goes_on_where_it_was(
    profile: Path, folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Calibration._measure
    measured: list[tuple[int, int]] = []

    def killed(self: Calibration, length: int, number: int, *others: Any) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((length, number))
        return measure(self, length, number, *others)

    output = tmp_path / "profile.json"
    monkeypatch.setattr(Calibration, "_measure", killed)
    assert invoke(folder, prompts, output).exit_code != 0
    assert measured == [(192, 0), (192, 1), (320, 0)]
    [unfinished] = tmp_path.iterdir()
    # It was killed while it wrote.
    unfinished.write_text(unfinished.read_text()[:-20])
    measured.clear()
    assert invoke(folder, prompts, output, "--tokens", "5").exit_code == 1
    assert measured == []
    assert invoke(folder, prompts, output).exit_code == 0
    assert measured == [(320, 0), (320, 1)]
    once, twice = Profile.read(profile), Profile.read(output)
    assert (once.curves, once.floor, once.data) == (twice.curves, twice.floor, twice.data)


def test_what_is_unfinished_belongs_to_one_calibration(tmp_path: Path) -> None:
    Unfinished.begin(tmp_path / "kept", "one").add(128, 0, {"dense": {"kl": 0.5}}, 2.0)
    again = Unfinished.begin(tmp_path / "kept", "one")
    assert (again.measured, again.seconds) == ({(128, 0): {"dense": {"kl": 0.5}}}, 2.0)
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
    (tmp_path / "later").write_text(profile.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="no profile of version 1: version"):
        Profile.read(tmp_path / "later")
