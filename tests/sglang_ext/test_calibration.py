"""``winnow calibrate delta`` on a model with random weights, against the attention maps that transformers gives."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from sglang_winnow.calibration import prompt_lengths
from sglang_winnow.calibration.__main__ import main
from sglang_winnow.calibration.attention_maps import ATTENTION, decode_coverage
from sglang_winnow.delta_profiles import PROFILE_FILE, DeltaProfile, config_hash, delta_profile
from tests.models import ModelShape, write_model, write_weights
from winnow_kernels.policies.delta.calibration import layer_coverage, token_scores
from winnow_service.cli import calibrate
from winnow_service.cli.calibrate import app

SHAPE = ModelShape(layers=5, hidden_size=64, query_heads=4, kv_heads=2, head_dim=16, context_length=2048)
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("model"), SHAPE)
    write_weights(path)
    return path


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command starts runs in this process, which has imported torch."""

    def run(module: str, folder: Path, prompts: Iterable[str], *arguments: str, capture: bool = False) -> str:
        monkeypatch.setattr("sys.argv", [module, "--model", str(folder), *arguments])
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(list(prompts))))
        with redirect_stdout(io.StringIO()) as output:
            {"calibration": main, "calibration.prompt_lengths": prompt_lengths.main}[module]()
        return output.getvalue()

    monkeypatch.setattr(calibrate, "_run", run)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers 2 and 5 of 6 see the whole context, the others 64 tokens."""
    path = write_model(tmp_path_factory.mktemp("windowed"), ModelShape(family="gemma3_text", layers=6))
    write_weights(path)
    return path


def _plain_coverage(model: Any, prompt: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
    """Each decode step from the start, by the weights that eager attention returns for its last query."""
    tokens = prompt[None]
    steps = []
    for _ in range(STEPS):
        with torch.inference_mode():
            token = model(tokens).logits[0, -1].argmax()
            tokens = torch.cat((tokens, token[None, None]), dim=1)
            maps = model(tokens, output_attentions=True).attentions
        steps.append(layer_coverage([token_scores(maps[layer][0, :, -1]) for layer in layers]))
    return steps


@pytest.mark.parametrize(("model", "layers"), [("folder", range(5)), ("windowed", (2, 5))])
def test_coverage_is_that_of_the_attention_that_transformers_returns(
    model: str, layers: Sequence[int], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    prompt = torch.tensor(AutoTokenizer.from_pretrained(folder)("a lamp, a road and a river; " * 5)["input_ids"])
    ours, eager = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name).eval()
        for name in (ATTENTION, "eager")
    )
    steps = list(decode_coverage(ours, prompt, STEPS, frozenset(), layers))
    expected = _plain_coverage(eager, prompt, layers)
    assert len(steps) == STEPS
    for step, plain in zip(steps, expected, strict=True):
        torch.testing.assert_close(step, plain, atol=1e-4, rtol=0)


def test_decoding_ends_with_the_answer(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION).eval()
    prompt = torch.tensor([5, 6, 7])
    everything = frozenset(range(SHAPE.vocab_size))
    assert list(decode_coverage(model, prompt, STEPS, everything, range(SHAPE.layers))) == []


def test_the_command_writes_a_profile_that_the_server_finds(folder: Path) -> None:
    options = ["delta", "--model", str(folder), "--samples", "2", "--words", "60", "--steps", "4"]
    result = CliRunner().invoke(app, [*options, "--tasks", "niah_single_2,vt"])
    assert result.exit_code == 0, result.output
    profile = DeltaProfile.model_validate_json((folder / PROFILE_FILE).read_text())
    assert delta_profile(folder) == profile.delta_layers
    assert profile.delta_layers[0] == 2
    assert profile.layers == 5
    assert profile.config_sha256 == config_hash(json.loads((folder / "config.json").read_text()))
    assert (profile.samples, profile.words) == (2, 60)
    assert profile.steps is not None
    assert 0 < profile.steps <= 2 * 4
    assert profile.coverage is not None
    assert len(profile.coverage) == 5
    assert all(
        (share == 1) == (layer < 2 or layer in profile.delta_layers) for layer, share in enumerate(profile.coverage)
    )
    assert str(list(profile.delta_layers)) in result.output


@pytest.mark.usefixtures("_one_process")
def test_prompts_are_made_short_enough_for_the_model(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    options = ["delta", "--model", str(folder), "--samples", "2", "--steps", "2", "--output", str(output)]
    result = CliRunner().invoke(app, [*options, "--tasks", "niah_single_2,vt"])
    assert result.exit_code == 0, result.output
    assert "so that they fit the model's context" in result.stderr
    words = DeltaProfile.model_validate_json(output.read_text()).words
    assert words is not None
    # The default, 3,000 words, is several times the context of 2,048 tokens; what is left is used.
    assert 200 < words < 2048


@pytest.mark.usefixtures("_one_process")
def test_a_context_without_room_for_a_prompt_is_said_before_the_model_is_loaded(folder: Path) -> None:
    refused = CliRunner().invoke(app, ["delta", "--model", str(folder), "--samples", "1", "--steps", "2040"])
    assert refused.exit_code == 2
    assert "--steps" in refused.output


@pytest.mark.parametrize(
    ("prompt", "full_layers", "problem"),
    [("lamp " * 4000, 2, "the model's context has 2048"), ("lamp", 5, "full_layers: leaves none of the 5 layers")],
)
def test_what_cannot_be_calibrated_ends_with_the_reason_and_writes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, full_layers: int, problem: str
) -> None:
    output = tmp_path / "profile.json"
    assert_not_calibrated(folder, output, monkeypatch, prompt, full_layers, problem)


@pytest.mark.usefixtures("_one_process")
def test_layers_with_a_sliding_window_are_no_candidates(windowed: Path) -> None:
    options = ["delta", "--model", str(windowed), "--samples", "2", "--words", "60", "--steps", "4"]
    result = CliRunner().invoke(app, [*options, "--tasks", "niah_single_2,vt"])
    assert result.exit_code == 0, result.output
    profile = DeltaProfile.model_validate_json((windowed / PROFILE_FILE).read_text())
    assert delta_profile(windowed) == profile.delta_layers == (2,)
    assert profile.layers == 6
    assert profile.coverage is not None
    *before, last = profile.coverage
    assert before == [None, None, 1.0, None, None]
    assert last is not None
    assert 0 < last < 1


def test_a_model_whose_layers_are_all_dense_has_none(
    windowed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_not_calibrated(windowed, tmp_path / "profile.json", monkeypatch, "lamp", 6, "full_layers: leaves none")


def assert_not_calibrated(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, full_layers: int, problem: str
) -> None:
    options = {"model": model, "device": "cpu", "steps": 4, "full-layers": full_layers, "words": 1, "output": output}
    arguments = [str(text) for name, value in options.items() for text in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", ["calibration", *arguments])
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([prompt])))
    with pytest.raises(SystemExit, match=problem):
        main()
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "name"), [(["--tasks", "haystack"], "--tasks"), (["--model", "."], "--model"), ([], "--model")]
)
def test_bad_options_are_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--model", str(folder)] if "--tasks" in options else []
    refused = CliRunner().invoke(app, ["delta", *given, *options])
    assert refused.exit_code == 2
    assert name in refused.output
