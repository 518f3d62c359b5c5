"""Log lines: JSON for programs, text for people. Times are UTC.

To be called before anything logs, with uvicorn told to leave logging alone (``log_config=None``), so that its lines
look like all others::

    configure_logging(settings.log_format, settings.log_level)

What is logged with ``extra={"fields": {...}}`` has these as members of the JSON object. Lines that are written while a
request is answered have its id.

What may hold a client's secrets is left out whatever the level: what libraries say for their own debugging, and the
messages of exceptions that tell of values. Should a key be in a line all the same, it is blotted out.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]

_OWN: Final = "winnow_service"
_SERVER: Final = "uvicorn"
_KEY: Final = re.compile(r"(winnow_[0-9a-f]{16}_)[A-Za-z0-9_-]{43}|(\bbearer\s+)[^\s\"',]+", re.IGNORECASE)
# The id of the request that is being answered. Never taken back: each request has a context of its own, and what
# handles its exception still needs it.
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def configure_logging(log_format: LogFormat | None, level: LogLevel, stream: TextIO | None = None) -> None:
    """Write the process's log to ``stream``, and nowhere else.

    Args:
        log_format: None for text on a terminal and JSON elsewhere.
        level: of the service's own lines. Those of libraries are written from warnings on, the server's from infos on.
        stream: standard error by default.
    """
    target = sys.stderr if stream is None else stream
    chosen = log_format or ("text" if target.isatty() else "json")
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter() if chosen == "json" else TextFormatter())
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(_OWN).setLevel(own)
    server = logging.getLogger(_SERVER)
    server.setLevel(max(own, logging.INFO))
    # Where uvicorn has set up its own log before.
    server.handlers.clear()
    server.propagate = True
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """A line is a JSON object with ``time``, ``level``, ``logger``, ``message`` and what else there is to say."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = exception_text(record.exc_info[1])
        return _without_keys(json.dumps(line, default=str))


class TextFormatter(logging.Formatter):
    """The same for people: a line of text, and the traceback of an exception below it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {record.getMessage()} {fields}".rstrip()
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + exception_text(record.exc_info[1])
        return _without_keys(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line))


def exception_text(error: BaseException) -> str:
    """The types of ``error`` and of what led to it, and where they were raised.

    A message is there only if the operating system wrote it: others may quote the request.
    """
    return "\n".join(_lines(error)).rstrip()


def _lines(error: BaseException) -> Iterator[str]:
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        yield from _lines(earlier)
        yield "which led to"
    yield "Traceback (most recent call last):"
    yield from (line.rstrip("\n") for line in traceback.format_tb(error.__traceback__))
    message = f": {error}" if isinstance(error, OSError) else ""
    yield f"{type(error).__module__}.{type(error).__qualname__}{message}"
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield "of which one is"
            yield from _lines(part)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    request_id = current_request_id.get()
    return fields if request_id is None else {"request_id": request_id, **fields}


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _without_keys(line: str) -> str:
    return _KEY.sub(lambda match: f"{match[1] or match[2]}***", line)
