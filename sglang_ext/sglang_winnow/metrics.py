"""What the runtime counts beyond single requests: in ``/server_info`` always, in Prometheus with --enable-metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

PREFIX: Final = "sglang_winnow_"


@dataclass(frozen=True)
class CounterName:
    """A counter: its name without prefix and ``_total``, what it counts, and its labels."""

    name: str
    documentation: str
    labels: tuple[str, ...] = ()


UNCACHED_TOKENS: Final = CounterName(
    "uncached_generated_tokens", "Generated tokens whose KV was not kept for later prompts, because it is not dense."
)
KEPT_TOKENS: Final = CounterName(
    "kept_generated_tokens", "Generated tokens whose KV is not dense and was kept for later turns of the same policy."
)
RELEASED_TOKENS: Final = CounterName(
    "released_prompt_tokens", "Prompt tokens whose KV slots were given back while their request was running."
)
REQUESTS: Final = CounterName("requests", "Requests that ended.", ("policy", "outcome"))
_COST_LABELS: Final = ("phase", "policy", "outcome")
CONTEXT_TOKENS: Final = CounterName(
    "context_tokens", "Tokens in context, summed over layers, KV heads and steps or queries.", _COST_LABELS
)
ATTENDED_TOKENS: Final = CounterName("attended_tokens", "Of the context tokens, those attended to.", _COST_LABELS)
DENSE_BYTES: Final = CounterName(
    "dense_kv_bytes",
    "Bytes of KV cache that dense attention reads; in prefill, once for each block of queries.",
    _COST_LABELS,
)
READ_BYTES: Final = CounterName("read_kv_bytes", "Bytes of KV cache and index that were read.", _COST_LABELS)
VERIFICATIONS: Final = CounterName("verifications", "Dense passes of a request that checked drafts.", ("policy",))
DRAFTED_TOKENS: Final = CounterName("drafted_tokens", "Tokens drafted by a sparse policy.", ("policy",))
ACCEPTED_TOKENS: Final = CounterName("accepted_tokens", "Of the drafted tokens, those that stood.", ("policy",))
SUPERSET_STEPS: Final = CounterName(
    "superset_decode_steps",
    "Decode steps on a GPU that ran the graph of a larger set of policies than they needed.",
    ("graph",),
)
LEFT_POLICIES: Final = CounterName(
    "left_policies",
    "Policies that are chosen no more because audits showed that they break their promise.",
    ("policy",),
)
UNDER_LOAD_REQUESTS: Final = CounterName(
    "under_load_requests", "Requests whose policy was chosen by the quality that suffices under load.", ("policy",)
)
COUNTERS: Final = (
    UNCACHED_TOKENS,
    KEPT_TOKENS,
    RELEASED_TOKENS,
    REQUESTS,
    CONTEXT_TOKENS,
    ATTENDED_TOKENS,
    DENSE_BYTES,
    READ_BYTES,
    VERIFICATIONS,
    DRAFTED_TOKENS,
    ACCEPTED_TOKENS,
    SUPERSET_STEPS,
    LEFT_POLICIES,
    UNDER_LOAD_REQUESTS,
)


class Metrics:
    """The counters of one scheduler process."""

    def __init__(self) -> None:
        self._totals: defaultdict[CounterName, float] = defaultdict(float)
        self._exported: dict[CounterName, Any] = {}

    def export(self, make_counter: Callable[[str, str, tuple[str, ...]], Any]) -> None:
        """Count in counters made by ``make_counter(name, documentation, labels)`` too, from now on."""
        self._exported = {
            counter: make_counter(PREFIX + counter.name, counter.documentation, counter.labels) for counter in COUNTERS
        }

    def add(self, counter: CounterName, amount: float = 1, **labels: str) -> None:
        """Add ``amount``; ``labels`` gives each label of the counter."""
        self._totals[counter] += amount
        if exported := self._exported.get(counter):
            (exported.labels(**labels) if labels else exported).inc(amount)

    def totals(self) -> dict[str, float]:
        """Return every counter's sum over its labels."""
        return {f"{counter.name}_total": self._totals[counter] for counter in COUNTERS}


METRICS: Final = Metrics()


def _export(_nothing: None, scheduler: Scheduler, *_: object, **__: object) -> None:
    if scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
        # prometheus_client reads the folder that processes share when it is imported; SGLang has set it by now.
        from prometheus_client import Counter  # noqa: PLC0415

        METRICS.export(Counter)


HOOKS: Final = (Hook("sglang.srt.managers.scheduler.Scheduler.init_metrics_collector", _export, HookType.AFTER),)
