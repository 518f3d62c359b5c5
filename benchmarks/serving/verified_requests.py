"""Verified answers to requests with penalties, biases, grammars and stop strings, beside dense ones of the same server.

    python -m benchmarks.serving.verified_requests ~/.cache/winnow/models/smollm2-32k --output verified-requests.json

Each request is answered greedily: densely one at a time, densely all at once, and verified with each policy. In 16 bits
a dense answer in another batch differs, too, where two tokens are about as probable: verified ones are to differ no
more. Where an answer parts from the dense one, log-probabilities tell by how much the dense token leads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import httpx
import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.cpu.verification import prompts_of
from benchmarks.folders import RESULTS
from benchmarks.records import Record, Row, header_from_outside
from benchmarks.serving.serve import kinds_asked, parse_contestant
from benchmarks.serving.tables import requests_markdown
from benchmarks.serving.tp_equality import equal_tokens
from sglang_winnow.backend_name import NAME
from sglang_winnow.crossover import ENVIRONMENT
from tests.runtime import runtime_server
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.contract.verification import ALGORITHM
from winnow_kernels.policies.registry import POLICIES_SETTING

BENCH: Final = "verified requests"
TOGETHER: Final = "dense, all at once"
JSON_OBJECT: Final = "JSON schema"
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 3, "maxItems": 5},
        "count": {"type": "integer"},
    },
    "required": ["title", "words", "count"],
    "additionalProperties": False,
}
REQUESTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tokens alone": {"ignore_eos": True},
        "frequency and presence penalty": {"ignore_eos": True, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        "repetition penalty": {"ignore_eos": True, "repetition_penalty": 1.3},
        "logit bias": {"ignore_eos": True, "logit_bias": {"253": 4.0, "282": -100.0}},
        "least number of tokens": {"min_new_tokens": 48},
        "stop string": {"stop": [" the"]},
        "regular expression": {"regex": r"([a-z]{2,9} ){20}\."},
        JSON_OBJECT: {"json_schema": json.dumps(_SCHEMA)},
    }
)
"""Sampling parameters, by what they are called in tables."""
_DEFAULT: Final = (
    'lowbit_top_k 512, 4 drafts={"decode": {"policy": "lowbit_top_k", "budget": 512}, "verify": {"draft_tokens": 4}}',
    'lowbit_top_k 512, auto={"decode": {"policy": "lowbit_top_k", "budget": 512}, "verify": {"draft_tokens": "auto"}}',
    'verified_pages 1,024, 4 drafts={"decode": {"policy": "verified_pages", "budget": 1024}, "verify": {}}',
    'streaming_llm 512, 4 drafts={"decode": {"policy": "streaming_llm", "window": 508}, "verify": {}}',
)
# Log-probabilities of as many tokens are told of each place.
_TOLD: Final = 5
_SPARE_TOKENS: Final = 256
_TIMEOUT_SECONDS: Final = 300

console = Console(width=150)


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model to serve.")],
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 6000,
    tokens: Annotated[int, typer.Option(min=48, help="Tokens of an answer, at most.")] = 96,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of each kind of text.")] = 4,
    policy: Annotated[list[str] | None, typer.Option(help="NAME=JSON of the request's attention.")] = None,
    server_argument: Annotated[list[str] | None, typer.Option(help="One more; may be repeated.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "verified-requests.json",
) -> None:
    """Ask, print a table, write JSON after each kind of request."""
    offline = OfflineModel(model, torch.device("cpu"))
    found = [
        list(own.tokens) for kind in ("prose", "code") for own in prompts_of(offline, kind, context, tokens, prompts)
    ]
    contestants = [parse_contestant(each) for each in policy or _DEFAULT]
    arguments = ["--attention-backend", NAME, "--speculative-algorithm", ALGORITHM]
    arguments += ["--max-total-tokens", str((context + tokens + _SPARE_TOKENS) * len(found))]
    arguments += ["--max-running-requests", str(len(found)), "--grammar-backend", "llguidance"]
    environment = {POLICIES_SETTING: ",".join(kinds_asked(contestants)), ENVIRONMENT: "0"}
    about = header_from_outside() | {"tokens": tokens, "texts": ["prose", "code"]}
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        runtime_server(model, *arguments, *(server_argument or []), log=Path(folder) / "log", **environment) as runtime,
        httpx.Client(base_url=runtime.url, timeout=_TIMEOUT_SECONDS) as http,
    ):
        # Prompts are in the cache when answers are compared.
        _ask(http, found, tokens, {}, None, at_once=1)
        for request, sampling in REQUESTS.items():
            dense = _ask(http, found, tokens, sampling, None, at_once=1)
            answers = {TOGETHER: _ask(http, found, tokens, sampling, None, at_once=len(found))}
            for contestant in contestants:
                answers[contestant.name] = _ask(http, found, tokens, sampling, contestant.policy, at_once=1)
                both = f"{contestant.name}, all at once"
                answers[both] = _ask(http, found, tokens, sampling, contestant.policy, at_once=len(found))
            rows += [row_of(request, name, own, dense, offline.name, context) for name, own in answers.items()]
            Record(about, rows).write(output)
    console.print(Markdown(requests_markdown(rows)))


def row_of(request: str, name: str, answers: Sequence[Any], dense: Sequence[Any], model: str, context: int) -> Row:
    """Return how far answers of SGLang's ``/generate``, with log-probabilities, are those of dense attention."""
    pairs = list(zip(answers, dense, strict=True))
    leads, errors = [], []
    for own, other in pairs:
        shorter = min(len(own["output_ids"]), len(other["output_ids"]))
        alike = equal_tokens(own["output_ids"][:shorter], other["output_ids"][:shorter])
        errors += [abs(a[0] - b[0]) for a, b in zip(_told(own)[:alike], _told(other)[:alike], strict=True)]
        if own["output_ids"] != other["output_ids"]:
            leads.append(_lead(own, other, alike))
    checks = [cost for own in answers if (cost := own["meta_info"].get("attention", {}).get("verify"))]
    verifications = sum(cost["verifications"] for cost in checks)
    return Row(
        bench=BENCH,
        model=model,
        policy=name,
        parameters={
            "request": request,
            "tokens_per_check": 1 + sum(cost["accepted"] for cost in checks) / verifications if verifications else None,
            "equal_answers": sum(own["output_ids"] == other["output_ids"] for own, other in pairs),
            "leads": leads,
            "largest_error": max(errors, default=0.0),
            "objects": sum(map(_is_object, answers)) if request == JSON_OBJECT else None,
        },
        context=context,
        batch=len(pairs),
        dense=None,
        measured=float(sum(len(own["output_ids"]) for own in answers)),
        unit="tokens",
        speedup=None,
        floor_ratio=None,
    )


