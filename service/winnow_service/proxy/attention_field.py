"""The ``attention`` field of a request: reading its policies, and putting them where the runtime looks for them.

SGLang ignores fields that it does not know. What it carries to its attention backend is ``custom_params``: among the
sampling parameters in its native form, at the top level in the OpenAI forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.errors import InvalidPolicy, PolicyForbidden
from winnow_service.policies.registry import Named, read_policy
from winnow_service.proxy.body import Form

FIELD = "attention"
_CUSTOM = "custom_params"
_SAMPLING = "sampling_params"
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
    holders: Any = body.get(_SAMPLING) if form is Form.NATIVE else body
    for holder in holders if isinstance(holders, list) else [holders]:
        custom = holder.get(_CUSTOM) if isinstance(holder, Mapping) else None
        if isinstance(custom, Mapping) and name in custom:
            return True
    return False


def place_policies(body: Mapping[str, Any], form: Form, policies: Given) -> Any:
    """Return ``body`` with ``policies``, which were read from it, where the runtime looks for them.

    Raises:
        InvalidPolicy: the body names a policy there too, or has something else there than SGLang expects.
    """
    placed = {name: value for name, value in body.items() if name != FIELD}
    if form is not Form.NATIVE:
        assert not isinstance(policies, list)
        return _with_custom_params(placed, "", policies)
    parameters = placed.get(_SAMPLING)
    if isinstance(policies, list) and not isinstance(parameters, list):
        parameters = [parameters] * len(policies)
    if not isinstance(parameters, list):
        assert not isinstance(policies, list)
        return placed | {_SAMPLING: _with_custom_params(parameters, _SAMPLING, policies)}
    if not isinstance(policies, list):
        policies = [policies] * len(parameters)
    if len(parameters) != len(policies):
        raise InvalidPolicy(_SAMPLING, f"{len(parameters)} values for {len(policies)} prompts")
    return placed | {
        _SAMPLING: [
            _with_custom_params(each, f"{_SAMPLING}.{index}", policy)
            for index, (each, policy) in enumerate(zip(parameters, policies, strict=True))
        ]
    }


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


def _with_custom_params(holder: object, path: str, policy: AttentionPolicy) -> dict[str, Any]:
    """Return ``holder``, found at ``path``, with ``policy`` in its ``custom_params``."""
    known = _object(holder, path)
    path = f"{path}.{_CUSTOM}".lstrip(".")
    custom = _object(known.get(_CUSTOM), path)
    if FIELD in custom:
        raise InvalidPolicy(FIELD, f"give this or {path}.{FIELD}, not both")
    return known | {_CUSTOM: custom | {FIELD: policy.canonical()}}


def _object(value: object, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidPolicy(path, "must be an object")
    return value
