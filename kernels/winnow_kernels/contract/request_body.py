"""Where a request's body has its policies: at the top where clients write them, elsewhere where SGLang carries them.

SGLang ignores fields that it does not know. What it carries to its attention backend is ``custom_params``: among the
sampling parameters in its native form, at the top level in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from winnow_kernels.contract.fields import PolicyError

FIELD: Final = "attention"
CUSTOM: Final = "custom_params"
SAMPLING: Final = "sampling_params"


def with_policies(body: Mapping[str, Any], policies: str | Sequence[str], *, is_native: bool) -> dict[str, Any]:
    """Return ``body`` without ``attention``, and with its policies where SGLang carries them.

    Args:
        body: of a request.
        policies: JSON text of one for the whole request; of each of its prompts, which the native form alone can have.
        is_native: whether it is in SGLang's native form.

    Raises:
        PolicyError: the body names a policy there, too, or has something else there than SGLang expects.
    """
    placed = {name: value for name, value in body.items() if name != FIELD}
    if not is_native:
        assert isinstance(policies, str)
        return _with_custom_params(placed, "", policies)
    parameters = placed.get(SAMPLING)
    if not isinstance(policies, str) and not isinstance(parameters, list):
        parameters = [parameters] * len(policies)
    if not isinstance(parameters, list):
        assert isinstance(policies, str)
        return placed | {SAMPLING: _with_custom_params(parameters, SAMPLING, policies)}
    if isinstance(policies, str):
        policies = [policies] * len(parameters)
    if len(parameters) != len(policies):
        raise PolicyError(SAMPLING, f"{len(parameters)} values for {len(policies)} prompts")
    return placed | {
        SAMPLING: [
            _with_custom_params(each, f"{SAMPLING}.{index}", policy)
            for index, (each, policy) in enumerate(zip(parameters, policies, strict=True))
        ]
    }


def _with_custom_params(holder: object, path: str, policy: str) -> dict[str, Any]:
    """Return ``holder``, found at ``path``, with ``policy`` in its ``custom_params``."""
    known = _object(holder, path)
    path = f"{path}.{CUSTOM}".lstrip(".")
    custom = _object(known.get(CUSTOM), path)
    if FIELD in custom:
        raise PolicyError(FIELD, f"give this or {path}.{FIELD}, not both")
    return known | {CUSTOM: custom | {FIELD: policy}}


def _object(value: object, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PolicyError(path, "must be an object")
    return value
