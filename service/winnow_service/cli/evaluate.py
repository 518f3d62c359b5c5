"""``winnow eval``: long-context accuracy and speed of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from winnow_evaluation.environment import checkout_commit, installed_versions
from winnow_evaluation.options import OptionError, check_output, parse_lengths, parse_tasks, task_groups
from winnow_evaluation.over_http.answers import RequestError
from winnow_evaluation.over_http.policies import parse_policies
from winnow_evaluation.over_http.progress import ConsoleProgress
from winnow_evaluation.over_http.report import CellRow, Header, Report, SampleRecord, print_results
from winnow_evaluation.over_http.requests import Api
from winnow_evaluation.over_http.runner import Plan, run_plan
from winnow_evaluation.tasks.generation import Catalogue, SampleGenerator, builtin_tasks
from winnow_evaluation.tasks.sample import Task
from winnow_evaluation.tasks.scoring import PAIRED_INTERVAL
from winnow_evaluation.tasks.wording import Wording, reading_text, ruler_catalogue
from winnow_evaluation.text import TextError, text_folder
from winnow_evaluation.text.documents import collection
from winnow_service.cli.terminal import console_of_width

if TYPE_CHECKING:
    from winnow_evaluation.over_http.client import OpenAIClient

# Wide enough for the table with all its columns, where there is no terminal to fit it to.
_PLAIN_WIDTH = 400
# Token counts go to the server beside the requests that are measured, never at the same time.
_SPARE_CONNECTIONS = 8
_INTERRUPTED = 130


def evaluate(
    url: Annotated[
        str, typer.Option(help="Address of an OpenAI-compatible server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask.", show_default="the first that /v1/models lists")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="WINNOW_API_KEY", show_envvar=True, help="Sent as bearer token.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks or groups such as 'niah' or 'all'; --list prints them.")
    ] = "all",
    wording: Annotated[
        Wording,
        typer.Option(
            help="Winnow's own prompts, or RULER's with the beginning of the answer given; those that hide something "
            "in real text need 'winnow text collect'."
        ),
    ] = Wording.WINNOW,
    list_tasks: Annotated[bool, typer.Option("--list", help="Print the tasks and groups, and exit.")] = False,
    lengths: Annotated[
        str,
        typer.Option(help="Comma-separated lengths such as 4096,16k in tokens: whole prompt and answer. k is 1,024."),
    ] = "4096",
    samples: Annotated[int, typer.Option(min=1, max=100_000, help="Samples for each task and length.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same prompts, whatever the policy.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests under way at once.")] = 8,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="[NAME=]POLICY",
            help="Sparse attention policy, in JSON or the name of one; sent as the request's 'attention'. Give it "
            "several times to ask every sample with each, the others compared with the first.",
        ),
    ] = None,
    policies: Annotated[
        Path | None, typer.Option(dir_okay=False, help="More policies: a file with a JSON object of policies by name.")
    ] = None,
    api: Annotated[
        Api,
        typer.Option(
            help="Which OpenAI form to ask. 'tokens' sends chat prompts as ids, tokenized once by SGLang's "
            "/v1/tokenize: with many policies most of the time goes into tokenizing."
        ),
    ] = Api.CHAT,
    hardware: Annotated[
        str | None, typer.Option(help="What the server runs on, for the record.", show_default="as the server says")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one request.")] = 600.0,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write all results and samples to this file in JSON.")
    ] = None,
) -> None:
    """Measure long-context accuracy and speed of any OpenAI-compatible server.

    Accuracy is the mean fraction of the expected strings that occur in the answers, as in RULER. Exits with 1 if any
    request failed, or if no task fits its length.
    """
    catalogue: Catalogue = builtin_tasks if wording is Wording.WINNOW else partial(ruler_catalogue, text_folder())
    names = tuple(catalogue())
    if list_tasks:
        _print_tasks(catalogue())
        return
    try:
        plan = Plan(
            tasks=parse_tasks(tasks, names),
            lengths=parse_lengths(lengths),
            samples=samples,
            seed=seed,
            concurrency=concurrency,
            policies=parse_policies(policy or (), policies),
            answers_given=wording is Wording.RULER,
        )
        text = _text_read(plan.tasks) if wording is Wording.RULER else None
        if output is not None:
            check_output(output)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error

    options: dict[str, Any] = {
        "wording": wording.value,
        "text": text,
        "tasks": list(plan.tasks),
        "lengths": list(plan.lengths),
        "samples": samples,
        "concurrency": concurrency,
        "policies": {asked.label: asked.attention for asked in plan.policies if asked.label is not None},
        "api": api.value,
        "timeout": timeout,
    }
    about = {
        "versions": installed_versions(),
        "commit": checkout_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "options": options,
        "difference_interval": PAIRED_INTERVAL if len(plan.policies) > 1 else None,
    }
    evaluation = _Evaluation(plan, about, hardware, output)
    # Imports the OpenAI SDK, which takes half a second: no other command is to wait for it.
    from winnow_evaluation.over_http.client import OpenAIClient  # noqa: PLC0415

    client = OpenAIClient(
        url, model=model, api=api, api_key=api_key, timeout=timeout, connections=concurrency + _SPARE_CONNECTIONS
    )
    failure = None
    try:
        with SampleGenerator(catalogue) as generator:
            asyncio.run(evaluation.run(client, generator))
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    except RequestError as error:
        failure = typer.Exit(1)
        Console(stderr=True).print(f"Error: {error}", style="bold red", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        failure = typer.Exit(_INTERRUPTED)
        Console(stderr=True).print("Interrupted: the results below are those of the finished cells.", style="yellow")
    if evaluation.report is not None and evaluation.report.rows:
        print_results(console_of_width(_PLAIN_WIDTH), evaluation.report)
    if failure is not None:
        raise failure
    if evaluation.failed:
        raise typer.Exit(1)


@dataclass
class _Evaluation:
    """An evaluation under way, and its report as far as it has come; ``about`` is what its header has anyway."""

    plan: Plan
    about: dict[str, Any]
    hardware: str | None
    output: Path | None
    report: Report | None = None

    @property
    def failed(self) -> bool:
        """Whether a request failed, or nothing could be measured."""
        rows = self.report.rows if self.report is not None else ()
        return any(row.errors for row in rows) or not any(row.status == "measured" for row in rows)

    async def run(self, client: OpenAIClient, generator: SampleGenerator) -> None:
        """Run the plan, and write the report anew after every cell.

        Raises:
            OptionError: a length is longer than the model's context.
            RequestError: the server cannot be used.
        """
        plan = self.plan
        async with client:
            model = await client.select_model()
            longest = plan.lengths[-1]
            if model.max_tokens is not None and longest > model.max_tokens:
                raise OptionError(
                    "--lengths", f"{longest} is more than the context of {model.name}, {model.max_tokens} tokens"
                )
            facts = await client.facts()
            served = {"url": client.url, "model": model.name, "model_max_tokens": model.max_tokens}
            served |= {"device": self.hardware or facts.device, "server_version": facts.version}
            rows: list[CellRow] = []
            records: list[SampleRecord] = []
            with ConsoleProgress(Console(stderr=True), plan) as progress:
                async for cell in run_plan(plan, client, generator, progress):
                    rows += cell.rows
                    records += cell.records
                    complete = len(rows) == len(plan.tasks) * len(plan.lengths) * len(plan.policies)
                    header = Header(**self.about, **served, complete=complete)
                    self.report = Report(header=header, rows=tuple(rows), samples=tuple(records))
                    if self.output is not None:
                        self.report.write(self.output)


def _text_read(tasks: tuple[str, ...]) -> str | None:
    """What identifies the collected text that some of RULER's tasks read; None if none of them does.

    Raises:
        OptionError: there is no such text.
    """
    readers = reading_text(tasks)
    if not readers:
        return None
    try:
        digest: str = collection(text_folder())["sha256"]
    except TextError as error:
        raise OptionError("--wording", f"{', '.join(readers)} hide needles in real text, but {error}") from error
    return digest


def _print_tasks(tasks: Mapping[str, Task]) -> None:
    width = max(map(len, tasks))
    for name, task in tasks.items():
        typer.echo(f"{name:{width}}  {task.summary}")
    typer.echo("\nGroups:")
    for name, members in task_groups(tuple(tasks)).items():
        typer.echo(f"{name:{width}}  {', '.join(members)}")
