"""The policies that an evaluation compares, and what its results call them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from winnow_evaluation.options import OptionError, parse_policy
from winnow_kernels.contract.attention_statistics import section

Attention = Mapping[str, Any] | str
"""What a request carries as ``attention``: a policy, or the name of one that the server knows."""

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+%/(),-]{0,63}")
_LABEL_RULE = "1 to 64 letters, digits, spaces and '._+%/(),-', a letter or digit first"


@dataclass(frozen=True)
class AskedPolicy:
    """One policy of an evaluation: its label in the results, and the requests' ``attention``.

    Both are None in an evaluation without policies, whose requests do not have the field.
    """

    label: str | None = None
    attention: Attention | None = None


NO_POLICY = AskedPolicy()


def parse_policies(texts: Sequence[str], file: Path | None = None) -> tuple[AskedPolicy, ...]:
    """Read the policies to compare: those of ``--policy`` in their order, then those of the file in its order.

    Args:
        texts: each a policy in JSON, the name of one, or either behind ``LABEL=``.
        file: a JSON object of policies or names of policies by label.

    Returns:
        ``NO_POLICY`` alone if there are neither texts nor a file.

    Raises:
        OptionError: a text or the file cannot be read as that, or a label is bad or occurs twice.
    """
    asked = [_labelled(text.strip()) for text in texts]
    if file is not None:
        asked += _of_file(file)
    labels = [policy.label for policy in asked]
    for label in labels:
        if labels.count(label) > 1:
            raise OptionError("--policy", f"two policies are called {label!r}: tell them apart with NAME=JSON")
    return tuple(asked) or (NO_POLICY,)


def not_followed(asked: Attention, reported: Mapping[str, Any]) -> str | None:
    """Return what a server did that was not asked of it, by the ``attention`` object of its answer; None if nothing.

    Of a policy that is asked for by its name only the server knows what it is.
    """
    if isinstance(asked, str):
        return None
    for phase in ("decode", "prefill"):
        wanted, got = _policy_of(asked, phase, "dense"), _policy_of(reported, phase)
        if None not in (wanted, got) and wanted != got:
            return f"{phase} was asked for with {wanted!r}, and done with {got!r}"
    return None


_BESIDE: Final = {"early_termination": "early termination", "verify": "verified"}
"""What stands beside policies, and its name in a label."""


def readable_label(attention: Attention) -> str:
    """A label for a policy that was given none, such as ``tactic p=0.9``; a policy's name is its label.

    JSON that does not look like the contract's policies is its own label.
    """
    if isinstance(attention, str):
        return attention
    parts = []
    for part, fields in attention.items():
        if part not in ("decode", "prefill", *_BESIDE) or not isinstance(fields, Mapping | None):
            return _compact(attention)
        if fields is None:
            continue
        name = _BESIDE.get(part, "")
        if part not in _BESIDE:
            name = fields.get("policy", "dense")
            if not isinstance(name, str):
                return _compact(attention)
            if part == "prefill":
                name += " prefill"
        settings = [f"{field}={_compact(value)}" for field, value in fields.items() if field != "policy"]
        parts.append(" ".join([name, *settings]))
    return " + ".join(parts) or "dense"


def _policy_of(attention: Mapping[str, Any], phase: str, default: str | None = None) -> str | None:
    name = section(attention, phase).get("policy", default)
    return name if isinstance(name, str) else None


def _labelled(text: str) -> AskedPolicy:
    # JSON text may hold any character, but it does not start as a label does.
    label, equals, rest = text.partition("=")
    if not equals or text.startswith(("{", "[", '"')):
        attention = parse_policy(text)
        return AskedPolicy(readable_label(attention), attention)
    _check_label("--policy", label)
    return AskedPolicy(label, parse_policy(rest))


def _of_file(file: Path) -> list[AskedPolicy]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object_without_repetition)
    except OSError as error:
        raise OptionError("--policies", f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError("--policies", f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict) or not document:
        raise OptionError("--policies", f"{file} must hold a JSON object of at least one policy by name")
    for label, attention in document.items():
        _check_label("--policies", label)
        if not isinstance(attention, dict | str):
            raise OptionError("--policies", f"{label!r} must be a JSON object or a name, not {_compact(attention)}")
    return [AskedPolicy(label, attention) for label, attention in document.items()]


def _object_without_repetition(members: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in members]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} occurs twice in one object")
    return dict(members)


def _check_label(option: str, label: str) -> None:
    if _LABEL.fullmatch(label) is None:
        raise OptionError(option, f"the name {label!r} must be {_LABEL_RULE}")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
