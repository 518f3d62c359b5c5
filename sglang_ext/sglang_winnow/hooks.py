"""Hooks on SGLang that are known to be in force.

SGLang's registry fails open: a hook that cannot be applied is logged and the server starts without it. Here a hook
whose target is gone, or that was not applied, ends the process instead.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_winnow.sglang_versions.arguments import resolved

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
# Runs in a process of its own, where hooks are applied anew.
SCHEDULER_START = "sglang.srt.managers.scheduler.Scheduler.__init__"


@dataclass(frozen=True)
class Hook:
    """A function to run before or after the SGLang function with the dotted name ``target``."""

    target: str
    function: Callable[..., Any]
    kind: HookType


def around(functions: Mapping[str, Callable[..., Any]]) -> tuple[Hook, ...]:
    """Return the hooks that run ``functions`` around those with the dotted names of their keys."""
    return tuple(Hook(target, function, HookType.AROUND) for target, function in functions.items())


@contextmanager
def refusing_to_start() -> Iterator[None]:
    """Turn a ValueError into SystemExit with one sentence, in which the process ends without a stack trace."""
    try:
        yield
    except ValueError as error:
        raise SystemExit(f"Winnow: the server does not start, because {str(error).splitlines()[0]}.") from error


def install(hooks: Sequence[Hook]) -> None:
    """Register ``hooks``, and checks that they are in force where SGLang starts its processes and in each scheduler.

    Raises:
        SystemExit: a target does not exist. SGLang only logs an ``Exception`` from a plugin.
    """

    def check_before_launch(_engine: type, server_args: ServerArgs, *_: object, **__: object) -> None:
        require_in_force(hooks)
        require_one_tokenizer(server_args)

    def check_in_scheduler(*_: object, **__: object) -> None:
        require_in_force(hooks)

    checks = [
        Hook(LAUNCH, check_before_launch, HookType.BEFORE),
        Hook(SCHEDULER_START, check_in_scheduler, HookType.BEFORE),
    ]
    for hook in [*hooks, *checks]:
        _require_target(hook.target)
        HookRegistry.register(hook.target, hook.function, hook.kind)


def require_in_force(hooks: Sequence[Hook]) -> None:
    """Raise SystemExit if one of ``hooks`` was not applied to its target."""
    for hook in hooks:
        if hook.target not in HookRegistry._patched:  # noqa: SLF001
            raise SystemExit(
                f"Winnow: the server does not start, because SGLang did not apply a hook to {hook.target}."
            )


def require_one_tokenizer(server_args: ServerArgs) -> None:
    """Raise SystemExit if the command line asks for tokenizer workers: SGLang loads no plugins in them."""
    workers = resolved(server_args).tokenizer_worker_num
    if workers > 1:
        raise SystemExit(
            "Winnow: the server does not start, because --tokenizer-worker-num must be 1:"
            f" with {workers}, requests would not be checked."
        )


def _require_target(target: str) -> None:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        if (failed := _failed_import(target)) is not None:
            raise SystemExit(
                f"Winnow: the server does not start, because SGLang's {target} cannot be imported ({failed})."
            ) from failed
        raise SystemExit(
            f"Winnow: the server does not start, because this version of SGLang has no {target} to hook ({error})."
        ) from error


def _failed_import(target: str) -> ImportError | None:
    """Return why the module of ``target`` cannot be imported though it is there: ``resolve_name`` does not tell."""
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The target's own names are looked for from the longest on: a class is no module.
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                continue
            return error
        except ImportError as error:
            return error
        else:
            return None
    return None
