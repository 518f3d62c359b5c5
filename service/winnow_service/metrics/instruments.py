"""The service's metrics: their names, labels and meaning.

Every label has few values: routes as they are declared, the kinds of policies in the contract, the name of the served
model, the codes of our own errors. Names that clients or operators choose, and keys, are in none.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from winnow_service.keys.records import KEYS
from winnow_service.limits.limiter import CONCURRENT, REQUESTS, TOKENS
from winnow_service.policies.registry import DEFAULTS, POLICIES

# From an error in milliseconds to a long answer on a CPU in many minutes.
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_SECONDS_PER_TOKEN: Final = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WRITE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# The index is read too: a KV read ratio may be over 1.
_RATIOS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9, 1, 1.25)
# 0 apart: nothing was terminated, or skipped.
_SHARES: Final = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_NATS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
_TOKENS_PER_VERIFICATION: Final = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7, 9, 13, 17)
_HTTP: Final = ("route", "method")
_GENERATION: Final = ("decode_policy", "model")
_COST: Final = ("phase", "policy", "model")
_DECODE: Final = ("policy", "model")
_COLLECTIONS: Final = (POLICIES, DEFAULTS, KEYS)

# One sample less for every series: when it began is of no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One registry for each application, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_http()
        self._add_generations()
        self._add_attention()
        self._add_runtime()
        self._add_admission()
        self._add_store()
        Info("winnow_build", "The version of Winnow.", registry=self.registry).info(
            {"version": version("sglang-winnow")}
        )
        ProcessCollector(namespace="winnow", registry=self.registry)

    def _add_http(self) -> None:
        self.requests = self._counter(
            "winnow_http_requests_total",
            "HTTP requests that have ended, by route template, method and status class.",
            *_HTTP,
            "status",
        )
        self.in_flight = self._gauge("winnow_http_requests_in_flight", "HTTP requests being answered now.")
        self.duration = self._histogram(
            "winnow_http_request_duration_seconds",
            "From the request's first byte to the last byte of its answer.",
            _SECONDS,
            *_HTTP,
        )
        self.time_to_first_byte = self._histogram(
            "winnow_http_time_to_first_byte_seconds",
            "From the request's first byte to the first byte of the body of its answer.",
            _SECONDS,
            *_HTTP,
        )
        self.client_disconnects = self._counter(
            "winnow_client_disconnects_total", "Requests whose client left before the answer was complete.", "route"
        )
        self.refusals = self._counter(
            "winnow_refusals_total",
            "Requests that the service itself refused, by the code in their error; failures of the runtime are not.",
            "code",
        )
        self.limits_hit = self._counter(
            "winnow_limits_hit_total",
            "Requests that a limit of their key did not allow, by limit; one that several did not counts for each.",
            "limit",
        )
        for limit in (REQUESTS, TOKENS, CONCURRENT):
            self.limits_hit.labels(limit)

    def _add_generations(self) -> None:
        self.policies = self._counter(
            "winnow_requests_by_decode_policy_total",
            "Generation requests whose policies can be served, by decode policy; 'default' if they ask for none. "
            "A request with several policies counts once for each kind.",
            "decode_policy",
        )
        self.generations = self._counter(
            "winnow_generations_total",
            "Generation requests that have ended. Outcome: finished, rejected (by the runtime), failed (the runtime "
            "did not answer, or not completely), abandoned (the client left).",
            *_GENERATION,
            "outcome",
        )
        self.generations_in_flight = self._gauge(
            "winnow_generations_in_flight", "Generation requests that the runtime has, or is sent.", "decode_policy"
        )
        self.time_to_first_token = self._histogram(
            "winnow_time_to_first_token_seconds",
            "Of streams: from the request's first byte to the first event.",
            _SECONDS,
            *_GENERATION,
        )
        self.time_per_output_token = self._histogram(
            "winnow_time_per_output_token_seconds",
            "Of finished streams with one answer: from the first to the last event, by tokens after the first.",
            _SECONDS_PER_TOKEN,
            *_GENERATION,
        )
        self.generation_duration = self._histogram(
            "winnow_generation_duration_seconds",
            "Of finished requests: from the first byte of the request to the last of the runtime's answer.",
            _SECONDS,
            *_GENERATION,
        )
        self.prompt_tokens = self._counter(
            "winnow_prompt_tokens_total", "Tokens of prompts, as answers report them.", *_GENERATION
        )
        self.cached_prompt_tokens = self._counter(
            "winnow_cached_prompt_tokens_total", "Of them, those that the runtime had cached.", *_GENERATION
        )
        self.output_tokens = self._counter(
            "winnow_output_tokens_total", "Tokens of answers, as they report them.", *_GENERATION
        )

    def _add_attention(self) -> None:
        self.attended_ratio = self._histogram(
            "winnow_attended_ratio",
            "Of each answer: tokens whose K and V were read by tokens in context.",
            _RATIOS,
            *_COST,
        )
        self.kv_read_ratio = self._histogram(
            "winnow_kv_read_ratio",
            "Of each answer: bytes read of KV cache and index by bytes that dense attention reads.",
            _RATIOS,
            *_COST,
        )
        self.context_tokens = self._counter(
            "winnow_context_tokens_total",
            "Tokens in context, summed over decode steps or prefilled queries; the mean over layers and KV heads.",
            *_COST,
        )
        self.attended_tokens = self._counter(
            "winnow_attended_tokens_total", "Of the tokens in context, those attended to.", *_COST
        )
        self.kv_read_tokens = self._counter(
            "winnow_kv_read_tokens_total", "Bytes read of KV cache and index, divided by the bytes of a token.", *_COST
        )
        self.decode_steps = self._counter(
            "winnow_decode_steps_total",
            "Decode steps. Mode: sparse or dense. A step is dense if its policy is, or if the context is too short for "
            "the policy to gain.",
            *_DECODE,
            "mode",
        )
        self.terminated_ratio = self._histogram(
            "winnow_terminated_ratio",
            "Of each answer with early termination: traversals (layer, KV head, step) stopped early by traversals.",
            _SHARES,
            *_DECODE,
        )
        self.skipped_ratio = self._histogram(
            "winnow_skipped_ratio",
            "Of each answer with early termination: tiles skipped by tiles selected.",
            _SHARES,
            *_DECODE,
        )
        self.early_terminations = self._counter(
            "winnow_early_terminations_total",
            "Answers with early termination in which at least one traversal was stopped early.",
            *_DECODE,
        )

        self.audited_steps = self._counter(
            "winnow_audited_steps_total",
            "Decode steps that were computed densely, too, to tell what they lost.",
            *_DECODE,
        )
        self.audited_share = self._histogram(
            "winnow_audited_share",
            "Of each audited answer: attention mass of what was attended to by that of the context, in audited steps.",
            _SHARES,
            *_DECODE,
        )
        self.audited_error = self._histogram(
            "winnow_audited_output_error",
            "Of each audited answer: distance of attention outputs from dense ones by the length of these.",
            _SHARES,
            *_DECODE,
        )
        self.audited_kl = self._histogram(
            "winnow_audited_next_token_kl",
            "Of each answer whose audits go on to the next token: KL from dense attention's in nats, mean of steps.",
            _NATS,
            *_DECODE,
        )
        self.audited_shortfall = self._histogram(
            "winnow_audited_shortfall",
            "Of each audited answer that promises a share of the attention: how far the share held is below it. "
            "Promise: p (the policy's), or quality (what the profile expects of a policy that the runtime chose).",
            _SHARES,
            *_DECODE,
            "promise",
        )
        self.quality_answers = self._counter(
            "winnow_quality_answers_total",
            "Answers whose policy the runtime chose. Quality: asked, or under_load where a lower one sufficed.",
            *_DECODE,
            "quality",
        )
        self.left_policy_answers = self._counter(
            "winnow_left_policy_answers_total",
            "Answers for which the runtime did not choose this policy: audits showed that it breaks its promise.",
            *_DECODE,
        )
        self.verifications = self._counter(
            "winnow_verifications_total", "Dense passes that checked drafts, of answers that were verified.", *_DECODE
        )
        self.drafted_tokens = self._counter("winnow_drafted_tokens_total", "Tokens that were drafted.", *_DECODE)
        self.accepted_tokens = self._counter(
            "winnow_accepted_tokens_total", "Of the tokens that were drafted, those that stood.", *_DECODE
        )
        self.tokens_per_verification = self._histogram(
            "winnow_tokens_per_verification",
            "Of each answer that was verified: tokens that a check came to, drafts that stood and one more.",
            _TOKENS_PER_VERIFICATION,
            *_DECODE,
        )

    def _add_runtime(self) -> None:
        self.runtime_errors = self._counter(
            "winnow_runtime_errors_total",
            "Requests that the runtime did not answer, or not completely, by kind.",
            "kind",
        )
        self.runtime_ready = self._gauge(
            "winnow_runtime_ready", "1 if the runtime answered when last asked, else 0.", "runtime"
        )
        self.runtime_calls = self._gauge(
            "winnow_runtime_requests_in_flight", "Requests of this replica that the runtime has, or is sent.", "runtime"
        )
        self.breaker_state = self._gauge(
            "winnow_runtime_breaker_state",
            "1 for the state of the runtime's circuit breaker, 0 for the others.",
            "runtime",
            "state",
        )

    def _add_admission(self) -> None:
        self.queued = self._gauge("winnow_queued_requests", "Generation requests that wait for others to end.")
        self.admitted = self._gauge("winnow_admitted_requests", "Generation requests that were let through and run.")
        self.queue_wait = self._histogram(
            "winnow_queue_wait_seconds",
            "How long generation requests that were let through had waited; 0 for most, or there is too much load.",
            _SECONDS,
        )
        self.draining = self._gauge("winnow_draining", "1 while the service drains, else 0.")

    def _add_store(self) -> None:
        self.store_writes = self._counter(
            "winnow_store_writes_total", "Writes that the store has acknowledged.", "collection"
        )
        self.store_write_errors = self._counter(
            "winnow_store_write_errors_total",
            "Writes that the store did not acknowledge because it was away; a revision conflict is a refusal.",
            "collection",
        )
        self.store_read_errors = self._counter(
            "winnow_store_read_errors_total", "Times that the store could not be read."
        )
        self.store_write_duration = self._histogram(
            "winnow_store_write_duration_seconds", "Until the store has acknowledged a write.", _WRITE_SECONDS
        )
        self.store_revisions_read = self._counter(
            "winnow_store_revisions_read_total",
            "Revisions that this replica has read from the store: changes, and all there is when it starts.",
            "collection",
        )
        for collection in _COLLECTIONS:
            for counter in (self.store_writes, self.store_write_errors, self.store_revisions_read):
                counter.labels(collection)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, documentation, labels, buckets=buckets, registry=self.registry)
