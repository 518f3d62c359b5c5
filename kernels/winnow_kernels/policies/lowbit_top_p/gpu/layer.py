"""What a selection is made in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.lowbit_top_p.gpu.state import Policies


@dataclass(frozen=True, eq=False)
class Layer:
    """What is selected in, in one layer and step.

    Attributes:
        number: of the layer.
        queries: [rows, query heads, head dim]; rows and heads may be strided.
        cache: of the layer.
        index: codes of all layers' keys; those of complete pages stand.
        batch: the rows.
        policies: what they ask for.
        scale: what scores are multiplied by before the softmax.
    """

    number: int
    queries: Tensor
    cache: LayerCache
    index: KeyCodes
    batch: DecodeBatch
    policies: Policies
    scale: float
