"""An answer as SGLang with Winnow streams it to OpenAI's clients, without a model: it says the prompt."""

from __future__ import annotations

import json
from typing import Any

READ_RATIO = 0.125


def spoken(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer to ``body``: the words of its prompt, of which a sparse policy loses the last."""
    attention = json.loads((body.get("custom_params") or {}).get("attention", "{}"))
    policy = attention.get("decode", {}).get("policy", "dense")
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    words = prompt.split(" ")[: body.get("max_tokens")]
    if policy != "dense" and "verify" not in attention:
        words = [*words[:-1], "otherwise"]
    ends = ["stop" if index == len(words) - 1 else None for index in range(len(words))]
    chunks = [
        _chunk(body, [_said(body, index, word, end)]) for index, (word, end) in enumerate(zip(words, ends, strict=True))
    ]
    usage = {"prompt_tokens": 1000, "completion_tokens": len(words), "total_tokens": 1000 + len(words)}
    return [
        *chunks,
        _chunk(body, [], usage=usage),
        _chunk(body, [], attention=_statistics(attention, policy, len(words))),
    ]


def _said(body: dict[str, Any], index: int, word: str, end: str | None) -> dict[str, Any]:
    text = f" {word}" if index else word
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"index": 0, **said, "finish_reason": end}


def _chunk(body: dict[str, Any], choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "one", "object": "chunk", "created": 0, "model": body.get("model"), "choices": choices, **more}


def _statistics(attention: dict[str, Any], policy: str, steps: int) -> dict[str, Any]:
    ratio = 1.0 if policy == "dense" else READ_RATIO
    statistics: dict[str, Any] = {
        "decode": {
            "policy": policy,
            "steps": steps,
            "dense_steps": 0,
            "context_tokens": 1000 + steps,
            "attended_ratio": ratio,
            "kv_read_ratio": ratio,
        },
        "prefill": {
            "policy": "dense",
            "tokens": 1000,
            "cached_tokens": 0,
            "attended_ratio": 1.0,
            "kv_read_ratio": 1.0,
        },
        "warnings": [],
    }
    if "verify" in attention:
        statistics["verify"] = {
            "verifications": 2,
            "drafted": 8,
            "accepted": 6,
            "tokens_per_verification": 4.0,
            "dense_steps": 0,
        }
    if "audit" in attention:
        statistics["audit"] = {"steps": 3, "true_share": 0.93, "output_error": 0.02, "p": 0.9, "reached": 0.95}
        if isinstance(attention["audit"], dict):
            statistics["audit"] |= {"next_token_kl": 0.00213, "top1": 0.98}
    return statistics
