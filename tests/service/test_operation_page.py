"""docs/operation.md says what the code has: settings, their defaults, and the codes of refusals."""

from __future__ import annotations

import re
from pathlib import Path

from winnow_service.errors import RuntimeFailure, ServiceError
from winnow_service.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs/operation.md").read_text()
TABLE = PAGE.partition("## Settings")[2]
CODES = ("key_queue_full", "queue_full", "queue_timeout", "circuit_open", "draining")
REFUSALS = [ServiceError(code, waiting=1, seconds=1, retry_seconds=1) for code in CODES]
FAILURES = ("runtime_unavailable", "first_token_timeout", "request_timeout")
TIMEOUTS = [RuntimeFailure(code, problem="", seconds=1) for code in FAILURES]


def test_settings_and_their_defaults() -> None:
    rows = re.findall(r"^\| (`WINNOW_[^|]+) \| ([^|]*) \|", TABLE, re.M)
    documented: dict[str, str] = {}
    for names, defaults in rows:
        variables = re.findall(r"`WINNOW_(\w+)`", names)
        documented |= zip(map(str.lower, variables), defaults.split(", "), strict=True)
    for name, default in documented.items():
        field = Settings.model_fields[name].default
        match name, field:
            case "runtime_url", _:
                assert default == f"`{str(field).rstrip('/')}`"
            case _, str():
                assert default == f"`{field}`"
            case (("max_body_bytes" | "max_header_bytes"), _):
                number, unit = default.split()
                assert int(number) * {"KiB": 1024, "MiB": 1024**2}[unit] == field
            case _:
                assert float(default) == field
    mentioned = {name.lower() for name in re.findall(r"WINNOW_([A-Z_]+)", PAGE)} - {"runtime_api_key"}
    assert mentioned == documented.keys()
    others = ("store_", "admin_key", "allow_open", "metrics_public", "runtime_api_key", "log_")
    assert {name for name in Settings.model_fields if not name.startswith(others)} == documented.keys()


def test_statuses_and_codes() -> None:
    for error in (*REFUSALS, *TIMEOUTS):
        assert f"{error.status} `{error.code}`" in PAGE
    for error in REFUSALS:
        assert error.headers["retry-after"]
    assert f"`{RuntimeFailure('runtime_timeout', seconds=1).code}`" in PAGE
