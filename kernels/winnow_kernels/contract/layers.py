"""In which layers policies act: those that attend to all tokens of the context."""

from __future__ import annotations

from collections.abc import Collection

from winnow_kernels.contract.fields import PolicyError


def check_layers(
    path: str, layers: Collection[int], sliding_layers: Collection[int], linear_layers: Collection[int]
) -> None:
    """Refuse layers in which policies do not act.

    Args:
        path: of the field that names ``layers``.
        layers: that are named.
        sliding_layers: those of the model that have a sliding window.
        linear_layers: those of the model that have linear attention.

    Raises:
        PolicyError: one of ``layers`` is among them.
    """
    if sliding := set(sliding_layers).intersection(layers):
        raise PolicyError(path, f"must be layers that see the whole context: layer {min(sliding)} has a sliding window")
    if linear := set(linear_layers).intersection(layers):
        raise PolicyError(path, f"must be layers that attend to tokens: layer {min(linear)} has linear attention")
