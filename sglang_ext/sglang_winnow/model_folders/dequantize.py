"""``python -m sglang_winnow.model_folders.dequantize``: a GGUF file as a folder that SGLang loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_winnow.model_folders.command import run
from sglang_winnow.model_folders.gguf_weights import write_folder


def main() -> None:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(prog="python -m sglang_winnow.model_folders.dequantize")
    parser.add_argument("--gguf", type=Path, required=True, help="the file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    options = parser.parse_args()
    run(options.out, lambda report: write_folder(options.gguf, options.out, report))


if __name__ == "__main__":
    main()
