"""Which decode policies a server serves: on CUDA each takes memory, and time at start."""

from __future__ import annotations

import os

import torch

from winnow_kernels.policies.declarations import DECLARATIONS
from winnow_kernels.policies.registry import DECODE_POLICIES, INDEXED_BY_DEFAULT, PARAMETERS, POLICIES_SETTING


def served_policies(*, verifies: bool) -> tuple[str, ...]:
    """Return the policies that the environment names, with commas between; ``dense`` always.

    Without a name they are all on a CPU, where an index is made when a request needs it. On CUDA, where room for
    indexes is reserved at start, they are those that were faster than dense on a GPU and need no index, or one that the
    presets' policies need (``INDEXED_BY_DEFAULT``). Those for verified requests alone are among them where the server
    ``verifies`` drafts.

    Raises:
        ValueError: one of them is no decode policy.
    """
    names = os.environ.get(POLICIES_SETTING)
    if names is None:
        on_gpu = torch.cuda.is_available()
        return tuple(name for name in DECODE_POLICIES if not on_gpu or _is_served_by_default(name, verifies=verifies))
    given = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := sorted(given.difference(DECODE_POLICIES)):
        raise ValueError(
            f"{POLICIES_SETTING}: no decode policy is called {unknown[0]!r}; there are {', '.join(DECODE_POLICIES)}"
        )
    return tuple(name for name in DECODE_POLICIES if name in given | {"dense"})


def left_out_policies(*, verifies: bool) -> tuple[str, ...]:
    """Return the policies that are served only if the environment names them."""
    served = served_policies(verifies=verifies)
    return tuple(name for name in DECODE_POLICIES if name not in served and _has_use(name, verifies=verifies))


def _has_use(name: str, *, verifies: bool) -> bool:
    return verifies or not PARAMETERS["decode"][name].drafts_only


def _is_served_by_default(name: str, *, verifies: bool) -> bool:
    declared = DECLARATIONS[name]
    if not _has_use(name, verifies=verifies):
        return False
    return declared.pays_on_gpu and declared.index in {None, *(DECLARATIONS[each].index for each in INDEXED_BY_DEFAULT)}
