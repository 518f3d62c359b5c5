"""Locust's users: people who chat, programs that read long documents, and programs that let the model reason.

    python -m locust -f loadtest/locustfile.py --host http://127.0.0.1:8000

Every user streams. TTFT and TPOT are in the report beside the requests, as requests of these types; thresholds decide
the exit status. The key of the service, if it needs one, is in the environment: ``WINNOW_API_KEY``.
"""

from __future__ import annotations

import os
import random
import time
from argparse import Namespace
from typing import Any, ClassVar, Final

from locust import HttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WorkerRunner
from locust.stats import StatsEntry

from loadtest import prompts
from loadtest.streaming import StreamBroken, StreamTimes, error_code, read_stream
from loadtest.thresholds import Outcome, Thresholds, violations

_ROUTE: Final = "/v1/chat/completions"
_REQUEST: Final = "POST"
_TTFT: Final = "TTFT"
_TPOT: Final = "TPOT"
_NO_POLICY: Final = "default"
_MILLISECONDS: Final = 1e3
_LIMIT_SECONDS: Final = 600.0
_TURNS: Final = 4


def add_options(parser: LocustArgumentParser) -> None:
    """Add the options of these users."""
    parser.add_argument("--model", help="Its name [default: the first that the service lists].")
    parser.add_argument(
        "--policies",
        default="default,exact,balanced,fast",
        help="Names of policies that requests ask for in turn; 'default' asks for none.",
    )
    parser.add_argument("--document-words", type=int, default=1200, help="Words of a long document.")
    parser.add_argument("--chat-tokens", type=int, default=48, help="Longest answer in a chat.")
    parser.add_argument("--document-tokens", type=int, default=24, help="Longest answer about a document.")
    parser.add_argument("--reasoning-tokens", type=int, default=192, help="Longest answer to a problem.")
    parser.add_argument("--max-failure-ratio", type=float, default=0.01, help="Of all requests.")
    parser.add_argument("--max-ttft-p95", type=float, default=20.0, help="Seconds to the first token.")
    parser.add_argument("--max-tpot-p95", type=float, default=0.5, help="Seconds per token after the first.")


class StreamingUser(HttpUser):
    """A user who reads streams.

    Attributes:
        kind: in the report.
    """

    abstract = True
    kind: ClassVar[str]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)  # type: ignore[no-untyped-call]
        self.chooser = random.Random()
        self.client.trust_env = False
        self.options = _options(environment)
        # No option: a master sends those to its workers as they are, and reports may show them.
        if key := os.environ.get("WINNOW_API_KEY"):
            self.client.headers["authorization"] = f"Bearer {key}"
        self.model = ""

    def on_start(self) -> None:
        self.model = self.options.model or self._first_model()

    def _first_model(self) -> str:
        with self.client.get("/v1/models", catch_response=True) as response:
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                response.failure(f"lists no model: {response.status_code} {_problem(response)}")
                raise StopUser from None

    def ask(self, messages: list[dict[str, str]], tokens: int) -> str | None:
        """Ask for an answer with one of the policies.

        Returns:
            The answer; None if it was not complete, which is reported.
        """
        policy = self.chooser.choice(self.options.policies.split(","))
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if policy != _NO_POLICY:
            body["attention"] = policy
        name = f"{self.kind}, {policy}"
        started = time.perf_counter()
        with self.client.post(
            _ROUTE, json=body, name=name, stream=True, catch_response=True, timeout=_LIMIT_SECONDS
        ) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code} {_problem(response)}")
                return None
            try:
                times = read_stream(response.iter_lines(chunk_size=None), started)
            except (StreamBroken, OSError) as error:
                response.failure(f"stream: {error}")
                return None
            # Until here it is the time to the first byte.
            response.request_meta["response_time"] = times.end * _MILLISECONDS
            response.success()
        self._report(name, times)
        return times.text

    def _report(self, name: str, times: StreamTimes) -> None:
        for kind, seconds in ((_TTFT, times.ttft), (_TPOT, times.tpot)):
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type=kind,
                    name=name,
                    response_time=seconds * _MILLISECONDS,
                    response_length=0,
                    exception=None,
                    context={},
                )


class ChatUser(StreamingUser):
    """Somebody who goes on with a conversation: each question has all before it in its prompt."""

    kind = "chat"
    weight = 6
    wait_time = between(0.5, 2)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._messages: list[dict[str, str]] = []

    @task
    def go_on(self) -> None:
        """Ask the next question."""
        if len(self._messages) >= 2 * _TURNS:
            self._messages = []
        asked = [*self._messages, {"role": "user", "content": prompts.question(self.chooser)}]
        answer = self.ask(asked, self.options.chat_tokens)
        if answer is not None:
            self._messages = [*asked, {"role": "assistant", "content": answer}]


class LongDocumentUser(StreamingUser):
    """A program that asks one short question about each long document."""

    kind = "long document"
    weight = 2
    wait_time = between(1, 3)

    @task
    def read(self) -> None:
        """Ask about a document that is not cached."""
        content = prompts.document(self.chooser, self.options.document_words)
        self.ask([{"role": "user", "content": content}], self.options.document_tokens)


class ReasoningUser(StreamingUser):
    """A program whose answers are long."""

    kind = "reasoning"
    weight = 2
    wait_time = between(1, 3)

    @task
    def reason(self) -> None:
        """Ask for a long answer."""
        content = prompts.problem(self.chooser)
        self.ask([{"role": "user", "content": content}], self.options.reasoning_tokens)


USERS: Final = (ChatUser, LongDocumentUser, ReasoningUser)


def judge(environment: Environment, **_: Any) -> None:
    """Set the exit status by the thresholds."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options = _options(environment)
    thresholds = Thresholds(options.max_failure_ratio, options.max_ttft_p95, options.max_tpot_p95)
    found = violations(outcome(environment), thresholds)
    for violation in found:
        print(f"FAILED: {violation}")  # noqa: T201 the command's output
    environment.process_exit_code = 1 if found else 0


def outcome(environment: Environment) -> Outcome:
    """What came of all requests."""
    requests = _all_of(environment, _REQUEST)
    complete = {user.kind: _all_of(environment, _TTFT, f"{user.kind}, ").num_requests for user in USERS}
    return Outcome(
        requests.num_requests,
        requests.num_failures,
        complete,
        _p95(_all_of(environment, _TTFT)),
        _p95(_all_of(environment, _TPOT)),
    )


def _options(environment: Environment) -> Namespace:
    assert environment.parsed_options is not None
    options: Namespace = environment.parsed_options
    return options


def _all_of(environment: Environment, request_type: str, prefix: str = "") -> StatsEntry:
    stats = environment.stats
    total = StatsEntry(stats, "all", request_type)
    for (name, kind), entry in stats.entries.items():
        if kind == request_type and name.startswith(prefix):
            total.extend(entry)
    return total


def _p95(entry: StatsEntry) -> float | None:
    return entry.get_response_time_percentile(0.95) / _MILLISECONDS if entry.num_requests else None


def _problem(response: Any) -> str:
    try:
        return error_code(response.json())
    except ValueError:
        return "unreachable" if response.status_code == 0 else "unknown"


events.init_command_line_parser.add_listener(add_options)  # type: ignore[no-untyped-call]
events.quitting.add_listener(judge)  # type: ignore[no-untyped-call]
