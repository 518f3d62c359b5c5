"""``python -m sglang_winnow.calibration``: what ``winnow calibrate delta`` runs, in a process that has torch.

Prompts come on standard input as a JSON list of strings; each is put to the model as a user's message.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sglang_winnow.calibration.delta import calibrate


def main() -> None:
    """Read the arguments and the prompts, calibrate, write the profile."""
    parser = argparse.ArgumentParser(prog="python -m sglang_winnow.calibration")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--full-layers", type=int, required=True)
    parser.add_argument("--words", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        profile = calibrate(
            options.model, json.load(sys.stdin), options.device, options.steps, options.full_layers, options.words
        )
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    options.output.write_text(profile.model_dump_json(indent=2, exclude_none=True) + "\n")


if __name__ == "__main__":
    main()
