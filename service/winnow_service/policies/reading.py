"""Reading a policy that a client gives, or names."""

from __future__ import annotations

import json
from collections.abc import Callable

from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_service.errors import InvalidPolicy

# Returns the policy of a name, or raises InvalidPolicy.
Named = Callable[[str], AttentionPolicy]


def read_policy(asked: object, named: Named) -> AttentionPolicy:
    """Return the policy that a request gives, or names.

    Raises:
        InvalidPolicy: it cannot be served, or there is none of that name.
    """
    if isinstance(asked, str):
        return named(asked)
    try:
        return parse_policy(asked if isinstance(asked, dict) else json.dumps(asked))
    except PolicyError as error:
        raise InvalidPolicy(error.path, error.problem) from None
