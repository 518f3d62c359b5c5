"""The profile and the quality that a server starts with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_winnow.hooks import LAUNCH
from sglang_winnow.profile_parts import DenseTime, Speed, TimedPoint, TimedPolicy
from sglang_winnow.profile_settings import (
    DEFAULT_KL,
    LOAD,
    PROFILE,
    QUALITY,
    UNDER_LOAD,
    default_kl,
    load_requests,
    profile,
    served_profile,
    under_load_kl,
)
from sglang_winnow.quality_profile import Point, Profile
from sglang_winnow.server_information import HOOKS, ServedModel
from tests import profiles
from tests.models import ModelShape, write_model, write_weights
from tests.sglang_ext.conftest import CURVES, PROFILE_LENGTHS
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import parse_policy
from winnow_service.policies.profile import ModelProfile


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    for read in (profile, default_kl, under_load_kl, load_requests):
        read.cache_clear()
    yield
    for read in (profile, default_kl, under_load_kl, load_requests):
        read.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", ModelShape())
    write_weights(folder)
    return folder


@pytest.fixture
def made(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    made = profiles.profile(model, PROFILE_LENGTHS, CURVES)
    made.write(tmp_path / "profile.json")
    monkeypatch.setenv(PROFILE, str(tmp_path / "profile.json"))
    return made


def test_the_served_model_has_the_profile_of_its_own_folder(model: Path, made: Profile, tmp_path: Path) -> None:
    assert served_profile(model, 2) == made
    with pytest.raises(ValueError, match=f"{PROFILE}: the profile was measured with low-bit keys of 2 bits"):
        served_profile(model, 3)
    other = write_model(tmp_path / "other", ModelShape(kv_heads=1))
    with pytest.raises(ValueError, match=f"{PROFILE}: the profile is of another configuration"):
        served_profile(other, 2)
    with pytest.raises(ValueError, match=f"{PROFILE}: the model's folder .* cannot be read"):
        served_profile(tmp_path / "nowhere", 2)


def test_without_the_setting_there_is_none(model: Path) -> None:
    assert served_profile(model, 2) is None


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "cannot be read"), ("{", "is no profile"), ("{}", "is no profile")]
)
def test_a_file_that_is_no_profile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str
) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(PROFILE, str(path))
    with pytest.raises(ValueError, match=f"{PROFILE}: {re.escape(str(path))} {problem}"):
        profile()


def test_the_operator_sets_the_quality_of_requests_that_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_kl() == DEFAULT_KL
    default_kl.cache_clear()
    monkeypatch.setenv(QUALITY, "0.005")
    assert default_kl() == 0.005


@pytest.mark.parametrize("text", ["", "0", "-1", "11", "nan", "good"])
def test_a_quality_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(QUALITY, text)
    with pytest.raises(ValueError, match=f"{QUALITY}: must be a KL in nats, more than 0 and at most 10; it is {text}"):
        default_kl()


def test_the_operator_says_what_load_is_and_what_suffices_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (under_load_kl(), load_requests()) == (None, None)
    for read in (under_load_kl, load_requests):
        read.cache_clear()
    monkeypatch.setenv(UNDER_LOAD, "0.05")
    monkeypatch.setenv(LOAD, "16")
    assert (under_load_kl(), load_requests()) == (0.05, 16)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({LOAD: "0"}, "WINNOW_LOAD_REQUESTS: must be a number of requests from 1 on; it is 0"),
        ({LOAD: "many"}, "WINNOW_LOAD_REQUESTS: must be a number of requests from 1 on; it is many"),
        ({LOAD: ""}, "WINNOW_LOAD_REQUESTS: must be a number of requests from 1 on; it is "),
        ({UNDER_LOAD: "0.05"}, "WINNOW_QUALITY_UNDER_LOAD_KL: needs WINNOW_LOAD_REQUESTS"),
        ({LOAD: "4", UNDER_LOAD: "11"}, "WINNOW_QUALITY_UNDER_LOAD_KL: must be a KL in nats, .* at most 10; it is 11"),
        ({LOAD: "4", UNDER_LOAD: "low"}, "WINNOW_QUALITY_UNDER_LOAD_KL: must be a KL in nats, .*; it is low"),
        (
            {LOAD: "4", UNDER_LOAD: "0.01", QUALITY: "0.03"},
            r"_UNDER_LOAD_KL: must be at least 0.03, the KL without load \(WINNOW_QUALITY_KL\); it is 0.01",
        ),
    ],
)
def test_settings_of_load_that_mean_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], reason: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=reason):
        (under_load_kl(), load_requests())


def test_a_server_chooses_among_what_it_serves(made: Profile) -> None:
    def kinds(model: ServedModel) -> list[tuple[str, str]]:
        chosen = [curve.attention for curve in model.choices]
        return [(policy.decode.policy, policy.prefill.policy) for policy in chosen]

    everything = ServedModel(2, 8192, profile=made)
    pairs = [("quest", "dense"), ("dense", "quoka"), ("quest", "quoka")]
    assert kinds(everything) == [*pairs, pairs[0], pairs[2]]
    assert kinds(ServedModel(2, 8192, decode_policies=("dense", "tactic"), profile=made)) == [("dense", "quoka")]
    # A block of the prefill must fit a chunk.
    assert kinds(ServedModel(2, 8192, chunk=32, profile=made)) == [("quest", "dense")] * 2


def test_the_server_tells_its_profile_and_what_of_it_is_served(made: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUALITY, "0.005")
    told = json.loads(json.dumps(ServedModel(2, 8192, chunk=32, profile=made).describe()["profile"]))
    assert (told["model"], told["lengths"], told["kl"]) == ("model", list(PROFILE_LENGTHS), 0.005)
    assert told["data"] == {"source": "made up", "prompts": 1, "tokens": 1}
    assert [point["length"] for point in told["floor"]] == list(PROFILE_LENGTHS)
    assert [curve["served"] for curve in told["curves"]] == [True, False, False, True, False]
    for curve, of_profile in zip(told["curves"], made.curves, strict=True):
        assert parse_policy(curve["attention"]) == of_profile.attention
        assert [point.pop("time") for point in curve["points"]] == [None] * len(of_profile.points)
        assert [Point.model_validate(point) for point in curve["points"]] == list(of_profile.points)


def test_the_server_tells_the_times_of_its_profile(made: Profile) -> None:
    quest, alone, after_quoka, *_ = CURVES
    timed = TimedPolicy(attention=quest.attention, points=(TimedPoint(length=2000, seconds=0.02, ratio=0.4),))
    speed = Speed(threads=1, steps=16, dense=(DenseTime(length=2000, seconds=0.05),), policies=(timed,))
    with_times = made.model_copy(update={"speed": speed})
    told = json.loads(json.dumps(ServedModel(2, 8192, profile=with_times).describe()["profile"]))
    times = {
        (parse_policy(curve["attention"]), point["length"]): point["time"]
        for curve in told["curves"]
        for point in curve["points"]
    }
    assert times[quest.attention, 2000] == {"seconds": 0.02, "ratio": 0.4}
    # Its steps take as long after another prefill. That prefill alone decodes densely.
    assert times[after_quoka.attention, 2000] == {"seconds": 0.02, "ratio": 0.4}
    assert times[alone.attention, 2000] is None
    assert sum(time is not None for time in times.values()) == 2
    # The service reads all of it.
    assert ModelProfile.model_validate(told).model_dump(mode="json") == told


def test_without_a_profile_a_quality_is_refused_with_the_command() -> None:
    asked = {"attention": '{"quality": {}}'}
    with pytest.raises(PolicyError, match="winnow calibrate profile --model MODEL"):
        ServedModel(2, 8192).policy_of(asked)


def test_a_profile_of_another_model_ends_the_start(made: Profile, model: Path, tmp_path: Path) -> None:
    [check] = [hook.function for hook in HOOKS if hook.target == LAUNCH]
    check(None, SimpleNamespace(model_path=str(model)))
    other = write_model(tmp_path / "other", ModelShape(kv_heads=1))
    reason = f"the server does not start, because {PROFILE}: the profile is of another configuration (model): run"
    with pytest.raises(SystemExit, match=re.escape(reason)):
        check(None, SimpleNamespace(model_path=str(other)))
    assert made.model.name == "model"


def test_without_a_profile_nothing_is_checked_at_the_start() -> None:
    [check] = [hook.function for hook in HOOKS if hook.target == LAUNCH]
    check(None, SimpleNamespace(model_path="nowhere"))
