"""``python -m sglang_winnow.model_folders.merge_adapter``: a model folder with a low-rank adapter merged into it."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_winnow.model_folders.adapter import merge
from sglang_winnow.model_folders.command import run


def main() -> None:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(prog="python -m sglang_winnow.model_folders.merge_adapter")
    parser.add_argument("--base", type=Path, required=True, help="folder of the model")
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter, in PEFT's format")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    options = parser.parse_args()
    run(options.out, lambda report: merge(options.base, options.adapter, options.out, report))


if __name__ == "__main__":
    main()
