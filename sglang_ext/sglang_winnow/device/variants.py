"""CUDA graphs for the kinds of batches: a graph launches the selectors that its batches can need, and no others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.device.decode import Variant
from sglang_winnow.hooks import Hook
from winnow_kernels.decode.gpu_rows import Family

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DENSE: Final = "dense"
ANY: Final = "any"


def variants_of(families: Collection[Family], layers: int, delta_layers: Collection[int]) -> dict[str, Variant]:
    """Return the variants of a server by their labels, each after those that launch less.

    Args:
        families: what the server serves, besides dense.
        layers: how many the model has.
        delta_layers: of the model's profile; a request with others is served by the last variant.
    """
    variants = {DENSE: Variant(frozenset())}
    for family in sorted(families):
        of_delta = frozenset(delta_layers) if family == Family.DELTA else frozenset()
        variants[family.name.lower()] = Variant(frozenset({family}), delta_layers=of_delta)
    anywhere = frozenset(range(layers) if Family.DELTA in families else ())
    variants[ANY] = Variant(frozenset(families), ordered=True, delta_layers=anywhere)
    return variants


def variant_for(needed: Variant, variants: Mapping[str, Variant]) -> str:
    """Return the label of the first variant that launches all that is needed."""
    for label, variant in variants.items():
        if (
            needed.families <= variant.families
            and needed.ordered <= variant.ordered
            and needed.delta_layers <= variant.delta_layers
        ):
            return label
    raise AssertionError("the last variant launches everything")


def _capture_all(
    capture: Callable[..., None], runner: Any, size: int, forward: Callable[..., Any], *arguments: Any, **named: Any
) -> None:
    backend = runner.attn_backend
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
    backend = runner.attn_backend
    return backend.label if hasattr(backend, "variants") else resolve(runner, forward_batch)


_RUNNER: Final = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
HOOKS: Final = (
    Hook(f"{_RUNNER}.capture_one_shape", _capture_all, HookType.AROUND),
    Hook(f"{_RUNNER}._resolve_lora_variant", _label_of, HookType.AROUND),
)
