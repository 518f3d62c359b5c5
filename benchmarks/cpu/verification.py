"""What verified answers come to, one at a time: tokens a check, what is read, whether they are dense attention's.

    python -m benchmarks.cpu.verification ~/.cache/winnow/models/smollm2 --output verification.json

Prompts are cut out of real text, as for ``winnow fidelity``, or are a task's of ``winnow eval``. Each is answered by
dense attention, and then with every policy, greedily: the server drafts with it and checks. All answers must be the
dense one's, as far as dense attention gives the same in a batch: that is told beside. The policies act at every length,
and find the prompt in the cache.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.cpu.verification_figures import Answer, markdown
from benchmarks.generate_stream import GenerateClient, WholeAnswer, request_body
from benchmarks.records import header_from_outside
from sglang_winnow.backend_name import NAME
from sglang_winnow.crossover import ENVIRONMENT
from tests.runtime import runtime_server
from winnow_evaluation.fidelity.prompts import Continued, from_documents, from_tasks
from winnow_evaluation.machine import surroundings
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.options import parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text.documents import KINDS, load_text
from winnow_evaluation.writing import write_json
from winnow_kernels.contract.verification import ALGORITHM
from winnow_kernels.policies.registry import POLICIES_SETTING

POLICIES: Final[tuple[Mapping[str, Any], ...]] = (
    {"policy": "lowbit_top_k", "budget": 128},
    {"policy": "lowbit_top_k", "budget": 256},
    {"policy": "lowbit_top_k", "budget": 512},
    {"policy": "lowbit_top_k", "budget": 1024},
    {"policy": "lowbit_top_p", "p": 0.8},
    {"policy": "lowbit_top_p", "p": 0.9},
    {"policy": "quoka", "budget": 512},
    {"policy": "tactic", "p": 0.9},
    {"policy": "quest", "budget": 1024},
    {"policy": "delta", "budget": 1024},
    {"policy": "snapkv", "budget": 1024},
    {"policy": "streaming_llm", "window": 1020},
    {"policy": "verified_pages", "budget": 512},
    {"policy": "verified_pages", "budget": 1024},
)
console = Console(width=150)


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model to serve.")],
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 7680,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind of text.")] = 2,
    text: Annotated[str, typer.Option(help="Kinds of text, or names of tasks, with commas between.")] = ",".join(KINDS),
    drafts: Annotated[str, typer.Option(help="Tokens drafted for a check, with commas between.")] = "4,8,auto",
    policy: Annotated[
        list[str] | None, typer.Option(help="JSON of a decode policy; all kinds if none is given.")
    ] = None,
    server_argument: Annotated[list[str] | None, typer.Option(help="One more; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON, after each policy.")] = None,
) -> None:
    """Measure, print a table, write JSON. Exit with 1 if an answer is not dense attention's."""
    policies = [json.loads(text) for text in policy] if policy else POLICIES
    lengths: list[int | str] = [int(number) if number.isdecimal() else number for number in drafts.split(",")]
    offline = OfflineModel(model, torch.device("cpu"))
    kinds = parse_tasks(text, (*KINDS, *TASKS))
    texts = {kind: prompts_of(offline, kind, context, tokens, prompts) for kind in kinds}
    record = _surroundings() | {"model": offline.name, "context": context, "tokens": tokens, "answers": []}
    arguments = ["--attention-backend", NAME, "--speculative-algorithm", ALGORITHM]
    arguments += ["--max-total-tokens", str((context + tokens + 64) * prompts * len(kinds) + 4096)]
    arguments += server_argument or []
    environment = {ENVIRONMENT: "0", POLICIES_SETTING: ",".join(sorted({decode["policy"] for decode in policies}))}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            runtime_server(model, *arguments, log=log, **environment) as runtime,
            GenerateClient(runtime.url, prompts * len(kinds)) as server,
        ):
            prompted = [(kind, number, own.tokens) for kind, of in texts.items() for number, own in enumerate(of)]
            for _, _, prompt in prompted:
                _ask(server, prompt, 2, None)
            record["dense_equal"] = _equal_in_a_batch(server, [prompt for _, _, prompt in prompted], tokens)
            for decode in policies:
                for length in lengths:
                    attention = {"decode": decode, "verify": {"draft_tokens": length}}
                    for kind, number, prompt in prompted:
                        # In turns, so that whatever else the machine does slows both down.
                        dense = _ask(server, prompt, tokens, None)
                        found = _ask(server, prompt, tokens, attention)
                        equal, faster = found.tokens == dense.tokens, dense.seconds / found.seconds
                        answer = Answer.of(kind, number, decode, length, equal, faster, found.attention)
                        record["answers"].append(asdict(answer))
                if output:
                    write_json(output, record)
                console.print(Markdown(markdown(record)))
    if not all(answer["equal"] for answer in record["answers"]):
        raise typer.Exit(1)


def prompts_of(model: OfflineModel, kind: str, context: int, tokens: int, count: int) -> list[Continued]:
    """Return ``count`` prompts of ``context`` tokens, of a kind of text or a task, with the ``tokens`` behind them."""
    if kind in TASKS:
        return from_tasks(model, [kind], context, tokens, count, seed=0)
    [of_text] = [known for known in KINDS if known == kind]
    return from_documents(model, [document.text for document in load_text("test", of_text)], context, tokens, count)


def _surroundings() -> dict[str, Any]:
    # A machine with a GPU serves on it.
    return header_from_outside() if torch.cuda.is_available() else surroundings()


def _equal_in_a_batch(server: GenerateClient, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Return how many dense answers are the same to all prompts at once as to one at a time."""
    alone = [_ask(server, prompt, tokens, None).tokens for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = pool.map(lambda prompt: _ask(server, prompt, tokens, None).tokens, prompts)
        return sum(list(own) == list(other) for own, other in zip(alone, together, strict=True))


def _ask(
    server: GenerateClient, prompt: Sequence[int], tokens: int, attention: Mapping[str, Any] | None
) -> WholeAnswer:
    return server.answer(json.dumps(request_body(prompt, tokens, attention)))


if __name__ == "__main__":
    typer.run(main)
