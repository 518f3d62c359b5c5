"""SnapKV (Li et al., "LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, section 4).

The last queries of the prompt vote, in each layer, for the tokens before them. A KV head attends to the tokens with
the most votes, to the window of those queries, to the prompt's first tokens as sinks (the paper has none) and to all
that is generated. The budget covers the prompt's tokens: SnapKV compresses the prompt and leaves generated tokens
alone. The other tokens are only not read, unless the request releases them.

Votes are averaged over the query heads of a group, so that a KV head keeps one set, and smoothed with a maximum over
neighbouring tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE, Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.request import PromptSelection
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.parameters import Voted
from winnow_kernels.selection.tokens import Selection, select_positions


class SnapKVState(PromptSelection):
    """What one request keeps of its prompt: positions, which stay true when its tokens move to other slots.

    Attributes:
        parameters: of the request.
        observation: the queries that vote; a layer's are dropped once they have.
        kept: for each layer that has voted, int64 [KV heads, kept], the window from its newest token back, then the
            sinks, then positions by descending votes, equal votes in the prompt's order.
    """

    def __init__(self, parameters: Voted, observation: ObservationBuffer) -> None:
        self.parameters = parameters
        self.observation = observation
        self.kept: dict[int, Tensor] = {}

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt."""
        return self.observation.prompt_length

    def layer_votes(self, layer: int) -> int:
        """Return how many tokens a KV head keeps in ``layer`` for their votes, beside the window and the sinks."""
        del layer
        window, sinks = self.observation.window, self.parameters.sinks
        voted_on = max(0, self.prompt_length - window - sinks)
        return min(max(0, self.parameters.tokens(self.prompt_length) - window - sinks), voted_on)

    def record(self, layer: int, queries: Tensor, first_position: int) -> None:
        self.observation.record(layer, queries, first_position)

    def vote(self, layer: int, cache: LayerCache, slots: Tensor, scale: float, meter: Meter) -> None:
        votes = self.observation.votes(layer, cache, slots, scale, meter)
        size = self.parameters.kernel_size
        pooled = F.max_pool1d(votes, size, stride=1, padding=size // 2) if votes.shape[1] else votes
        self.keep(layer, pooled)
        self.observation.forget(layer)

    def keep(self, layer: int, votes: Tensor) -> None:
        """Keep the window, the sinks and what has the most ``votes``, float [KV heads, prompt length − window]."""
        self.keep_most(layer, votes, self.layer_votes(layer))

    def keep_most(self, layer: int, votes: Tensor, most: int) -> None:
        """Keep the window, the sinks and for each KV head the ``most`` tokens with the most ``votes``."""
        sinks = min(self.parameters.sinks, votes.shape[1])
        # Neighbours have equal votes after the maximum: a stable order makes every device keep the same ones.
        chosen = sinks + votes[:, sinks:].sort(dim=-1, descending=True, stable=True).indices[:, :most]
        newest_first = torch.arange(
            self.prompt_length - 1, self.observation.first_position - 1, -1, device=votes.device
        )
        always = torch.cat((newest_first, torch.arange(sinks, device=votes.device)))
        self.kept[layer] = torch.cat((always.expand(len(votes), -1), chosen), dim=1)


class SnapKVStep(DecodeStep):
    """Attend to what was generated and to what the requests keep of their prompts, in the order of ``select_kept``."""

    def __init__(
        self, context: Context, scale: float, termination: Termination | None, states: Sequence[SnapKVState]
    ) -> None:
        super().__init__(context, scale, termination)
        self._states = states
        self._prompts = torch.tensor([state.prompt_length for state in states], device=context.device)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        self._vote(layer, cache, meter)
        kept = [state.places(layer) for state in self._states]
        return select_kept(
            self.context, self._prompts, kept, torch.stack([state.counts(layer) for state in self._states])
        )

    def _vote(self, layer: int, cache: LayerCache, meter: Meter) -> None:
        for row, state in enumerate(self._states):
            if layer not in state.kept:
                own = Meter(1, self.context.device)
                state.vote(layer, cache, self.context.slots[row, : state.prompt_length], self.scale, own)
                meter.read_bytes[row] += own.read_bytes[0]


def select_kept(context: Context, since: Tensor, kept: Sequence[Tensor], kept_counts: Tensor) -> Selection:
    """Return the selection of all tokens from some position on, and of what is kept of those before.

    The newest tile is read first. What is kept and the rest of the later tokens, newest first, follow in proportion:
    nobody has voted for the latter, and whichever of the two came last would be dropped unseen if the output settled
    on the other. So every tile has some of both until they end together.

    Args:
        context: the requests' contexts.
        since: int64 [requests]; the position from which on all is selected.
        kept: for each request, int64 [KV heads, most], positions before ``since`` in the order in which they are read.
        kept_counts: int64 [requests, KV heads]; how many of these count.
    """
    later = context.lengths - since
    counts = later[:, None] + kept_counts
    kept_counts = kept_counts[..., None]
    most_kept = max(1, *(each.shape[1] for each in kept))
    table = torch.stack([F.pad(each, (0, most_kept - each.shape[1])) for each in kept])
    index = torch.arange(int(counts.max()), device=context.device)
    front = later.clamp_max(TILE)[:, None, None]
    behind = (counts[..., None] - front).clamp_min(1)
    # How many of the tokens before an index are kept ones.
    before, through = (-(-(index + i - front).clamp_min(0) * kept_counts // behind) for i in (0, 1))
    of_kept = table.take_along_dim(before.clamp_max(most_kept - 1), 2)
    newest_first = context.lengths[:, None, None] - 1 - (index - before)
    is_kept = (index >= front) & (through > before)
    positions = torch.where(is_kept, of_kept, newest_first)
    return select_positions(context, positions, counts)