def _lead(own: Any, dense: Any, place: int) -> float | None:
    """Return by how much dense attention prefers its token at ``place``; None if it does not tell of the other one."""
    if place >= min(len(own["output_ids"]), len(dense["output_ids"])):
        return None
    told = {token: value for value, token, *_ in dense["meta_info"]["output_top_logprobs"][place]}
    other = told.get(own["output_ids"][place])
    return None if other is None else float(_told(dense)[place][0] - other)


def _told(answer: Any) -> Sequence[Any]:
    told: Sequence[Any] = answer["meta_info"]["output_token_logprobs"]
    return told


def _is_object(answer: Any) -> bool:
    """Return whether an answer is an object of the schema, or the beginning of one that had no room."""
    if answer["meta_info"]["finish_reason"]["type"] == "length":
        return bool(answer["text"].lstrip().startswith("{"))
    try:
        value = json.loads(answer["text"])
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == _SCHEMA["properties"].keys() and isinstance(value["count"], int)


def _ask(
    http: httpx.Client,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Mapping[str, Any],
    attention: Mapping[str, Any] | None,
    *,
    at_once: int,
) -> list[Any]:
    def ask(prompt: Sequence[int]) -> Any:
        parameters = {"temperature": 0, "max_new_tokens": tokens, **sampling}
        if attention is not None:
            parameters["custom_params"] = {"attention": json.dumps(attention)}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
        answer = http.post("/generate", json=body | {"top_logprobs_num": _TOLD, "logprob_start_len": -1})
        return answer.raise_for_status().json()

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts))


if __name__ == "__main__":
    typer.run(main)
