"""What becomes known of a request while it is answered; the log line and the span of the request say it.

Whoever learns something of a request writes it down::

    request_facts(request.scope).key_id = caller.id

A fact is never what a client or an operator keeps secret: no prompt, no answer, no key, no path but its template, no
name of a policy or a model but those that exist here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

# Asked every few seconds, for ever: logged for debugging alone, and never traced.
PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_FACTS: Final = "facts"


@dataclass
class RequestFacts:
    """What is known of a request. None is not known, or does not apply.

    Attributes:
        method: of HTTP; "other" if it is none.
        route: the path as it was declared.
        status: of the answer; 500 if none was begun.
        duration_seconds: until the last byte of the answer was sent, or the client had left.
        ttft_seconds: until the first event of a stream.
        error: the code of the problem that was answered.
        key_id: of the caller.
        model: the name of the served model.
        policy: the kind of its decode policy.
        policy_name: the preset or stored policy that was asked for by name.
        outcome: of a generation, as the metrics count it.
        prompt_tokens, output_tokens: as the answer reports them.
        trace_id: under which its span is found.
    """

    request_id: str | None = None
    method: str | None = None
    route: str | None = None
    status: int | None = None
    duration_seconds: float | None = None
    ttft_seconds: float | None = None
    error: str | None = None
    key_id: str | None = None
    model: str | None = None
    policy: str | None = None
    policy_name: str | None = None
    outcome: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    trace_id: str | None = None

    def __post_init__(self) -> None:
        # When it began, by time.perf_counter; no fact for the log.
        self.started = time.perf_counter()


def request_facts(scope: Scope) -> RequestFacts:
    """The facts of the request with this ``scope``."""
    facts: RequestFacts = scope.setdefault("state", {}).setdefault(_FACTS, RequestFacts())
    return facts


def route_template(scope: Scope) -> str:
    """The path of the matched route as it was declared: a bounded set, unlike the paths that clients send."""
    return getattr(scope.get("route"), "path", "unmatched")
