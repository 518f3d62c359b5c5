"""The ``winnow`` program: its commands, each in a module of its own."""

from __future__ import annotations

import typer

from winnow_service.cli import (
    bench,
    calibrate,
    doctor,
    down,
    evaluate,
    explain,
    fidelity,
    keys,
    models,
    sample,
    serve,
    text,
    up,
)
from winnow_service.cli.terminal import PASSED_ON

app = typer.Typer(
    name="winnow",
    help="Per-request adaptive sparse attention for SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("up")(up.up)
app.command("down")(down.down)
app.command("serve")(serve.serve)
app.command("eval")(evaluate.evaluate)
app.command("fidelity", context_settings=PASSED_ON, add_help_option=False)(fidelity.fidelity)
app.command("explain")(explain.explain)
app.command("sample")(sample.sample)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(keys.app, name="keys")
app.add_typer(bench.app, name="bench")
app.add_typer(text.app, name="text")
