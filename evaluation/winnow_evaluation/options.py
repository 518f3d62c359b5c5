"""The command line's values, read and checked: each error names the option and the bound."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

MIN_LENGTH = 64
MAX_LENGTH = 16 * 1024 * 1024

_LENGTH = re.compile(r"(\d+)(k?)", re.IGNORECASE)
_POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class OptionError(ValueError):
    """A value that cannot be used; ``option`` is its name on the command line."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read lengths in tokens such as ``4096,16k`` (k is 1,024), ascending, each once.

    Raises:
        OptionError: one is not a number or out of bounds, or there are none.
    """
    lengths = set()
    for item in _items("--lengths", text):
        match = _LENGTH.fullmatch(item)
        if match is None:
            raise OptionError("--lengths", f"{item!r} is not a number of tokens, such as 4096 or 16k")
        length = int(match[1]) * (1024 if match[2] else 1)
        if not MIN_LENGTH <= length <= MAX_LENGTH:
            raise OptionError("--lengths", f"{item} is not between {MIN_LENGTH} and {MAX_LENGTH} tokens")
        lengths.add(length)
    return tuple(sorted(lengths))


def task_groups(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The groups of tasks: ``all``, and each leading part that several names share up to an underscore."""
    groups = {"all": tuple(names)}
    for name in names:
        parts = name.split("_")
        for end in range(1, len(parts)):
            prefix = "_".join(parts[:end])
            members = tuple(other for other in names if other.startswith(f"{prefix}_"))
            if len(members) > 1:
                groups[prefix] = members
    return groups


def parse_tasks(text: str, names: Collection[str]) -> tuple[str, ...]:
    """Read names of tasks and groups; each task once, in the order of ``names``.

    Raises:
        OptionError: a name is neither a task nor a group, or there are none.
    """
    groups = task_groups(names)
    chosen: set[str] = set()
    for item in _items("--tasks", text):
        if item not in names and item not in groups:
            raise OptionError("--tasks", f"{item!r} is none of {', '.join([*names, *groups])}")
        chosen.update([item] if item in names else groups[item])
    return tuple(name for name in names if name in chosen)


def parse_policy(text: str) -> Mapping[str, Any] | str:
    """Read a policy: a JSON object, or the name of one. What it says is for the server to judge.

    Raises:
        OptionError: it is neither.
    """
    text = text.strip()
    if _POLICY_NAME.fullmatch(text):
        return text
    try:
        policy = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            "--policy",
            f"neither JSON ({error.msg}, character {error.pos + 1}) nor a name of up to 128 letters, digits and '._-'",
        ) from error
    if not isinstance(policy, dict):
        raise OptionError("--policy", f"must be a JSON object or a name, not {text}")
    return policy


def check_output(path: Path, option: str = "--output") -> None:
    """Refuse a file that cannot be written, before the work for it is done.

    Raises:
        OptionError: the folder is not there or not writable.
    """
    if not path.parent.is_dir():
        raise OptionError(option, f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(option, f"the folder {path.parent} is not writable")


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise OptionError(option, f"{text!r} is not a list of values with single commas between them")
    return items
