"""CUDA graphs for the kinds of batches: a graph launches the selectors that its batches can need, and no others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.device.decode import Variant
from sglang_winnow.graph_sets import ALL, EARLY_TERMINATION, GraphSet
from sglang_winnow.hooks import Hook
from sglang_winnow.own_backend import own_backend
from sglang_winnow.sglang_versions.releases import ATTENTION_GRAPH_VARIANTS, PASSES_WITHOUT_GRAPH, runs
from winnow_kernels.policies.declarations import DECLARATIONS, in_order

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DENSE: Final = "dense"
ANY_LAYERS: Final = "any_layers"
AUDIT: Final = "audit"


def variants_of(
    kinds: Collection[str],
    sets: Collection[GraphSet],
    layers: int,
    delta_layers: Collection[int],
    *,
    audits: bool = False,
) -> dict[str, Variant]:
    """Return the variants of a server by their labels, each after those that launch less.

    Beside those of ``sets`` there are one without a policy, one of each kind alone, and one that serves every batch.
    Where steps are audited each but the first has a twin that audits: it launches the same, and what audits beside it.

    Args:
        kinds: of the policies that the server serves, besides dense.
        sets: which of them have graphs together.
        layers: how many the model has.
        delta_layers: of the model's profile, in which all variants but the last let rows attend by themselves; without
            a profile requests name some, which may be any.
        audits: whether steps are audited.
    """
    everywhere = frozenset(range(layers))
    profiled = frozenset(delta_layers) or everywhere

    def variant(own: Collection[str], *, ordered: bool) -> Variant:
        attends = any(DECLARATIONS[kind].has_own_layers for kind in own)
        return Variant(frozenset(own), ordered, profiled if attends else frozenset())

    everything = variant(kinds, ordered=True)
    found = {
        variant((), ordered=False),
        *(variant({kind}, ordered=False) for kind in kinds),
        *(variant(own.kinds, ordered=own.ordered) for own in sets),
        everything,
        replace(everything, own_layers=everywhere if everything.own_layers else frozenset()),
    }
    if audits:
        found |= {replace(each, audited=True) for each in found if not each.is_dense}
    return {_label(each, kinds, profiled): each for each in sorted(found, key=_size)}


def variant_for(needed: Variant, variants: Mapping[str, Variant]) -> str:
    """Return the label of the smallest variant that launches all that is needed: the first, in their order."""
    return next(label for label, variant in variants.items() if variant.covers(needed))


def _size(variant: Variant) -> tuple[int, bool, int, bool, list[str]]:
    # A twin that audits comes behind its own: no batch without audits gets it.
    return len(variant.kinds), variant.ordered, len(variant.own_layers), variant.audited, in_order(variant.kinds)


def _label(variant: Variant, kinds: Collection[str], profiled: Collection[int]) -> str:
    named = [ALL] if len(kinds) > 1 and len(variant.kinds) == len(kinds) else in_order(variant.kinds) or [DENSE]
    early_termination = [EARLY_TERMINATION] if variant.ordered else []
    any_layers = [ANY_LAYERS] if len(variant.own_layers) > len(profiled) else []
    audit = [AUDIT] if variant.audited else []
    return "+".join([*named, *early_termination, *any_layers, *audit])


@dataclass(frozen=True)
class GraphVariants:
    """The CUDA graphs of a server for SGLang's decode runner (``attention_graph_variants``): a graph for each label."""

    backend: Any

    @property
    def capture_labels(self) -> tuple[str, ...]:
        """The labels, in the order of capture."""
        return tuple(self.backend.variants)

    def select(self, _batch: ForwardBatch) -> str:
        """Return the label of the batch that runs next, which was noted when SGLang made it."""
        return str(self.backend.label)


def _name_variants(runner: Any) -> None:
    if hasattr(backend := own_backend(runner), "variants"):
        runner.attention_graph_variants = GraphVariants(backend)


def _note_captured(
    runner: Any,
    size: int,
    _forward: Callable[..., Any],
    _stream: int | None,
    _lora: str | None,
    attention_variant: str,
) -> None:
    backend = own_backend(runner)
    if not hasattr(backend, "variants"):
        return
    if attention_variant == next(iter(backend.variants)):
        backend.compile(size)
    backend.capturing = attention_variant


def _capture_all(
    capture: Callable[..., None], runner: Any, size: int, forward: Callable[..., Any], *arguments: Any, **named: Any
) -> None:
    # Releases without variants by attention have them by LoRA: these labels are Winnow's.
    backend = own_backend(runner)
    labels = getattr(backend, "variants", None)
    if labels is None:
        capture(runner, size, forward, *arguments, **named)
        return
    stream_index, *_ = arguments or [named.get("stream_idx")]
    backend.compile(size)
    for label in labels:
        backend.capturing = label
        capture(runner, size, forward, stream_index, label)
    backend.capturing = None


def _label_of(resolve: Callable[..., str | None], runner: Any, forward_batch: ForwardBatch) -> str | None:
    backend = own_backend(runner)
    return backend.label if hasattr(backend, "variants") else resolve(runner, forward_batch)


def _can_run(can_run: Callable[..., bool], runner: Any, forward_batch: ForwardBatch) -> bool:
    return not getattr(own_backend(runner), "runs_without_graph", False) and can_run(runner, forward_batch)


_RUNNER: Final = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
HOOKS: Final = (
    (
        Hook(f"{_RUNNER}.capture", _name_variants, HookType.BEFORE),
        Hook(f"{_RUNNER}.capture_one_shape", _note_captured, HookType.BEFORE),
    )
    if runs(ATTENTION_GRAPH_VARIANTS)
    else (
        Hook(f"{_RUNNER}.capture_one_shape", _capture_all, HookType.AROUND),
        Hook(f"{_RUNNER}._resolve_lora_variant", _label_of, HookType.AROUND),
    )
) + ((Hook(f"{_RUNNER}.can_run_graph", _can_run, HookType.AROUND),) if PASSES_WITHOUT_GRAPH else ())
