"""Where SGLang enters: the check of its release, before anything is imported that an older one lacks."""

from __future__ import annotations

from sglang_winnow.sglang_versions.releases import require_supported


def register() -> None:
    """Register the plugin; SGLang calls this in each of its processes.

    Raises:
        SystemExit: the release is older than those that are supported, or the environment is not what hooks need.
    """
    try:
        require_supported()
    except ValueError as error:
        raise SystemExit(f"Winnow: the server does not start, because {error}.") from error
    from sglang_winnow import plugin  # noqa: PLC0415

    plugin.register()
