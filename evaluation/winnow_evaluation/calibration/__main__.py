"""``python -m winnow_evaluation.calibration``: what ``winnow calibrate profile`` runs, in a process that has torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from winnow_evaluation.fidelity.__main__ import parse_contexts
from winnow_evaluation.options import OptionError, check_output, parse_policy, parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text import Kind
from winnow_service.cli.models import resolved

if TYPE_CHECKING:
    from winnow_evaluation.calibration.calibrating import Calibration
    from winnow_evaluation.calibration.unfinished import Unit
    from winnow_evaluation.fidelity.prompts import Continued
    from winnow_evaluation.offline_model import OfflineModel

_SHORTEST: Final = 1024
_NO_PREFILL: Final = "dense"
_PARTS: Final = ("quality", "speed", "drafts", "early-termination")
"""The first of them is what a server chooses by."""
_DEFAULT_PREFILL: Final = '{"policy": "quoka", "budget_ratio": 0.25}'

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def profile(
    model: Annotated[
        str, typer.Option(metavar="NAME|FOLDER", help="The model, as transformers loads it; winnow models lists names.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Your own prompts: JSONL with a text, or a request with text, prompt or messages, in each line.",
        ),
    ] = None,
    text: Annotated[
        Kind, typer.Option(help="Text of winnow text without --prompts; that which is there to choose by, not to test.")
    ] = "prose",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or groups of winnow eval instead, with commas; their answers follow.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt, several with commas; k is 1,024.",
            show_default="powers of two from 1k to the model's context",
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="Prompts of each length.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens predicted behind each prompt.")] = 64,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Policy to choose from, in JSON or a preset's name; may be given several times.",
            show_default="lowbit_top_p and lowbit_top_k over their parameter",
        ),
    ] = None,
    prefill: Annotated[
        str, typer.Option(metavar="PREFILL", help="The sparse prefill to choose from, in JSON, or dense for none.")
    ] = _DEFAULT_PREFILL,
    parts: Annotated[
        str | None,
        typer.Option(
            help=f"What is measured, with commas: {', '.join(_PARTS)}. The quality always is.",
            show_default="all",
        ),
    ] = None,
    max_error: Annotated[
        float,
        typer.Option(
            "--termination-error",
            min=0.0001,
            max=1,
            help="What early termination may change attention's output by, relative to it.",
        ),
    ] = 0.02,
    scored: Annotated[int, typer.Option(min=1, help="Last tokens of a prompt that tell of its prefill.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the tasks' prompts.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Profile to write.", show_default="MODEL-profile.json")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Report to write.", show_default="beside the profile, as .html")
    ] = None,
) -> None:
    """Measure what policies lose, read and take on a model, by length: the profile that a server chooses policies by.

    A run that was stopped goes on where it was, if it is started with the same options again.
    """
    folder = resolved(model)
    written = output or Path(f"{folder.resolve().name}-profile.json")
    shown = report or written.with_suffix(".html")
    try:
        asked = [parse_policy(each) for each in policy or ()]
        sparse = None if prefill == _NO_PREFILL else _object(prefill)
        chosen_tasks = None if tasks is None else parse_tasks(tasks, TASKS)
        given = None if lengths is None else _lengths(lengths)
        measured = list(_PARTS) if parts is None else _named_parts(parts)
        check_output(written)
        check_output(shown, "--report")
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype} is none of float32, bfloat16, float16", param_hint="--dtype")
    if prompts is not None and chosen_tasks is not None:
        raise typer.BadParameter("must not be given together with --prompts", param_hint="--tasks")
    # These import torch and transformers, which takes seconds: after the options have been read.
    from winnow_evaluation.calibration.calibrating import Calibration, Settings  # noqa: PLC0415
    from winnow_evaluation.calibration.candidates import candidates  # noqa: PLC0415
    from winnow_evaluation.calibration.report import write_report  # noqa: PLC0415
    from winnow_evaluation.fidelity.session import SessionError, default_dtype, device_of, load_model  # noqa: PLC0415
    from winnow_evaluation.text import TextError  # noqa: PLC0415
    from winnow_kernels.contract.fields import PolicyError  # noqa: PLC0415

    try:
        policies = candidates(asked, sparse)
        where = device_of(device)
        loaded = load_model(folder, where, dtype or default_dtype(where))
        sizes = given or _powers_of_two(loaded.context_length - tokens - 1)
        source, made = _prompts(loaded, sizes, tokens, count, prompts, text, chosen_tasks, seed)
        settings = Settings(measured, min(scored, sizes[0]), max_error)
        calibration = Calibration(loaded, source, made, tokens, policies, settings)
        unfinished = written.with_name(f"{written.name}.unfinished.jsonl")
        found = _with_progress(calibration, unfinished)
    except (PolicyError, SessionError, TextError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    found.write(written)
    try:
        write_report(found, shown)
    except ImportError as error:
        typer.echo(f"no report: {error}", err=True)
    unfinished.unlink()
    typer.echo(f"{written} has {len(found.curves)} policies at {len(found.lengths)} lengths; the report is {shown}")
    typer.echo(f"serve it with WINNOW_PROFILE={written.resolve()}")


def main(arguments: Sequence[str]) -> None:
    """Run the program."""
    app(list(arguments), prog_name="winnow calibrate profile")


def _object(text: str) -> Mapping[str, Any]:
    policy = parse_policy(text)
    if isinstance(policy, str):
        raise OptionError("--prefill", f"must be a JSON object, or {_NO_PREFILL}; it is {policy}")
    return policy


def _lengths(text: str) -> list[int]:
    try:
        return list(parse_contexts(text))
    except OptionError as error:
        raise OptionError("--lengths", str(error)) from None


def _named_parts(text: str) -> list[str]:
    named = {part.strip() for part in text.split(",")}
    if unknown := sorted(named - set(_PARTS)):
        raise OptionError("--parts", f"{unknown[0]!r} is none of {', '.join(_PARTS)}")
    if _PARTS[0] not in named:
        raise OptionError("--parts", f"{_PARTS[0]} must be among them: a server chooses by it")
    return [part for part in _PARTS if part in named]


def _powers_of_two(longest: int) -> list[int]:
    """Return 1,024, 2,048 and so on, and last ``longest`` in whole hundreds if it is half as long again as the last."""
    if longest < _SHORTEST:
        return [longest]
    sizes = [_SHORTEST]
    while 2 * sizes[-1] <= longest:
        sizes.append(2 * sizes[-1])
    rest = longest // 100 * 100
    return [*sizes, rest] if rest >= 1.5 * sizes[-1] else sizes


def _prompts(
    model: OfflineModel,
    lengths: Sequence[int],
    tokens: int,
    count: int,
    path: Path | None,
    kind: Kind,
    tasks: Sequence[str] | None,
    seed: int,
) -> tuple[str, dict[int, list[Continued]]]:
    """Return where the texts are from, and of each length ``count`` prompts and one more."""
    from winnow_evaluation.calibration.texts import read_texts  # noqa: PLC0415
    from winnow_evaluation.fidelity.prompts import from_documents, from_tasks  # noqa: PLC0415
    from winnow_evaluation.text import load_text  # noqa: PLC0415

    if lengths[-1] + tokens + 1 > model.context_length:
        raise ValueError(
            f"--lengths: {lengths[-1]} tokens and {tokens + 1} behind them are more than the model's context of"
            f" {model.context_length}"
        )
    if tasks is not None:
        return ", ".join(tasks), {
            length: from_tasks(model, tasks, length, tokens, count + 1, seed) for length in lengths
        }
    if path is not None:
        source, texts = path.name, read_texts(path, model)
    else:
        source, texts = f"{kind}, validation", [document.text for document in load_text("validation", kind)]
    return source, {length: from_documents(model, texts, length, tokens, count + 1) for length in lengths}


def _with_progress(calibration: Calibration, unfinished: Path) -> Any:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)
        last: Unit | None = None

        def advance(place: int, total: int, unit: Unit, done: str) -> None:
            nonlocal last
            where = f"{unit.part.replace('-', ' ')}, {unit.length:,} tokens"
            bar.update(task, total=total, completed=place, description=f"{where}: {done}")
            if not console.is_terminal and unit != last:
                console.print(f"{where}, prompt {unit.prompt + 1} ({place + 1} of {total})", highlight=False)
            last = unit

        return calibration.run(unfinished, advance)


if __name__ == "__main__":
    main(sys.argv[1:])
