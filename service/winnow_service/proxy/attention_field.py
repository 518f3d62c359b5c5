"""The ``attention`` field of a request: reading its policies, and putting them where the runtime looks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.contract.request_body import CUSTOM, FIELD, SAMPLING, with_policies
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.errors import InvalidPolicy, PolicyForbidden
from winnow_service.policies.registry import Named, read_policy
from winnow_service.proxy.body import Form

# How many lists open before the first element of a single prompt; a batch has one more.
_PROMPT_DEPTH = {"text": 0, "input_ids": 1}

# One policy for the whole request, or one for each of its prompts.
Given = AttentionPolicy | list[AttentionPolicy]
# None if it asks for none.
Policies = Given | None


def read_policies(body: Mapping[str, Any], form: Form, named: Named) -> Policies:
    """Return what ``body`` asks for, with names replaced by what they stand for now.

    Raises:
        InvalidPolicy: what it asks for cannot be served, whatever the model.
    """
    asked = body.get(FIELD)
    if asked is None:
        return None
    if form is not Form.NATIVE or not isinstance(asked, list):
        return read_policy(asked, named)
    prompts = _batch_size(body)
    if prompts is None:
        raise InvalidPolicy(FIELD, "a list is for a list of prompts")
    if len(asked) != prompts:
        raise InvalidPolicy(FIELD, f"{len(asked)} policies for {prompts} prompts")
    return each_policy(asked, lambda item: read_policy(item, named))


def is_custom_param(name: str, body: Mapping[str, Any], form: Form) -> bool:
    """Whether ``body`` has something of that name among the ``custom_params``, where the runtime looks for it."""
    holders: Any = body.get(SAMPLING) if form is Form.NATIVE else body
    for holder in holders if isinstance(holders, list) else [holders]:
        custom = holder.get(CUSTOM) if isinstance(holder, Mapping) else None
        if isinstance(custom, Mapping) and name in custom:
            return True
    return False


def place_policies(body: Mapping[str, Any], form: Form, policies: Given) -> Any:
    """Return ``body`` with ``policies``, which were read from it, where the runtime looks for them.

    Raises:
        InvalidPolicy: the body names a policy there too, or has something else there than SGLang expects.
    """
    texts = [each.canonical() for each in policies] if isinstance(policies, list) else policies.canonical()
    try:
        return with_policies(body, texts, is_native=form is Form.NATIVE)
    except PolicyError as error:
        raise InvalidPolicy(error.path, error.problem) from None


def each_policy(items: Sequence[Any], read: Callable[[Any], AttentionPolicy]) -> list[AttentionPolicy]:
    """Return ``read`` of each of a list of policies; what it raises names the place in the list."""
    policies = []
    for index, item in enumerate(items):
        try:
            policies.append(read(item))
        except (InvalidPolicy, PolicyForbidden) as error:
            raise type(error)(f"{FIELD}.{index}{error.path.removeprefix(FIELD)}", error.problem) from None
    return policies


def _batch_size(body: Mapping[str, Any]) -> int | None:
    for name, depth in _PROMPT_DEPTH.items():
        prompts = body.get(name)
        if isinstance(prompts, list) and _depth(prompts) > depth:
            return len(prompts)
    return None


def _depth(value: object) -> int:
    depth = 0
    while isinstance(value, list):
        depth += 1
        value = value[0] if value else None
    return depth
