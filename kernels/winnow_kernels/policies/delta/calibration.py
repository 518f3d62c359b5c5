"""Which layers of a model should be Δ-layers, in place of DELTA's section 5.1 and Appendix D.

Between two Δ-layers all layers attend to what the first of them selected. So what counts is how much of its own
attention a layer finds there. The coverage of layer j by layer i is the share of layer j's token scores that lies on
the pages that layer i would select; a token's score is the greatest weight that any query head gives it, by which
DELTA selects. Those layers are chosen that cover all layers best in the mean over layers, decode steps and prompts.

The paper takes the layers at which attention shifts most from one layer to the next. Where such shifts all come before
the layers that look things up, as in SmolLM2 (layers 2, 7 and 9 of 30, and lookups in 14 to 23), nothing that is looked
up is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.selection.pages import order_pages, pages_kept, pages_of

DELTA_LAYERS = 3
_FEWEST_PER_DELTA = 3
"""Layers for each Δ-layer, itself included: where most are Δ-layers, nothing is saved."""
SELECTED_SHARE = 1 / 8
"""Of a context, what each layer selects here: what ``delta`` reads of 8K tokens by default."""
_SINKS, _RECENT = 16, 16


def token_scores(weights: Tensor) -> Tensor:
    """Return the maximum over heads of attention weights [query heads, tokens], as float64 [tokens]."""
    return weights.amax(0).double()


def layer_coverage(scores: Sequence[Tensor], page_size: int = 16) -> Tensor:
    """Return the coverage of one decode step.

    Args:
        scores: of each layer, float [tokens].
        page_size: tokens in a page.

    Returns:
        float64 [layers, layers]; row i, column j: the share of layer j's scores on the pages that layer i selects.
    """
    stacked = torch.stack(list(scores)).double()
    layers, tokens = stacked.shape

    def each(number: int) -> Tensor:
        return torch.full((layers,), number, dtype=torch.int64, device=stacked.device)

    pages = pages_of(tokens, page_size)
    of_pages = F.pad(stacked, (0, -tokens % page_size)).reshape(layers, pages, page_size).sum(-1)
    recent, sinks = each(pages_of(_RECENT, page_size)), each(pages_of(_SINKS, page_size))
    width = min(pages, pages_kept(int(SELECTED_SHARE * tokens), _RECENT, _SINKS, page_size))
    chosen = order_pages(of_pages[:, None], each(pages - 1), recent, sinks, width)[:, 0]
    is_chosen = torch.zeros_like(of_pages).scatter_(1, chosen, 1.0)
    return is_chosen @ (of_pages / of_pages.sum(-1, keepdim=True)).mT


class MeanCoverage:
    """The mean coverage of many decode steps.

    Attributes:
        steps: how many there were.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._sum: Tensor | None = None

    def add(self, coverage: Tensor) -> None:
        """Count one step's coverage, float [layers, layers]."""
        self._sum = coverage if self._sum is None else self._sum + coverage
        self.steps += 1

    def mean(self) -> Tensor:
        """Return the mean coverage, float [layers, layers].

        Raises:
            ValueError: there were no steps.
        """
        if self._sum is None:
            raise ValueError("no decode step was observed")
        return self._sum / self.steps


def choose_delta_layers(coverage: Tensor, full_layers: int, count: int | None = None) -> tuple[int, ...]:
    """Choose the Δ-layers, ascending, that cover the layers best; the first is ``full_layers``.

    Args:
        coverage: float [layers, layers], as ``layer_coverage``.
        full_layers: how many of the first layers are always dense.
        count: how many Δ-layers, at least 1; fewer if there are not as many layers. Without it ``DELTA_LAYERS``, or a
            third of the layers, whichever is less.

    Raises:
        ValueError: there is no layer beyond the full ones.
    """
    layers = len(coverage)
    if full_layers >= layers:
        raise ValueError(f"full_layers: leaves none of the {layers} layers that see the whole context")
    if count is None:
        count = min(DELTA_LAYERS, max(1, (layers - full_layers) // _FEWEST_PER_DELTA))
    # What a Δ-layer and the layers up to the next one find: itself everything.
    found = coverage.double().cpu().triu(1).cumsum(1) + torch.eye(layers, dtype=torch.float64).cumsum(1)
    # best[i]: what is found from layer i on, when it is a Δ-layer and some others follow; and which do.
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {layer: (float(found[layer, -1]), (layer,)) for layer in range(full_layers, layers)}
    for _ in range(1, min(count, layers - full_layers)):
        best = {
            layer: max(
                (float(found[layer, after - 1]) + rest, (layer, *others))
                for after, (rest, others) in best.items()
                if after > layer
            )
            for layer in range(full_layers, layers)
            if any(after > layer for after in best)
        }
    return best[full_layers][1]


def covered(coverage: Tensor, delta_layers: Sequence[int]) -> list[float]:
    """Return for each layer the share of its scores that it finds with these Δ-layers; 1 where it attends to all."""
    shares = []
    for layer in range(len(coverage)):
        before = [delta for delta in delta_layers if delta <= layer]
        shares.append(1.0 if not before or before[-1] == layer else float(coverage[before[-1], layer]))
    return shares
