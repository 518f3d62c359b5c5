"""``python -m sglang_winnow.self_check``: where SGLang would run here, and whether it would start with Winnow's plugin.

Prints one line of JSON, for ``winnow doctor``:

- ``cuda``: whether torch finds a CUDA device; ``device``: its name, or the CPU's.
- ``platform``: the module of the platform that SGLang chose.
- ``problem``: why a server would not start, or would start without the plugin, as one line; null if neither.
"""

from __future__ import annotations

import json
import platform
import sys

import torch
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry


def main() -> None:
    """Print the facts."""
    cuda = torch.cuda.is_available()
    cpu = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    facts = {
        "cuda": cuda,
        "device": torch.cuda.get_device_name(0) if cuda else cpu,
        "platform": type(current_platform).__module__,
        "problem": find_problem(),
    }
    sys.stdout.write(json.dumps(facts) + "\n")


def find_problem() -> str | None:
    """Load SGLang's plugins as a server does; return what is wrong with Winnow's, if anything is."""
    try:
        load_plugins()
        # SGLang only logs that a plugin could not be imported.
        from sglang_winnow.hooks import LAUNCH, require_in_force  # noqa: PLC0415
        from sglang_winnow.plugin import HOOKS  # noqa: PLC0415

        if LAUNCH not in HookRegistry._patched:  # noqa: SLF001
            return "SGLang does not load Winnow's plugin; unset SGLANG_PLUGINS and SGLANG_PLATFORM"
        require_in_force(HOOKS)
    except SystemExit as refusal:
        return str(refusal)
    except Exception as error:  # noqa: BLE001
        return f"Winnow's plugin cannot be loaded ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return None


if __name__ == "__main__":
    main()
