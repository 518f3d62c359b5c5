"""What the decode policies of the registry declare, and what follows: kinds, columns, selectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Final

from winnow_kernels.contract.fields import Parameters
from winnow_kernels.decode.declaration import Declaration
from winnow_kernels.decode.gpu_rows import Layout
from winnow_kernels.decode.gpu_selector import Selector, Server
from winnow_kernels.policies.registry import DECODE_POLICIES


def _declaration(name: str) -> Declaration[Any]:
    declared: Declaration[Any] = import_module(f"winnow_kernels.policies.{name}.declaration").DECLARATION
    return declared


DECLARATIONS: Final[Mapping[str, Declaration[Any]]] = {name: _declaration(name) for name in DECODE_POLICIES}
"""By the policies' names; ``DECLARATION`` in ``policies/<name>/declaration.py``."""
LAYOUT: Final = Layout({declared.kind: declared.columns for declared in DECLARATIONS.values()})
"""Of rows on a GPU."""
DENSE_KIND: Final = DECLARATIONS["dense"].kind
KINDS: Final = tuple(kind for kind in LAYOUT.kinds if kind != DENSE_KIND)
"""The kinds that select, in the order of the registry: StreamingLLM, whose selection is that of all layers, first."""


def declaration_of(parameters: Parameters) -> Declaration[Any]:
    """Return the declaration of the policy with these parameters."""
    return DECLARATIONS[type(parameters).model_fields["policy"].default]


def kinds_of(policies: Collection[str]) -> frozenset[str]:
    """Return the kinds of some decode policies, besides dense."""
    return frozenset(DECLARATIONS[name].kind for name in policies) - {DENSE_KIND}


def in_order(kinds: Collection[str]) -> list[str]:
    """Return kinds in the order in which their selectors are launched."""
    return [kind for kind in KINDS if kind in kinds]


def selectors_of(kinds: Collection[str], server: Server) -> dict[str, Selector]:
    """Return a server's selectors of ``kinds``."""
    return {kind: DECLARATIONS[kind].selector(server) for kind in in_order(kinds)}
