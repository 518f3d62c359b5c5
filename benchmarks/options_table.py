"""The documentation's table of what a server may be started with, out of the rows that the backend refuses by."""

from __future__ import annotations

from pathlib import Path

from sglang_winnow.server_options import OPTIONS, Device, Option
from winnow_evaluation.writing import markdown_table


def options_table(_module: Path) -> str:
    """Return every option: its flag, on which devices it is served, and why not on the others."""
    header = ("", "flag", *Device, "why not")
    rows = [
        (option.feature, f"`{option.flag}`", *(_served(option, device) for device in Device), option.reason)
        for option in OPTIONS
    ]
    return markdown_table(header, rows)


def _served(option: Option, device: Device) -> str:
    return "served" if device in option.served_on else "refused"
