"""Measuring one request that generates: how long it took, how many tokens, and what its attention cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final, TypeGuard

from winnow_kernels.contract.attention_statistics import Statistics, amount, decode_context, prefill_context, section
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.answer import REFUSED_STREAM, AnswerReader
from winnow_service.proxy.reported_usage import ReportedUsage
from winnow_service.proxy.request_facts import RequestFacts

# An answer's policy that this version of the contract does not have.
_OTHER: Final = "other"
_OK: Final = 200
_SERVER_ERROR: Final = 500


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Generation:
    """One request, from when it is sent to the runtime until its answer has ended.

    Args:
        decode_policy: what it asks for.
        facts: what becomes known of the request is written there.
        reader: of its answer.

    Attributes:
        usage: what its answer has reported; nothing before it has ended.
    """

    def __init__(
        self,
        metrics: Metrics,
        decode_policy: str,
        model: str,
        facts: RequestFacts,
        reader: AnswerReader,
    ) -> None:
        facts.policy, facts.model = decode_policy, model
        self._facts = facts
        self._metrics = metrics
        self._labels = (decode_policy, model)
        self._model = model
        self._started = facts.started
        self._reader = reader
        self._outcome = Outcome.FINISHED
        self._first_event: float | None = None
        self._last_event = facts.started
        self._ended = False
        self._in_flight = metrics.generations_in_flight.labels(decode_policy)
        self._in_flight.inc()
        self.usage = ReportedUsage()

    def feed(self, events: bytes) -> bytes:
        """Take whole events of its stream, and return what the client gets of them."""
        self._last_event = time.perf_counter()
        if self._first_event is None:
            self._first_event = self._last_event
            if events.startswith(REFUSED_STREAM):
                self._outcome = Outcome.REJECTED
            else:
                self._metrics.time_to_first_token.labels(*self._labels).observe(self._first_event - self._started)
        return self._reader.read_events(events)

    def fail(self) -> None:
        """The runtime does not answer it to its end."""
        self._outcome = Outcome.FAILED

    def abandon(self) -> None:
        """Its client has left; if the runtime failed before, it failed."""
        if self._outcome is not Outcome.FAILED:
            self._outcome = Outcome.ABANDONED

    def end(self) -> None:
        """Count it, with what its stream reported. After the first time nothing happens."""
        if self._ended:
            return
        self._ended = True
        self._in_flight.dec()
        self._metrics.generations.labels(*self._labels, self._outcome).inc()
        usage = self.usage = self._reader.usage
        self._facts.outcome = self._outcome
        self._facts.prompt_tokens, self._facts.output_tokens = usage.prompt_tokens, usage.output_tokens
        self._count_tokens(usage)
        if self._outcome is Outcome.FINISHED:
            self._metrics.generation_duration.labels(*self._labels).observe(self._last_event - self._started)
            self._observe_pace(usage)
        for statistics in usage.attention:
            self._count_attention(statistics)

    def end_with(self, status: int, body: bytes) -> bytes:
        """Count it, with its whole answer, and return what the client gets of that."""
        if status != _OK:
            self._outcome = Outcome.FAILED if status >= _SERVER_ERROR else Outcome.REJECTED
        self._last_event = time.perf_counter()
        body = self._reader.read(body, reports=status == _OK)
        self.end()
        return body

    def end_without_answer(self, error: BaseException) -> None:
        """Count it: ``error`` came in place of an answer."""
        # The task is cancelled when its client leaves.
        if isinstance(error, asyncio.CancelledError):
            self.abandon()
        else:
            self.fail()
        self.end()

    def _count_tokens(self, usage: ReportedUsage) -> None:
        self._metrics.prompt_tokens.labels(*self._labels).inc(usage.prompt_tokens or 0)
        self._metrics.output_tokens.labels(*self._labels).inc(usage.output_tokens or 0)
        cached = sum(amount(section(facts, "prefill"), "cached_tokens") or 0 for facts in usage.attention)
        self._metrics.cached_prompt_tokens.labels(*self._labels).inc(cached)

    def _observe_pace(self, usage: ReportedUsage) -> None:
        has_one_answer = len(usage.attention) <= 1
        following = (usage.output_tokens or 0) - 1
        if self._first_event is not None and has_one_answer and following > 0:
            seconds = (self._last_event - self._first_event) / following
            self._metrics.time_per_output_token.labels(*self._labels).observe(seconds)

    def _count_attention(self, facts: Statistics) -> None:
        decode, prefill = section(facts, "decode"), section(facts, "prefill")
        policy = _kind(decode, DECODE_POLICIES)
        self._count_cost(("decode", policy, self._model), decode, decode_context(decode))
        self._count_cost(("prefill", _kind(prefill, PREFILL_POLICIES), self._model), prefill, prefill_context(prefill))
        steps, dense = amount(decode, "steps") or 0, amount(decode, "dense_steps") or 0
        if policy == "dense":
            dense = steps
        self._metrics.decode_steps.labels(policy, self._model, "dense").inc(min(dense, steps))
        self._metrics.decode_steps.labels(policy, self._model, "sparse").inc(max(0, steps - dense))
        self._count_termination((policy, self._model), section(decode, "early_termination"))
        self._count_verification((policy, self._model), section(facts, "verify"))
        quality = section(facts, "quality")
        self._count_audit((policy, self._model), section(facts, "audit"), section(quality, "expected"))
        if quality:
            self._count_quality(policy, quality)

    def _count_cost(self, labels: tuple[str, str, str], facts: Statistics, context: float) -> None:
        attended, read = amount(facts, "attended_ratio"), amount(facts, "kv_read_ratio")
        if attended is not None:
            self._metrics.attended_ratio.labels(*labels).observe(attended)
            self._metrics.context_tokens.labels(*labels).inc(context)
            self._metrics.attended_tokens.labels(*labels).inc(attended * context)
        if read is not None:
            self._metrics.kv_read_ratio.labels(*labels).observe(read)
            self._metrics.kv_read_tokens.labels(*labels).inc(read * context)

    def _count_termination(self, labels: tuple[str, str], facts: Statistics) -> None:
        terminated, skipped = amount(facts, "terminated_ratio"), amount(facts, "skipped_ratio")
        if terminated is not None:
            self._metrics.terminated_ratio.labels(*labels).observe(terminated)
            self._metrics.early_terminations.labels(*labels).inc(terminated > 0)
        if skipped is not None:
            self._metrics.skipped_ratio.labels(*labels).observe(skipped)

    def _count_audit(self, labels: tuple[str, str], facts: Statistics, expected: Statistics) -> None:
        self._metrics.audited_steps.labels(*labels).inc(amount(facts, "steps") or 0)
        share, error = amount(facts, "true_share"), amount(facts, "output_error")
        if share is not None:
            self._metrics.audited_share.labels(*labels).observe(share)
            for promise, promised in (("p", amount(facts, "p")), ("quality", amount(expected, "true_share"))):
                if promised is not None:
                    self._metrics.audited_shortfall.labels(*labels, promise).observe(max(0, promised - share))
        if error is not None:
            self._metrics.audited_error.labels(*labels).observe(error)
        if (divergence := amount(facts, "next_token_kl")) is not None:
            self._metrics.audited_kl.labels(*labels).observe(divergence)

    def _count_quality(self, policy: str, facts: Statistics) -> None:
        kept = "under_load" if section(facts, "under_load") else "asked"
        self._metrics.quality_answers.labels(policy, self._model, kept).inc()
        left = facts.get("left")
        for kind in {_kind(section(each, "decode"), DECODE_POLICIES) for each in left} if _are_objects(left) else ():
            self._metrics.left_policy_answers.labels(kind, self._model).inc()

    def _count_verification(self, labels: tuple[str, str], facts: Statistics) -> None:
        if not facts:
            return
        for counter, field in (
            (self._metrics.verifications, "verifications"),
            (self._metrics.drafted_tokens, "drafted"),
            (self._metrics.accepted_tokens, "accepted"),
        ):
            counter.labels(*labels).inc(amount(facts, field) or 0)
        if (tokens := amount(facts, "tokens_per_verification")) is not None:
            self._metrics.tokens_per_verification.labels(*labels).observe(tokens)


def _are_objects(value: object) -> TypeGuard[list[Statistics]]:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _kind(facts: Statistics, known: Collection[str]) -> str:
    policy = facts.get("policy")
    return policy if isinstance(policy, str) and policy in known else _OTHER
