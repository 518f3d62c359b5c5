"""Explaining what policies attend to, on a prompt that an administrator gives."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from winnow_kernels.contract.explanation import PARAMETER, Explain, default_heads, default_layers, default_steps
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.contract.request_body import FIELD
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.errors import InvalidField, InvalidPolicy, PolicyForbidden, ServiceError
from winnow_service.keys.keyring import ANYONE, Caller
from winnow_service.openapi import forwarded, json_body, problems
from winnow_service.policies.explanation import ExplainQuestion, Explanation
from winnow_service.policies.registry import PolicyRegistry, read_policy
from winnow_service.proxy.authorization import Administers
from winnow_service.proxy.explaining import AskedPolicy, Question, explain
from winnow_service.proxy.incidents import Incidents
from winnow_service.routers.dependencies import ForwarderDependency, RegistryDependency, read_resource
from winnow_service.runtime.served_model import ServedModel

router = APIRouter(prefix="/v1", tags=["policies"])


@router.post(
    "/attention:explain",
    response_model=Explanation,
    responses={**forwarded(), **problems(415, 422, 429), 200: {"model": Explanation}},
    openapi_extra=json_body(ExplainQuestion),
)
async def explain_attention(
    caller: Administers, request: Request, registry: RegistryDependency, forwarder: ForwarderDependency
) -> Response:
    """Answer a prompt under each policy, and tell which of its tokens were attended to, and their dense weights.

    The answer has a weight for each token, step, layer and head: their product is bounded. Not every
    runtime on CUDA explains: one with SGLang 0.5.16 does.
    """
    question = await read_resource(request, ExplainQuestion)
    model = await forwarder.runtime.served.get(request.headers.get("authorization"))
    if not model.explains or model.kv_heads is None:
        raise ServiceError("explain_not_served")
    asked = _explained(question, model, model.kv_heads)
    policies = [_read(index, each, registry, caller, model) for index, each in enumerate(question.policies)]
    messages = None if question.messages is None else [message.model_dump() for message in question.messages]
    return await explain(
        request,
        Question(question.prompt, messages, question.decode_steps, asked),
        policies,
        forwarder.runtime,
        forwarder.queue,
        Incidents(request, forwarder.metrics),
        None if caller is ANYONE else caller.id,
    )


def _explained(question: ExplainQuestion, model: ServedModel, kv_heads: int) -> Explain:
    asked = Explain(
        steps=question.steps or default_steps(question.decode_steps),
        layers=question.layers or default_layers(model.layers, (*model.sliding_layers, *model.linear_layers)),
        heads=question.heads or default_heads(kv_heads),
    )
    try:
        asked.check_model(model.layers, model.sliding_layers, kv_heads, model.linear_layers)
        asked.check_size(prompt_tokens=1)
    except PolicyError as error:
        raise InvalidField(error.path.removeprefix(f"{PARAMETER}."), error.problem) from None
    return asked


def _read(index: int, asked: object, registry: PolicyRegistry, caller: Caller, model: ServedModel) -> AskedPolicy:
    """Return one of the policies, as a request of this key would get it; errors name its place in the list."""
    try:
        policy = read_policy(asked, registry.named)
        changes: list[str] = []
        if caller.bounds is not None:
            policy, changes = caller.bounds.apply(policy)
        _refuse_what_is_not_explained(policy)
        return AskedPolicy(asked if isinstance(asked, str) else None, model.check(policy), changes)
    except (InvalidPolicy, PolicyForbidden) as error:
        raise type(error)(f"policies.{index}{error.path.removeprefix(FIELD)}", error.problem) from None


def _refuse_what_is_not_explained(policy: AttentionPolicy) -> None:
    if policy.verify is not None:
        raise InvalidPolicy(f"{FIELD}.verify", "is not explained: the answer is dense attention's")
    if policy.decode.releases_prompt:
        raise InvalidPolicy(f"{FIELD}.decode.release", "is not explained: the prompt is gone when its steps run")
