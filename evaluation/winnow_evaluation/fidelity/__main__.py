"""``python -m winnow_evaluation.fidelity``: what ``winnow fidelity`` runs, in a process that has torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from winnow_evaluation.fidelity.plot import draw
from winnow_evaluation.fidelity.record import FidelityRecord, merged
from winnow_evaluation.options import OptionError, check_output, parse_policy, parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text import Kind
from winnow_service.cli.models import resolved

_MIN_CONTEXT: Final = 64
_COMMANDS: Final = ("run", "merge", "plot")
_CONTEXT: Final = re.compile(r"(\d+(?:\.\d+)?)(k?)", re.IGNORECASE)

app = typer.Typer(
    help="How far each policy is from dense attention on the same text, and what it reads for it.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.command()
def run(
    model: Annotated[str, typer.Option(help="Name of a model, as winnow models lists them, or a model's folder.")],
    text: Annotated[
        Kind, typer.Option(help="Held-out text of winnow text whose true continuation is predicted.")
    ] = "prose",
    text_folder: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Text files of your own instead, each a document.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or groups of winnow eval instead, with commas; their answers follow.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of a prompt, several with commas; k is 1,024.")] = "4k",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each context.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens predicted behind each prompt.")] = 64,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Policy in JSON or a preset's name; may be given several times.",
            show_default="each policy over its parameter",
        ),
    ] = None,
    bits: Annotated[str, typer.Option(help="Bits of a channel of low-bit keys: 2, 3 or 4, several with commas.")] = "2",
    known: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Record of earlier runs: of what it has rows, none are measured."
        ),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="Measure the presets, too.")] = False,
    oracles: Annotated[bool, typer.Option(help="Measure the oracles beside them.")] = True,
    delta_layers: Annotated[
        str | None,
        typer.Option(
            help="Δ-layers for delta, with commas.", show_default="the model's profile, or else one prompt's attention"
        ),
    ] = None,
    scored: Annotated[int, typer.Option(min=1, help="Last tokens of a prompt that tell of its prefill.")] = 256,
    prefill_prompts: Annotated[int, typer.Option(min=0, help="Most prompts for policies with a sparse prefill.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the tasks' prompts.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="fp8_e4m3, without scales; all is compared with a cache of --dtype.", show_default="--dtype"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Prompts held at a time.", show_default="as many as fit")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB that a step may take for what it reads.", show_default="by the device"),
    ] = None,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write the record as JSON.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Where to draw the largest context, as SVG.")
    ] = None,
) -> None:
    """Measure policies on a model, beside dense attention, oracles, and dense attention asked once more."""
    try:
        contexts = parse_contexts(context)
        chosen_tasks = None if tasks is None else parse_tasks(tasks, TASKS)
        asked = [parse_policy(each) for each in policy or ()]
        key_bits = parse_bits(bits)
        for path, option in ((output, "--output"), (plot_file, "--plot")):
            if path is not None:
                check_output(path, option)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype} is none of float32, bfloat16, float16", param_hint="--dtype")
    if kv_cache_dtype not in (None, "fp8_e4m3"):
        raise typer.BadParameter(f"{kv_cache_dtype} is not fp8_e4m3", param_hint="--kv-cache-dtype")
    folder = resolved(model)
    # Imports torch and transformers, which takes seconds: after the options have been read.
    from winnow_evaluation.fidelity.session import Options, Session, SessionError  # noqa: PLC0415

    options = Options(
        model=folder,
        text=text,
        text_folder=text_folder,
        tasks=chosen_tasks,
        contexts=contexts,
        prompts=prompts,
        tokens=tokens,
        asked=asked,
        bits=key_bits,
        known=None if known is None else _read(known),
        presets=presets,
        oracles=oracles,
        delta_layers=delta_layers,
        scored=scored,
        prefill_prompts=prefill_prompts,
        seed=seed,
        device=device,
        dtype=dtype,
        cache_dtype=kv_cache_dtype,
        batch=batch,
        memory=memory,
    )
    try:
        record = Session(options, Console(stderr=True)).run(output)
    except SessionError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    if plot_file is not None:
        _draw([row for row in record.rows if row["context"] == contexts[-1]], plot_file)


@app.command()
def merge(
    target: Annotated[Path, typer.Argument(help="Where to write.")],
    records: Annotated[list[Path], typer.Argument(help="Records; of rows of the same, the last one's count.")],
) -> None:
    """Put the rows of several records into one."""
    merged([_read(path) for path in records]).write(target)


@app.command()
def plot(
    record: Annotated[Path, typer.Argument(help="What run or merge wrote.")],
    folder: Annotated[Path, typer.Option(help="Where the plots go: one for each model, text and context.")],
) -> None:
    """Draw the decode policies of a record."""
    rows = _read(record).rows
    folder.mkdir(parents=True, exist_ok=True)
    for model, text, context in dict.fromkeys((row["model"], row["text"], row["context"]) for row in rows):
        # Tasks are many names.
        words = re.findall("[a-z0-9]+", f"{model} {'tasks' if ',' in text else text} {context}".lower())
        path = folder / f"fidelity-{'-'.join(words)}.svg"
        _draw([row for row in rows if (row["model"], row["text"], row["context"]) == (model, text, context)], path)


def parse_contexts(text: str) -> tuple[int, ...]:
    """Read lengths in tokens such as ``2k,7.5k`` (k is 1,024), ascending, each once.

    Raises:
        OptionError: one is not a whole number of tokens from 64 on.
    """
    contexts = set()
    for item in text.split(","):
        match = _CONTEXT.fullmatch(item.strip())
        tokens = 0.0 if match is None else float(match[1]) * (1024 if match[2] else 1)
        if tokens < _MIN_CONTEXT or tokens != int(tokens):
            raise OptionError("--context", f"{item!r} is not a number of tokens from {_MIN_CONTEXT} on, such as 7.5k")
        contexts.add(int(tokens))
    return tuple(sorted(contexts))


def parse_bits(text: str) -> tuple[int, ...]:
    """Read numbers of bits such as ``2,3,4``, ascending, each once.

    Raises:
        OptionError: one is none that low-bit keys can have.
    """
    # Imports torch.
    from winnow_kernels.indexes.key_codes import BITS  # noqa: PLC0415

    items = {item.strip() for item in text.split(",")}
    known = {str(bits): bits for bits in BITS}
    if unknown := sorted(items - known.keys()):
        raise OptionError("--bits", f"{unknown[0]!r} is none of {', '.join(known)}")
    return tuple(sorted(known[item] for item in items))


def main(arguments: Sequence[str]) -> None:
    """Run the program; ``run`` is what it does without a command."""
    given = list(arguments)
    app(given if given and given[0] in _COMMANDS else ["run", *given], prog_name="winnow fidelity")


def _read(path: Path) -> FidelityRecord:
    try:
        return FidelityRecord.read(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        draw(rows, path)
    except (ImportError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(path))


if __name__ == "__main__":
    main(sys.argv[1:])
