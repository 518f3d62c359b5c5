"""``winnow calibrate``: measure a model for what its policies need to know in advance."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from winnow_evaluation.options import OptionError, parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.generation import SampleKey, prepare
from winnow_service.cli.models import resolved
from winnow_service.cli.terminal import PASSED_ON, module_command

PROFILE_FILE = "delta_profile.json"
"""Where the server looks for it, in the model's folder."""
_FEWEST_WORDS = 16
_AIM = 0.97
"""The part of the room that the next size of a prompt aims at."""
_MAX_COUNTS = 12

app = typer.Typer(help="Measure a model for what its policies need to know in advance.", no_args_is_help=True)


@app.callback()
def calibrate() -> None:
    """Measure a model for what its policies need to know in advance."""


@app.command(context_settings=PASSED_ON, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Measure what policies lose and read, by length: what a server chooses policies by; --help tells all options."""
    command = module_command("winnow_evaluation.calibration", context.args)
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def delta(
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME|FOLDER", help="The model, as transformers loads it; winnow models lists names."
        ),
    ],
    samples: Annotated[int, typer.Option(min=1, max=100_000, help="Prompts, dealt out to the tasks in turn.")] = 24,
    words: Annotated[
        int, typer.Option(min=16, max=1_000_000, help="Most English words of a prompt; fewer if the context is short.")
    ] = 3000,
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
    """Find the Δ-layers of a model for the policy ``delta``: the layers that select best for those after them."""
    folder = resolved(model)
    if not (folder / "config.json").is_file():
        raise typer.BadParameter(f"{folder} has no config.json", param_hint="--model")
    try:
        chosen = parse_tasks(tasks, tuple(TASKS))
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    profile = output or folder / PROFILE_FILE
    # A stream of its own: no prompt of an evaluation is among those that the layers were chosen by.
    keys = [SampleKey(seed, chosen[index % len(chosen)], "calibration", index) for index in range(samples)]
    sizes = _sizes_that_fit(keys, words, folder, steps)
    if min(sizes) < words:
        typer.echo(f"prompts of {min(sizes)} to {max(sizes)} words, so that they fit the model's context", err=True)
    arguments = ["--device", device, "--steps", str(steps), "--full-layers", str(full_layers)]
    arguments += ["--words", str(max(sizes)), "--output", str(profile)]
    _run("calibration", folder, map(_prompt, keys, sizes), *arguments)
    found = json.loads(profile.read_text())
    typer.echo(f"Δ-layers {found['delta_layers']} of {found['layers']} layers, written to {profile}")


def _sizes_that_fit(keys: Sequence[SampleKey], words: int, folder: Path, steps: int) -> list[int]:
    """Return for each prompt the words, at most ``words``, with which it and its answer fit the model's context."""
    sizes = [words] * len(keys)
    for _ in range(_MAX_COUNTS):
        answer = _run("calibration.prompt_lengths", folder, map(_prompt, keys, sizes), capture=True)
        counted = json.loads(answer)
        if counted["context"] is None:
            return sizes
        room = counted["context"] - steps
        too_long = [index for index, tokens in enumerate(counted["tokens"]) if tokens > room]
        if not too_long:
            return sizes
        for index in too_long:
            smaller = int(sizes[index] * _AIM * room / counted["tokens"][index])
            if smaller < _FEWEST_WORDS:
                raise typer.BadParameter(
                    f"{steps} leave too little of the model's context of {counted['context']} tokens for a prompt of"
                    f" {keys[index].task}",
                    param_hint="--steps",
                )
            sizes[index] = smaller
    raise typer.BadParameter(f"no prompts were found that fit the model; give fewer than {words}", param_hint="--words")


def _run(module: str, folder: Path, prompts: Iterable[str], *arguments: str, capture: bool = False) -> str:
    """Run a module of ``sglang_winnow`` on prompts; return its output if it is captured."""
    stdout = subprocess.PIPE if capture else None
    command = module_command(f"sglang_winnow.{module}", ["--model", str(folder), *arguments])
    done = subprocess.run(command, input=json.dumps(list(prompts)), stdout=stdout, text=True, check=False)
    if done.returncode:
        raise typer.Exit(1)
    return done.stdout or ""


def _prompt(key: SampleKey, words: int) -> str:
    return prepare(TASKS[key.task], key, words).prompt
