"""The documentation's table of policies, out of their schema, which is written from the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow_evaluation.writing import markdown_table


def policies_table(path: Path) -> str:
    """Return every policy of decode and then of prefill: what it does, and its fields with their defaults.

    Args:
        path: ``docs/policy.schema.json``.
    """
    schema = json.loads(path.read_text())
    rows = []
    for phase in ("decode", "prefill"):
        for name, reference in schema["properties"][phase]["discriminator"]["mapping"].items():
            of_policy = schema["$defs"][reference.rpartition("/")[2]]
            rows.append((phase, f"`{name}`", _sentence(of_policy["description"]), _fields(of_policy["properties"])))
    return markdown_table(("phase", "policy", "what it does", "fields (default)"), rows)


def _sentence(description: str) -> str:
    return " ".join(description.partition("\n\n")[0].split()).replace("``", "`")


def _fields(properties: Mapping[str, Mapping[str, Any]]) -> str:
    fields = (f"`{name}`{_default(field)}" for name, field in properties.items() if name != "policy")
    return ", ".join(fields)


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    if default is None:
        return ""
    return f" ({default:,})" if type(default) is int else f" ({json.dumps(default)})"
