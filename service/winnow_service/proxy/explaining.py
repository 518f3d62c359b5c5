"""Asking the runtime what policies attend to: one request for each, in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from pydantic_core import from_json, to_json

from winnow_kernels.contract.explanation import PARAMETER, Explain
from winnow_kernels.contract.request_body import FIELD
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.admission.queue import AdmissionQueue
from winnow_service.errors import InvalidField, RuntimeFailure
from winnow_service.proxy.client_leaving import unless_client_leaves
from winnow_service.proxy.headers import to_client, to_runtime
from winnow_service.proxy.incidents import Incidents
from winnow_service.runtime.client import RuntimeRequest
from winnow_service.runtime.prefix import prefix_of
from winnow_service.runtime.runtime import Runtime

_NATIVE: Final = "/generate"
_CHAT: Final = "/v1/chat/completions"
_EXPLANATION: Final = "explain"


@dataclass(frozen=True)
class AskedPolicy:
    """A policy that is to be explained.

    Attributes:
        name: under which it was asked for, if it was.
        policy: as the model runs it.
        warnings: of the key's bounds.
    """

    name: str | None
    policy: AttentionPolicy
    warnings: Sequence[str]


@dataclass(frozen=True)
class Question:
    """What is to be explained.

    Attributes:
        text: the prompt; None if it is messages.
        messages: of the conversation; None if it is a text.
        decode_steps: how many steps are decoded at most.
        asked: of each policy.
    """

    text: str | None
    messages: list[dict[str, str]] | None
    decode_steps: int
    asked: Explain

    def body(self, policy: AttentionPolicy, model: str | None) -> tuple[str, dict[str, Any]]:
        """Return where the runtime is asked, and what."""
        custom = {FIELD: policy.canonical(), PARAMETER: self.asked.model_dump_json()}
        # The first token comes from the prefill.
        tokens = self.decode_steps + 1
        if self.messages is None:
            parameters = {"temperature": 0, "max_new_tokens": tokens, "custom_params": custom}
            return _NATIVE, {"text": self.text, "sampling_params": parameters}
        named = {} if model is None else {"model": model}
        chat = {"messages": self.messages, "temperature": 0, "max_tokens": tokens, "custom_params": custom}
        return _CHAT, named | chat


async def explain(
    request: Request,
    question: Question,
    policies: Sequence[AskedPolicy],
    runtime: Runtime,
    queue: AdmissionQueue,
    incidents: Incidents,
    key_id: str | None,
) -> Response:
    """Return the explanation of each policy; or what the runtime says against one of them.

    Args:
        request: of the client, whose body has been read.
        question: what is explained of each.
        policies: one after the other.
        runtime: that is asked.
        queue: in which each of the requests waits for its turn.
        incidents: told what goes wrong.
        key_id: whose turns these are; None for nobody's.

    Raises:
        InvalidField: there is too much to explain of so long a prompt.
        ServiceError: the runtime has not answered.
    """

    async def answered() -> Response:
        prompt: Any = None
        explained = []
        for asked in policies:
            ticket = queue.join(key_id)
            try:
                await ticket.turn()
                answer = await _ask(request, question, asked.policy, runtime)
            finally:
                ticket.leave()
            if isinstance(answer, Response):
                return answer
            found = answer.pop(_EXPLANATION)
            prompt = found.pop("prompt")
            explained.append(_of_policy(asked) | found | {"statistics": answer})
        combinations = {"steps": question.asked.steps, "layers": question.asked.layers, "heads": question.asked.heads}
        content = to_json({"prompt": prompt, **combinations, "policies": explained}, inf_nan_mode="constants")
        return Response(content, media_type="application/json")

    with incidents.watched():
        return await unless_client_leaves(request.receive, answered())


def _of_policy(asked: AskedPolicy) -> dict[str, Any]:
    return {
        "policy": asked.name,
        "attention": from_json(asked.policy.canonical()),
        "fingerprint": asked.policy.fingerprint(),
        "warnings": [*asked.warnings, *asked.policy.warnings()],
    }


async def _ask(
    request: Request, question: Question, policy: AttentionPolicy, runtime: Runtime
) -> dict[str, Any] | Response:
    """Return the ``attention`` of the runtime's answer, with the explanation in it; or its refusal."""
    path, body = question.body(policy, runtime.monitor.model)
    outgoing = RuntimeRequest(
        method="POST",
        path=path,
        query=b"",
        headers=to_runtime(request.headers.raw),
        body=to_json(body),
        prefix=prefix_of(body),
    )
    call = runtime.begin()
    await call.send(outgoing)
    try:
        content = await call.read()
    finally:
        await call.close()
    try:
        answer: Any = from_json(content)
    except ValueError:
        answer = None
    if call.status != HTTPStatus.OK:
        _raise_if_too_long(answer)
        refusal = Response(content, status_code=call.status)
        refusal.raw_headers.extend(to_client(call.headers))
        return refusal
    holder = answer.get("meta_info", answer) if isinstance(answer, dict) else None
    attention = holder.get(FIELD) if isinstance(holder, dict) else None
    if not isinstance(attention, dict) or not isinstance(attention.get(_EXPLANATION), dict):
        raise RuntimeFailure("runtime_unusable", problem=f"its answer to {path} explains nothing")
    return attention


def _raise_if_too_long(answer: Any) -> None:
    """Raise what the runtime says of the explanation's size: it alone knows how many tokens a prompt has."""
    holder = answer.get("error", answer) if isinstance(answer, dict) else None
    message = holder.get("message") if isinstance(holder, dict) else None
    path, separator, problem = str(message).partition(": ")
    if separator and path.startswith(f"{PARAMETER}."):
        raise InvalidField(path.removeprefix(f"{PARAMETER}."), problem)
