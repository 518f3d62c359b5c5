"""Whether a server audits, and which share of a request's decode steps: by its own word, or else by the server's."""

from __future__ import annotations

import os
import zlib
from functools import cache
from typing import Final

from winnow_kernels.contract.fields import Parameters
from winnow_kernels.policies.attention_policy import AttentionPolicy

# The share of decode steps that is audited of requests that do not say.
ENVIRONMENT: Final = "WINNOW_AUDIT"


@cache
def server_share() -> float:
    """Return the share of decode steps that the server audits by default.

    Raises:
        ValueError: the environment sets what is no share.
    """
    text = os.environ.get(ENVIRONMENT, "0")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{ENVIRONMENT}: must be a share of decode steps from 0 to 1; it is {text}")
    return share


def audits_on(device: str) -> bool:
    """Return whether a server on a ``device`` audits.

    On a GPU audited steps have graphs of their own, which are captured where the environment sets a share, though it
    be 0: then requests ask.
    """
    return device == "cpu" or ENVIRONMENT in os.environ


def audited_share(policy: AttentionPolicy) -> float:
    """Return the share of a request's decode steps that is audited.

    It is 0 of what dense attention answers, and of a prompt that is released: dense attention has nothing to read.
    """
    if policy.answers_densely or policy.decode.releases_prompt:
        return 0.0
    return server_share() if policy.audit_share is None else policy.audit_share


def first_offset(request_id: str) -> int:
    """Return the ``audit_offset`` that a request begins with, so that short answers are audited, too.

    It is the same on all ranks.
    """
    return zlib.crc32(request_id.encode())


def promised_share(parameters: Parameters) -> float | None:
    """Return the share of the attention that a decode policy promises each query head; None if it promises none."""
    share = getattr(parameters, "p", None)
    return share if isinstance(share, float) else None
