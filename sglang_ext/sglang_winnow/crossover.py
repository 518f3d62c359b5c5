"""From which context length on a policy is no slower than dense attention, on this machine.

The server's profile says it for the policies whose speed was measured on this very machine; for others, and for other
parameters, what the policy declares counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch

from sglang_winnow.machine import device_name
from sglang_winnow.profile_parts import Speed, TimedPolicy
from sglang_winnow.profile_settings import profile
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.contract.fields import Parameters
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import declaration_of

# For evaluations and tests of a policy itself: the same length for all policies, 0 for none.
ENVIRONMENT: Final = "WINNOW_CROSSOVER_TOKENS"


def crossover_tokens(policy: AttentionPolicy) -> int:
    """Return the longest context, in tokens, at which a decode step of ``policy`` runs dense.

    Raises:
        ValueError: the environment sets another length, and it is not a whole number from 0 on; or a profile that
            cannot be read.
    """
    if (of_all := of_all_policies()) is not None:
        return of_all
    measured = _measured()
    own = measured.get((policy.decode, policy.early_termination)) if measured else None
    return _declared(policy) if own is None else own


@cache
def of_all_policies() -> int | None:
    """Return the length that the environment sets for all policies; None if it sets none.

    Raises:
        ValueError: it sets what is no such length.
    """
    override = os.environ.get(ENVIRONMENT)
    if override is None:
        return None
    if not override.isdecimal():
        raise ValueError(f"{ENVIRONMENT}: must be a number of tokens from 0 on")
    return int(override)


@contextmanager
def acting_at_every_length() -> Iterator[None]:
    """Have the policies of this process act at every length, whatever its environment says."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = "0"
    of_all_policies.cache_clear()
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]
        if before is not None:
            os.environ[ENVIRONMENT] = before
        of_all_policies.cache_clear()


def measured_here() -> Speed | None:
    """Return the speed that the server's profile has; None if it has none, or it was measured on another machine.

    Raises:
        ValueError: the profile cannot be read.
    """
    found = profile()
    if found is None or found.speed is None:
        return None
    is_here = found.device == device_name() and found.speed.threads in (None, torch.get_num_threads())
    return found.speed if is_here else None


@cache
def _measured() -> Mapping[tuple[Parameters, EarlyTermination | None], int]:
    speed = measured_here()
    timed = () if speed is None else speed.policies
    return {(each.attention.decode, each.attention.early_termination): _dense_until(each) for each in timed}


def _dense_until(timed: TimedPolicy) -> int:
    """Return the longest context at which steps run dense by what was measured: just below what was faster.

    A policy that was slower at the longest length that was measured is not known to be faster beyond it.
    """
    if timed.faster_from is not None:
        return timed.faster_from - 1
    return max(timed.points[-1].length, _declared(timed.attention))


def _declared(policy: AttentionPolicy) -> int:
    crossover = declaration_of(policy.decode).crossover
    return crossover.cuda if torch.cuda.is_available() else crossover.cpu
