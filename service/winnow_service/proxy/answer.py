"""Reading an answer as it passes, for everyone who wants to know something of it, and rewriting what the client gets.

SGLang gives a native answer's attention statistics in ``meta_info``; the client gets them at the top level too, where
the OpenAI forms have them. What the bounds of the caller's key have changed joins the warnings of the statistics.
Everything else in an answer stays as it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

from pydantic_core import from_json, to_json

from winnow_kernels.contract.request_body import FIELD
from winnow_service.proxy.body import Form
from winnow_service.proxy.reported_usage import ReportedUsage, reported_usage

# SGLang begins the stream of a request that it does not take with this.
REFUSED_STREAM: Final = b'data: {"error"'
# In a JSON text, quotation marks around a word of a string have backslashes: this can only be a member's name.
_ATTENTION: Final = f'"{FIELD}"'.encode()
# How a native event of an answer that has ended differs from those before.
_FINISHED: Final = b'"finish_reason":{'
_COUNTED: Final = b'"completion_tokens"'
# In the streams of responses and messages the events that count tokens are few, and each counts something else.
_COUNTED_ONCE: Final = (b'"input_tokens"', b'"output_tokens"')
_DATA: Final = b"data: "
_DONE: Final = b"data: [DONE]"


class AnswerReader:
    """Reads one answer, whole or event by event. No part of it is parsed twice, and most events never are.

    Args:
        form: of the request.
        warnings: join those of each ``attention`` in the answer.
        several: whether a stream gives the events of several answers in turn.
    """

    def __init__(self, form: Form, warnings: Sequence[str] = (), *, several: bool = False) -> None:
        self._lifts = form is Form.NATIVE
        self._warnings = warnings
        self._rewrites = self._lifts or bool(warnings)
        self._several = several
        self._counted_once = _COUNTED_ONCE if form in (Form.RESPONSES, Form.MESSAGES) else ()
        self._answers: list[Any] | None = None
        self._events = 0
        # Events that report something, parsed or not yet, each with the number of events up to it.
        self._reports: list[tuple[int, Any]] = []
        # Native events count on: the newest reports of an answer that was not completed, too.
        self._newest_counts: dict[object, tuple[int, Any]] = {}

    def read(self, body: bytes, *, reports: bool = True) -> bytes:
        """Take a whole answer, or a list of them, and return what the client gets.

        Args:
            reports: whether it is what was asked for, and not an error.
        """
        rewrites = self._rewrites and _ATTENTION in body
        if not (reports or rewrites):
            return body
        parsed = _parsed(body)
        answers = parsed if isinstance(parsed, list) else [parsed]
        if reports:
            self._answers = answers
        # Each of them, and not only up to the first that is changed.
        changed = [self._rewrite(answer) for answer in answers] if rewrites else []
        return to_json(parsed, inf_nan_mode="constants") if any(changed) else body

    def read_events(self, events: bytes) -> bytes:
        """Take whole server-sent events, of one line each, and return what the client gets."""
        self._events += _number_of(events)
        if _ATTENTION in events:
            return self._read_statistics(events)
        if _FINISHED in events or any(name in events for name in self._counted_once):
            self._reports.append((self._events, events))
        elif _COUNTED in events:
            self._keep_counts(events)
        return events

    @property
    def usage(self) -> ReportedUsage:
        """What the answer has reported. What was kept is parsed now: to be asked for once, at its end."""
        if self._answers is not None:
            return reported_usage(enumerate(self._answers))
        kept = sorted([*self._newest_counts.values(), *self._reports], key=itemgetter(0))
        answers = [answer for _, report in kept for answer in _parsed_events(report)]
        return reported_usage(((answer.get("index", 0), answer) for answer in answers), self._events)

    def _read_statistics(self, events: bytes) -> bytes:
        if not self._rewrites:
            self._reports.append((self._events, events))
            return events
        lines = events.split(b"\n")
        for number, line in enumerate(lines):
            if not line.startswith(_DATA):
                continue
            answer = _parsed(line.removeprefix(_DATA))
            self._reports.append((self._events, answer))
            if self._rewrite(answer):
                lines[number] = _DATA + to_json(answer, inf_nan_mode="constants")
        return b"\n".join(lines)

    def _keep_counts(self, events: bytes) -> None:
        if not self._several:
            self._newest_counts[None] = (self._events, events)
            return
        for answer in _parsed_events(events):
            self._newest_counts[str(answer.get("index"))] = (self._events, answer)

    def _rewrite(self, answer: Any) -> bool:
        """Change a parsed answer into what the client gets; return whether it is another now."""
        # In this order: what is lifted is the same object, which must not be warned of twice.
        warned = bool(self._warnings) and _warn(answer, self._warnings)
        return (self._lifts and _lift(answer)) or warned


def _number_of(events: bytes) -> int:
    # A line break inside JSON is escaped: these are the beginnings of lines.
    following = events.count(b"\n" + _DATA) - events.count(b"\n" + _DONE)
    return following + (events.startswith(_DATA) and not events.startswith(_DONE))


def _parsed(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return None


def _parsed_events(report: Any) -> Iterator[dict[str, Any]]:
    """Return the objects among events, or the object that one of them was parsed to."""
    if isinstance(report, bytes):
        lines = (line for line in report.split(b"\n") if line.startswith(_DATA))
        parsed = (_parsed(line.removeprefix(_DATA)) for line in lines)
        return (answer for answer in parsed if isinstance(answer, dict))
    return iter([report] if isinstance(report, dict) else [])


def _warn(answer: Any, warnings: Sequence[str]) -> bool:
    """Add ``warnings`` wherever an answer, or an event, reports attention; return whether it does."""
    if not isinstance(answer, dict):
        return False
    found = answer.get(FIELD)
    statistics = [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict)]
    for each in statistics:
        known = each.get("warnings")
        each["warnings"] = [*(known if isinstance(known, list) else []), *warnings]
    choices = answer.get("choices")
    holders = [answer.get("meta_info"), answer.get("response"), *(choices if isinstance(choices, list) else [])]
    inner = [_warn(holder, warnings) for holder in holders]
    return bool(statistics) or any(inner)


def _lift(answer: Any) -> bool:
    facts = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(facts, dict) or FIELD not in facts:
        return False
    answer[FIELD] = facts[FIELD]
    return True
