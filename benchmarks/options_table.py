"""The documentation's table of what a server may be started with, out of the rows that the backend refuses by."""

from __future__ import annotations

from pathlib import Path

from sglang_winnow.server_options import OPTIONS, Device, Option
from winnow_evaluation.writing import markdown_table


def options_table(_module: Path) -> str:
    """Return every option: its flag, on which devices it is served, and why not on the others."""
    header = ("", "flag", *Device, "why not")
    rows = [
        (option.feature, f"`{option.flag}`", *(_served(option, device) for device in Device), _reasons(option))
        for option in OPTIONS
    ]
    return markdown_table(header, rows)


def _reasons(option: Option) -> str:
    since = f"from {option.cpu_before} on: {option.reason_since}" if option.cpu_before else ""
    return "; ".join(filter(None, (option.reason, since)))


def _served(option: Option, device: Device) -> str:
    if device not in option.served_on:
        return "refused"
    limit = option.cpu_before if device is Device.CPU else None
    return "served" if limit is None else f"served before {limit}"
