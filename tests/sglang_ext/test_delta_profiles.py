"""Which profile of Δ-layers is a model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_winnow.delta_profiles import (
    PROFILE_FILE,
    DeltaProfile,
    config_hash,
    delta_profile,
    layer_count,
    shipped_profiles,
)
from sglang_winnow.server_information import _folder
from winnow_kernels.policies.attention_policy import check_against_model, parse_policy
from winnow_service.models.catalogue import CATALOGUE, Shipped

NEEDLE = Path(__file__).resolve().parents[2] / "models" / "needle"
PAPER = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (28, (2, 14, 23)),
    "DeepSeek-R1-Distill-Qwen-7B": (28, (2, 14, 22)),
    "DeepSeek-R1-Distill-Qwen-14B": (48, (2, 6, 42)),
    "DeepSeek-R1-Distill-Llama-8B": (32, (2, 8, 31)),
}


def _model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _profile(config: dict[str, Any], **changes: Any) -> str:
    profile = DeltaProfile(
        model="m", layers=12, config_sha256=config_hash(config), delta_layers=(2, 5), full_layers=2, source="test"
    )
    return profile.model_copy(update=changes).model_dump_json()


def test_the_papers_models_have_its_layers_and_say_whose_they_are() -> None:
    shipped = {profile.model: profile for profile in shipped_profiles() if profile.model not in CATALOGUE}
    assert {name: (p.layers, p.delta_layers) for name, p in shipped.items()} == PAPER
    assert all("section 5.1" in profile.source for profile in shipped.values())


@pytest.mark.parametrize("name", PAPER)
def test_a_model_is_known_by_its_folder_its_cache_entry_or_its_own_word(tmp_path: Path, name: str) -> None:
    layers, delta_layers = PAPER[name]
    places = [
        _model(tmp_path / "deepseek-ai" / name, num_hidden_layers=layers),
        _model(tmp_path / f"models--deepseek-ai--{name}" / "snapshots" / "0f3a", num_hidden_layers=layers),
        _model(tmp_path / "model", num_hidden_layers=layers, _name_or_path=f"deepseek-ai/{name}"),
        _model(tmp_path / name.lower(), num_hidden_layers=layers),
    ]
    assert [delta_profile(place) for place in places] == [delta_layers] * 4


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("DeepSeek-R1-Distill-Qwen-7B", 27),
        ("DeepSeek-R1-Distill-Qwen-7B-pruned", 28),
        ("Qwen2.5-7B", 28),
        ("model", None),
    ],
)
def test_another_model_has_none(tmp_path: Path, name: str, layers: int | None) -> None:
    assert delta_profile(_model(tmp_path / name, num_hidden_layers=layers)) is None


def test_what_is_no_folder_of_a_model_has_none(tmp_path: Path) -> None:
    assert delta_profile(tmp_path) is None
    assert delta_profile(tmp_path / "missing") is None


def test_a_calibrated_profile_lies_in_the_models_folder_and_goes_before_the_papers(tmp_path: Path) -> None:
    folder = _model(tmp_path / "DeepSeek-R1-Distill-Qwen-7B", num_hidden_layers=28)
    (folder / PROFILE_FILE).write_text(_profile({"num_hidden_layers": 28}))
    assert delta_profile(folder) == (2, 5)


def test_a_profile_of_another_configuration_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model", num_hidden_layers=12, hidden_size=64)
    (folder / PROFILE_FILE).write_text(_profile({"num_hidden_layers": 12, "hidden_size": 32}))
    with pytest.raises(ValueError, match=r"another configuration.*winnow calibrate delta"):
        delta_profile(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"delta_layers": "2"}', "[]"])
def test_a_broken_profile_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    folder = _model(tmp_path / "model", num_hidden_layers=12)
    (folder / PROFILE_FILE).write_text(text)
    with pytest.raises(ValueError, match=PROFILE_FILE):
        delta_profile(folder)


def test_the_hash_is_of_what_makes_the_model() -> None:
    config = {"num_hidden_layers": 12, "hidden_size": 64}
    same = {"hidden_size": 64, "num_hidden_layers": 12, "transformers_version": "5.0", "_name_or_path": "x"}
    assert config_hash(config) == config_hash({**same, "torch_dtype": "bfloat16"})
    assert config_hash(config) != config_hash({**config, "hidden_size": 65})


def test_layers_of_a_multimodal_configuration_are_its_language_models() -> None:
    assert layer_count({"text_config": {"num_hidden_layers": 7}}) == 7
    assert layer_count({}) is None


def test_the_model_that_ships_has_a_profile_that_its_policy_takes() -> None:
    config = json.loads((NEEDLE / "config.json").read_text())
    layers = delta_profile(NEEDLE)
    assert layers is not None
    policy = parse_policy({"decode": {"policy": "delta"}})
    checked = check_against_model(policy, config["num_hidden_layers"], config["max_position_embeddings"], layers)
    assert checked.decode.delta_layers == layers  # type: ignore[union-attr]
    profile = DeltaProfile.model_validate_json((NEEDLE / PROFILE_FILE).read_text())
    assert profile.coverage is not None
    assert len(profile.coverage) == profile.layers == config["num_hidden_layers"]
    assert profile.steps is not None
    assert profile.steps > 100


# How many layers it has, and which of them see the whole context.
FETCHED = {
    "smollm2": (30, range(30)),
    "smollm2-32k": (30, range(30)),
    "gemma3-270m": (18, (5, 11, 17)),
}


@pytest.mark.parametrize("name", [name for name, model in CATALOGUE.items() if not isinstance(model.source, Shipped)])
def test_a_model_that_is_fetched_has_a_profile_that_was_calibrated(name: str) -> None:
    layers, seeing = FETCHED[name]
    [profile] = [profile for profile in shipped_profiles() if profile.model == name]
    assert profile.source == "winnow calibrate delta"
    assert profile.coverage is not None
    assert len(profile.coverage) == profile.layers == layers
    assert [layer for layer, share in enumerate(profile.coverage) if share is not None] == list(seeing)
    assert set(profile.delta_layers) < set(seeing)


@pytest.mark.parametrize("name", ["s3://bucket/model", "nobody/nothing", "a/b/c/d"])
def test_a_model_that_is_nowhere_on_this_machine_has_no_profile(name: str) -> None:
    assert delta_profile(_folder(name)) is None
