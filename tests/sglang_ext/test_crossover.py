"""From which length on policies run sparsely: by the environment, by the profile of this machine, by declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow import crossover, profile_settings
from sglang_winnow.crossover import ENVIRONMENT, acting_at_every_length, crossover_tokens, measured_here
from sglang_winnow.machine import device_name
from sglang_winnow.profile_parts import DenseTime, Speed, TimedPoint, TimedPolicy
from sglang_winnow.quality_profile import Profile
from sglang_winnow.request_policy import reads_everything
from sglang_winnow.request_state import RequestState
from sglang_winnow.server_information import ServedModel
from tests import profiles
from tests.models import ModelShape, write_model, write_weights
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.declarations import declaration_of

LENGTHS = (1024, 4096, 8192)
FAST, SLOW, LATER, SHORT = (
    parse_policy({"decode": {"policy": "quest", "budget": budget}}) for budget in (64, 128, 256, 512)
)
DELTA = parse_policy({"decode": {"policy": "delta", "delta_layers": [2, 3]}})
DECLARED = declaration_of(FAST.decode).crossover.cpu


def timed(attention: AttentionPolicy, *ratios: float, lengths: tuple[int, ...] = LENGTHS) -> TimedPolicy:
    points = (
        TimedPoint(length=length, seconds=ratio, ratio=ratio) for length, ratio in zip(lengths, ratios, strict=True)
    )
    return TimedPolicy(attention=attention, points=tuple(points))


def speed(threads: int | None) -> Speed:
    return Speed(
        threads=threads,
        steps=1,
        dense=tuple(DenseTime(length=length, seconds=1) for length in LENGTHS),
        policies=(
            timed(FAST, 0.9, 0.5, 0.3),
            timed(SLOW, 0.9, 0.5, 1.0),
            timed(LATER, 1.2, 0.99, 0.5),
            timed(SHORT, 3.0, lengths=(1024,)),
            timed(DELTA, 0.5, 0.4, 0.3),
        ),
    )


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    caches = (crossover.of_all_policies, crossover._measured, profile_settings.profile)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int | None], Profile]:
    """Return what makes a profile measured on a device with so many threads the server's."""
    folder = write_model(tmp_path / "model", ModelShape())
    write_weights(folder)

    def serve(device: str, threads: int | None) -> Profile:
        made = profiles.profile(folder, LENGTHS, [], speed(threads)).model_copy(update={"device": device})
        made.write(tmp_path / "profile.json")
        monkeypatch.setenv(profile_settings.PROFILE, str(tmp_path / "profile.json"))
        return made

    return serve


def test_the_profile_of_this_machine_says_from_where_on_a_policy_pays(
    serve: Callable[[str, int | None], Profile],
) -> None:
    serve(device_name(), torch.get_num_threads())
    assert measured_here() == speed(torch.get_num_threads())
    assert crossover_tokens(FAST) == 1023
    assert crossover_tokens(LATER) == 4095
    assert crossover_tokens(DELTA) == 1023
    # It was slower at the longest length: nobody knows that it is faster beyond.
    assert crossover_tokens(SLOW) == max(8192, DECLARED)
    assert crossover_tokens(SHORT) == max(1024, DECLARED)
    # After another prefill and under verify it decodes alike; another budget does not.
    assert (
        crossover_tokens(FAST.model_copy(update={"prefill": parse_policy({"prefill": {"policy": "quoka"}}).prefill}))
        == 1023
    )
    assert crossover_tokens(parse_policy({"decode": {"policy": "quest", "budget": 65}})) == DECLARED
    assert (
        crossover_tokens(parse_policy({"decode": {"policy": "quest", "budget": 64}, "early_termination": {}}))
        == DECLARED
    )


def test_steps_of_a_request_go_by_it(serve: Callable[[str, int | None], Profile]) -> None:
    serve(device_name(), torch.get_num_threads())
    state = RequestState(LATER, 4000)
    assert reads_everything(state, 4095, 16)
    assert not reads_everything(state, 4096, 16)


@pytest.mark.parametrize("another", ["device", "threads"])
def test_times_of_another_machine_say_nothing(serve: Callable[[str, int | None], Profile], another: str) -> None:
    threads = torch.get_num_threads()
    serve("another", threads) if another == "device" else serve(device_name(), threads + 1)
    assert measured_here() is None
    assert crossover_tokens(FAST) == DECLARED


def test_the_server_says_whether_times_are_of_its_machine(serve: Callable[[str, int | None], Profile]) -> None:
    model = ServedModel(2, 8192, profile=serve(device_name(), torch.get_num_threads()))
    assert model.describe()["profile"]["times_are_of_this_machine"] is True
    profile_settings.profile.cache_clear()
    model = ServedModel(2, 8192, profile=serve("another", torch.get_num_threads()))
    assert model.describe()["profile"]["times_are_of_this_machine"] is False


def test_times_of_a_gpu_count_whatever_the_threads(serve: Callable[[str, int | None], Profile]) -> None:
    serve(device_name(), None)
    assert crossover_tokens(FAST) == 1023


@pytest.mark.parametrize("before", [None, "4096"])
def test_policies_act_at_every_length_for_a_while(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is not None:
        monkeypatch.setenv(ENVIRONMENT, before)
    usual = crossover_tokens(FAST)
    with acting_at_every_length():
        assert crossover_tokens(FAST) == 0
    assert crossover_tokens(FAST) == usual == (DECLARED if before is None else 4096)


def test_without_a_profile_the_declared_length_counts() -> None:
    assert measured_here() is None
    assert crossover_tokens(FAST) == DECLARED


def test_the_environment_goes_before_all(
    serve: Callable[[str, int | None], Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(device_name(), torch.get_num_threads())
    monkeypatch.setenv(ENVIRONMENT, "7")
    assert crossover_tokens(FAST) == crossover_tokens(SLOW) == 7


@given(st.lists(st.floats(0.1, 3), min_size=3, max_size=3))
def test_from_where_it_is_faster_it_is_so_at_every_measured_length(ratios: list[float]) -> None:
    policy = timed(FAST, *ratios)
    start = policy.faster_from
    for length, ratio in zip(LENGTHS, ratios, strict=True):
        assert start is None or length < start or ratio < 1
    if start is None:
        assert ratios[-1] >= 1
    elif start != LENGTHS[0]:
        assert ratios[LENGTHS.index(start) - 1] >= 1
