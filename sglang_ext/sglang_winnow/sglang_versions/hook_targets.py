"""Where the functions of SGLang are that hooks run before or after, if they have moved."""

from __future__ import annotations

from typing import Final

from packaging.version import Version

from sglang_winnow.sglang_versions.releases import ARGUMENT_HANDLERS, OLDEST, RUNNING

_ARGUMENTS: Final = "sglang.srt.server_args.ServerArgs"
_HANDLERS: Final = "sglang.srt.arg_groups"

TARGETS: Final[dict[str, dict[Version, str]]] = {
    "resolve the attention backend": {
        OLDEST: f"{_ARGUMENTS}._handle_attention_backend_compatibility",
        ARGUMENT_HANDLERS: f"{_HANDLERS}.attention_hook.handle_attention_backend_compatibility",
    },
    "adjust arguments to the model": {
        OLDEST: f"{_ARGUMENTS}._handle_model_specific_adjustments",
        ARGUMENT_HANDLERS: f"{_HANDLERS}.model_hook.handle_model_specific_adjustments",
    },
    "resolve the command line": {
        OLDEST: f"{_ARGUMENTS}.__post_init__",
        ARGUMENT_HANDLERS: f"{_ARGUMENTS}.resolve_once",
    },
    "plan to size the KV cache after graphs": {
        OLDEST: f"{_ARGUMENTS}.post_capture_kv_sizing_planned",
        ARGUMENT_HANDLERS: f"{_HANDLERS}.overrides.post_capture_kv_sizing_planned",
    },
}
"""By what a function does, its dotted name from a release on."""


def target(function: str, running: Version = RUNNING) -> str:
    """Return the dotted name, in the running SGLang, of a function of ``TARGETS``."""
    return next(name for release, name in reversed(TARGETS[function].items()) if release <= running)
