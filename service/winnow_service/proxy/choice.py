"""Which policies a request gets: those it asks for or a default, within the bounds of its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winnow_kernels.contract.explanation import PARAMETER as EXPLAIN
from winnow_kernels.contract.request_body import FIELD
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.errors import InvalidField, PolicyForbidden
from winnow_service.keys.keyring import Caller
from winnow_service.policies.bounds import Bounds
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.proxy.attention_field import Policies, each_policy, is_custom_param, read_policies
from winnow_service.proxy.body import Form

_DENSE = AttentionPolicy()


@dataclass(frozen=True)
class Choice:
    """The policies of one request.

    Attributes:
        policies: None for what the runtime does when it is asked for nothing: dense attention.
        name: under which they were asked for, or are a default; None if the request has them itself.
        warnings: what the bounds have changed.
    """

    policies: Policies
    name: str | None = None
    warnings: tuple[str, ...] = ()


def choose(body: Mapping[str, Any], form: Form, registry: PolicyRegistry, caller: Caller) -> Choice:
    """Return the policies that the request with this ``body`` gets. The default of its key goes before the model's.

    Raises:
        InvalidPolicy: what it asks for, or the default, cannot be served, whatever the model.
        PolicyForbidden: the bounds do not allow it.
        InvalidField: it asks to be explained, which takes time and memory: administrators alone have a route for that.
    """
    if is_custom_param(EXPLAIN, body, form):
        raise InvalidField(f"custom_params.{EXPLAIN}", "must be absent: ask POST /v1/attention:explain")
    policies = read_policies(body, form, registry.named)
    asked = body.get(FIELD)
    name = asked if isinstance(asked, str) else None
    if is_custom_param(FIELD, body, form):
        if caller.bounds is not None:
            raise PolicyForbidden("custom_params.attention", "must be absent: give it as attention")
    elif policies is None:
        name = caller.default_policy or registry.default_for(body.get("model"))
        policies = None if name is None else registry.named(name)
    return Choice(policies, name) if caller.bounds is None else _within(caller.bounds, policies, name)


def _within(bounds: Bounds, policies: Policies, name: str | None) -> Choice:
    warnings: list[str] = []

    def bounded(policy: AttentionPolicy) -> AttentionPolicy:
        policy, changes = bounds.apply(policy)
        warnings.extend(change for change in changes if change not in warnings)
        return policy

    if policies is None:
        bounded(_DENSE)
        return Choice(None)
    within = each_policy(policies, bounded) if isinstance(policies, list) else bounded(policies)
    return Choice(within, name, tuple(warnings))
