"""``winnow calibrate``: measure a model for what its policies need to know in advance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from winnow_service.evaluation.generation import SampleKey, prepare
from winnow_service.evaluation.options import OptionError, parse_tasks
from winnow_service.evaluation.tasks import TASKS

PROFILE_FILE = "delta_profile.json"
"""Where the server looks for it, in the model's folder."""

app = typer.Typer(help="Measure a model for what its policies need to know in advance.", no_args_is_help=True)


@app.callback()
def calibrate() -> None:
    """Measure a model for what its policies need to know in advance."""


@app.command()
def delta(
    model: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of the model, as transformers loads it.")
    ],
    samples: Annotated[int, typer.Option(min=1, max=100_000, help="Prompts, dealt out to the tasks in turn.")] = 24,
    words: Annotated[int, typer.Option(min=16, max=1_000_000, help="Length of a prompt in English words.")] = 3000,
    steps: Annotated[int, typer.Option(min=1, help="Most decode steps of an answer.")] = 64,
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks or groups, as winnow eval --list names them.")
    ] = "all",
    full_layers: Annotated[int, typer.Option(min=0, help="First layers that are always dense.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same prompts.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Profile to write.", show_default=f"{PROFILE_FILE} in the model's folder"),
    ] = None,
) -> None:
    """Find the Δ-layers of a model for the policy ``delta``: the layers at which its attention shifts most."""
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json", param_hint="--model")
    try:
        chosen = parse_tasks(tasks, tuple(TASKS))
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    profile = output or model / PROFILE_FILE
    prompts = [_prompt(chosen[index % len(chosen)], words, seed, index) for index in range(samples)]
    command = [sys.executable, "-m", "sglang_winnow.calibration", "--model", str(model), "--device", device]
    command += ["--steps", str(steps), "--full-layers", str(full_layers), "--words", str(words)]
    # The model runs in a process of its own: the service's never imports torch.
    done = subprocess.run([*command, "--output", str(profile)], input=json.dumps(prompts), text=True, check=False)
    if done.returncode:
        raise typer.Exit(1)
    found = json.loads(profile.read_text())
    typer.echo(f"Δ-layers {found['delta_layers']} of {found['layers']} layers, written to {profile}")


def _prompt(task: str, words: int, seed: int, index: int) -> str:
    # A stream of its own: no prompt of an evaluation is among those that the layers were chosen by.
    return prepare(TASKS[task], SampleKey(seed, task, "calibration", index), words).prompt
