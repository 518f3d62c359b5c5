"""Tactic (Zhu et al., "Tactic: Adaptive Sparse Attention with Clustering and Distribution Fitting").

Each query head takes clusters of keys (section 3.2) in the order of their predicted scores until they hold a share p of
its attention mass. A KV head attends to the union over its group. Tokens in no usable cluster (the first ones, the
newest, the end of the prompt) are always attended to, and their mass is exact.

What is not as in the paper:

- Sinks: the first tokens are in no cluster. A real model's first token may hold most of a head's attention (an
  attention sink), and the centroid of a cluster that it is in does not show that.
- The mass of a cluster (the paper ranks by query · centroid, and reads the mass off a curve that it fits to sampled
  weights, sections 3.3 and 3.4): a member's weight is predicted to be exp(s q·μ + v ÷ 2) with
  v = ρ s² Σ w q² ÷ d, where s scales scores, μ is the centroid, ρ the members' mean squared distance from it, d the
  head dimension, and w, one number an element, what part each element makes of such distances in the cluster's span.
  That is the mean of exp(s q·k) over keys k that are spread normally around μ, as far along each element as keys of
  the span are.
- Where a query looks up one token, v is so large that such a mean is of scores that no token has. So scores above a
  bound do not count (``_gains``): the highest that is to be expected of any of 64 neighbouring clusters. The higher v,
  the less counts s q·μ beside it: the token may be in any cluster that spreads far enough.
- Scores in steps of an eighth of an octave; a query head takes whole clusters, all from the step on with which it has
  enough (``PredictedAttention``). Nothing is sorted.
- p above ``WHOLE_ABOVE`` takes everything.
- A KV head that would read more than three quarters of the context (after the cap) attends to all of it, as ``dense``
  does, newest first: to read everything in a row costs less than to look most of it up. Where the tokens in no cluster
  are so many by themselves, nothing is scored and no index is read.
- Order, where early termination needs one: by the share of the mass that a token holds, mean over the group, in steps
  of a quarter of an octave (``share_steps``). It is predicted for clusters, and exact for the tokens in no cluster, of
  which there may be hundreds that hold most of the mass or next to none: they are put in order by sixteens. In a step
  tokens in no cluster come first, newest first, then clusters by number.
- A cap keeps sinks, then what else is in no cluster, newest first, then clusters by their steps.
- The reported share is of what was read, and its mass is exact: attention itself yields it. The mass of the clusters
  that are not selected is predicted, and corrected by a sample: a cluster is sampled in proportion to the mass that it
  is predicted to hold, mean over the group, so that what is left out, p being reached, has at most ``SAMPLED`` samples.
  What the sampled tokens weigh, by how much they were predicted to, is for each query head the correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter, peek_keys
from winnow_kernels.attend.reference import Attended, group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.full_layers import FullLayersStep
from winnow_kernels.decode.predicted_attention import PredictedAttention
from winnow_kernels.decode.row_groups import termination_of
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.clusters import ClusterIndex, Clusters
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.policies.tactic.parameters import WHOLE_ABOVE, Tactic
from winnow_kernels.policies.tactic.sample import chances, expected_samples
from winnow_kernels.selection.tokens import Selection

WHOLE_SHARE: Final = 0.75
"""A KV head that would attend to more than this share of the context attends to all of it."""
STEPS_OF_OCTAVE: Final = 4
"""Into how many steps of the order shares of the mass are divided from one to its half."""
FIRST_OCTAVE: Final = 2
"""Shares above 2 to the power of minus this are one step."""
SHARE_STEPS: Final = 64
"""Steps: as many as lead to 2^-18, a token's share in an even context of 256K; what is below is in the last."""
COMPARED: Final = 64
"""Clusters of a row, one after the other, that are asked together for the highest score to be expected."""
DEVIATIONS: Final = 2.7
"""Standard deviations by which the highest of a cluster's scores is expected to exceed their mean: measured."""
_LOG2_E: Final = 1.4426950408889634
_MIN_VARIANCE: Final = 1e-30


@dataclass(frozen=True)
class _Choice:
    """What one request attends to.

    Attributes:
        slots: of each KV head, in order.
        selected: float64 [KV heads, group]; logarithm of the mass that this is predicted to have.
        rest: of all else; -inf where everything is selected.
        capped: whether the cap has cut a selection.
    """

    slots: list[Tensor]
    selected: Tensor
    rest: Tensor
    capped: bool = False


class TacticStep(FullLayersStep["TacticStep"]):
    """Attend to what is in no cluster, then to each query head's share of the clustered tokens."""

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        index: ClusterIndex,
        parameters: Sequence[Tactic],
        clustered: Tensor,
    ) -> None:
        """Find the spans that each request can use.

        Args:
            context: as in DecodeStep.
            scale: as in DecodeStep.
            termination: as in DecodeStep.
            index: the server's clusters.
            parameters: of each request.
            clustered: int64 [requests]; leading tokens of each request that may be taken from clusters, less than its
                length (``clustered_until``). Those among them that are in no usable span are attended in full.

        Raises:
            ValueError: not one set of parameters for each request, or a newest token said to be clustered.
        """
        super().__init__(context, scale, termination, [p.full_layers for p in parameters])
        if len(parameters) != context.requests:
            raise ValueError(f"parameters: {context.requests} requests, but {len(parameters)} sets of parameters")
        if bool((clustered >= context.lengths).any()):
            raise ValueError(
                f"clustered: must be less than the lengths, {context.lengths.tolist()}; it is {clustered.tolist()}"
            )
        self.index = index
        self._parameters, self._clustered = parameters, clustered
        device = context.device
        self._estimated_share = torch.zeros(context.requests, dtype=torch.float64, device=device)
        self._capped = torch.zeros(context.requests, dtype=torch.bool, device=device)
        self._lengths: list[int] = context.lengths.tolist()
        sinks = torch.tensor([p.sinks for p in parameters], device=device)
        self.spans = index.lookup(context, clustered, sinks)
        kept = (context.lengths - self.spans.tokens).tolist()
        self._whole = [
            min(count, own.max_tokens or count) > WHOLE_SHARE * length
            for count, own, length in zip(kept, parameters, self._lengths, strict=True)
        ]
        whole = torch.tensor(self._whole, device=device)
        # Where all is attended to, none comes first.
        self._sinks = torch.minimum(sinks, context.lengths).masked_fill(whole, 0)
        if any(self._whole):
            self.spans = index.lookup(context, clustered.masked_fill(whole, 0), sinks)
        self._spans_of = [self.spans.of_request(row) for row in range(context.requests)]
        self._keep_unclustered()
        self._is_row = torch.eye(context.requests, dtype=torch.int64, device=device)
        self._selected, self._rest = self._estimated_share, self._estimated_share

    @property
    def estimated_share(self) -> Tensor:
        """The share of attention mass that is believed to have been attended: float64 [requests].

        A mean over query heads, summed over the layers so far; 1 where everything was attended to. The mass of what was
        read is exact, that of the rest is predicted and corrected by a sample.
        """
        share = self._estimated_share.clone()
        for rows, step in self.steps_of_rows.items():
            share[list(rows)] += step.estimated_share
        return share

    @property
    def capped(self) -> Tensor:
        """Where ``max_tokens`` has cut a selection in some layer so far: bool [requests]."""
        capped = self._capped.clone()
        for rows, step in self.steps_of_rows.items():
            capped[list(rows)] |= step.capped
        return capped

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        if layer < max(self.full_layers):
            is_full = torch.tensor([layer < count for count in self.full_layers], device=queries.device)
            self._estimated_share += is_full.double()
        return super().attend(layer, queries, cache, meter)

    def step_of(self, rows: list[int]) -> TacticStep:
        return TacticStep(
            self.context.rows(rows),
            self.scale,
            termination_of(self.termination, rows),
            self.index,
            [self._parameters[row] for row in rows],
            self._clustered[rows],
        )

    def note(self, selection: Selection, attended: Attended) -> None:
        """Add up what is believed to have been attended: nobody but attention knows what was read of a selection."""
        read = attended.log_sum_exp.double().unflatten(1, self._rest.shape[1:]) * _LOG2_E
        is_cut = (attended.read < selection.counts)[..., None]
        # What is selected weighs at least as much as what was read of it.
        selected = self._selected.maximum(read).where(is_cut, read)
        unread = (selected - read).exp2() - 1 + (self._rest - read).exp2()
        self._estimated_share += (1 / (1 + unread)).mean((1, 2))

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:
        statistics.add(table_rows, Field.ESTIMATED_SHARE, self.estimated_share)
        statistics.add(table_rows, Field.ESTIMATES, float(layers))
        statistics.add(table_rows, Field.CAPPED_STEPS, self.capped)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        grouped = group(queries, cache.kv_heads)
        kept_scores = self._kept_scores(grouped, cache, meter)
        clusters = self.index.read(layer, self.spans) if self.spans.most else None
        meter.count_bytes(self.index.read_bytes(layer, self.spans))
        choices = []
        for row, whole in enumerate(self._whole):
            if whole:
                nothing = kept_scores.new_full(kept_scores.shape[1:3], -torch.inf, dtype=torch.float64)
                choices.append(_Choice([self._newest_first(row)] * cache.kv_heads, nothing, nothing))
            elif clusters is None or int(self.spans.tokens[row]) == 0:
                choices.append(self._choose_kept(row, kept_scores[row]))
            else:
                predicted = self._predicted(row, grouped[row], kept_scores[row], clusters)
                choices.append(self._choose(row, layer, grouped[row], kept_scores[row], predicted, cache, meter))
        counts = torch.tensor([[len(head) for head in own.slots] for own in choices], device=queries.device)
        slots = counts.new_zeros(*counts.shape, int(counts.max()))
        for row, own in enumerate(choices):
            for head, of_head in enumerate(own.slots):
                slots[row, head, : len(of_head)] = of_head
        self._selected = torch.stack([own.selected for own in choices])
        self._rest = torch.stack([own.rest for own in choices])
        self._capped |= torch.tensor([own.capped for own in choices], device=queries.device)
        return Selection(slots, counts, counts == self.context.lengths[:, None])

    def taken(self, layer: int, queries: Tensor, cache: LayerCache) -> Tensor:
        """Return which clusters each query head takes by itself, where all requests have some.

        Args:
            layer: as in ``select``.
            queries: as in ``select``.
            cache: as in ``select``.

        Returns:
            bool [requests, KV heads, group, clusters].
        """
        grouped = group(queries, cache.kv_heads)
        kept_scores = self._kept_scores(grouped, cache, Meter(len(grouped), grouped.device))
        clusters = self.index.read(layer, self.spans)
        taken = torch.zeros(*grouped.shape[:3], clusters.sizes.shape[2], dtype=torch.bool, device=grouped.device)
        for row in range(len(grouped)):
            of_row = self._reaching(row, self._predicted(row, grouped[row], kept_scores[row], clusters))
            taken[row, ..., : of_row.shape[-1]] = of_row
        return taken

    def _reaching(self, row: int, predicted: PredictedAttention) -> Tensor:
        """Return which clusters each query head takes: bool [KV heads, group, clusters]."""
        p = self._parameters[row].p
        return predicted.reaching(p, self._lengths[row] if p > WHOLE_ABOVE else 0) & (predicted.tokens > 0)

    def _keep_unclustered(self) -> None:
        """Find the tokens in no cluster: the sinks, then the others, newest first."""
        context, spans, device = self.context, self.spans, self.context.device
        self._kept_slots: list[Tensor] = []
        for row, length in enumerate(self._lengths):
            is_kept = torch.ones(length, dtype=torch.bool, device=device)
            for start, covered in zip(spans.starts[row].tolist(), spans.covered[row].tolist(), strict=True):
                is_kept[start : start + covered] = False
            sinks = int(self._sinks[row])
            is_kept[:sinks] = False
            positions = torch.cat([torch.arange(sinks, device=device), is_kept.nonzero()[:, 0].flip(0)])
            self._kept_slots.append(context.slots[row].index_select(0, positions))

    def _kept_scores(self, grouped: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        """Return the scores, to base 2, of the tokens in no cluster: [requests, KV heads, group, n]; -inf for none."""
        # Where everything is kept, no score matters: a kernel reads none.
        own = [slots[: 0 if whole else None] for slots, whole in zip(self._kept_slots, self._whole, strict=True)]
        counts = torch.tensor([len(slots) for slots in own], device=grouped.device)
        slots = pad_sequence(own, batch_first=True)
        if slots.shape[1] == 0:
            return grouped.new_zeros(*grouped.shape[:3], 0)
        kept = Selection(slots[:, None].expand(-1, cache.kv_heads, -1), counts[:, None].expand(-1, cache.kv_heads))
        meter.count_bytes(counts * (cache.kv_heads * cache.vector_bytes))
        scores = grouped @ peek_keys(cache, kept).to(grouped.dtype).mT * (self.scale * _LOG2_E)
        return scores.masked_fill_(~kept.filled[:, :, None], -torch.inf)

    def _predicted(self, row: int, queries: Tensor, kept_scores: Tensor, clusters: Clusters) -> PredictedAttention:
        own = slice(0, int(self.spans.clusters[row]))
        centroids, spreads = clusters.centroids[:, row, own], clusters.spreads[:, row, own].float()
        sizes = clusters.sizes[:, row, own].long()
        scores = queries @ centroids.to(queries.dtype).mT * (self.scale * _LOG2_E)
        # How far scores vary along a query in a span, for each unit of its clusters' spread.
        along = queries.square() @ clusters.directions[:, row].float().mT
        along *= self.scale**2 / queries.shape[-1]
        along = along.repeat_interleave(self.index.clusters, dim=-1)[..., own]
        gains = _gains(scores, along * spreads[:, None], (sizes > 0)[:, None])
        return PredictedAttention.of(kept_scores, scores + gains, sizes)

    def _choose_kept(self, row: int, kept_scores: Tensor) -> _Choice:
        """Choose among the tokens in no cluster, where there are no others."""
        slots = self._kept_slots[row]
        count = min(len(slots), self._parameters[row].max_tokens or len(slots))
        scores = kept_scores[..., : len(slots)].double()
        highest = scores.amax(-1, keepdim=True)
        masses = (scores - highest).exp2()
        total = highest + masses.sum(-1, keepdim=True).log2()
        of_heads = [slots[:count]] * len(scores)
        if self.termination is not None:
            steps = _kept_steps(scores, total)[:, :count]
            of_heads = [own[of_head.argsort(stable=True)] for own, of_head in zip(of_heads, steps, strict=True)]
        selected, rest = masses[..., :count].sum(-1), masses[..., count:].sum(-1)
        return _Choice(of_heads, highest[..., 0] + selected.log2(), highest[..., 0] + rest.log2(), count < len(slots))

    def _choose(
        self,
        row: int,
        layer: int,
        queries: Tensor,
        kept_scores: Tensor,
        predicted: PredictedAttention,
        cache: LayerCache,
        meter: Meter,
    ) -> _Choice:
        parameters, length, kept_slots = self._parameters[row], self._lengths[row], self._kept_slots[row]
        sizes = predicted.tokens[:, 0]
        selected = self._reaching(row, predicted).any(1)
        wanted = len(kept_slots) + (sizes * selected).sum(-1)
        limit = parameters.max_tokens or length
        whole = (wanted.clamp_max(limit) > WHOLE_SHARE * length).tolist()
        is_cut = ((wanted > limit) & ~torch.tensor(whole, device=wanted.device)).tolist()
        kept = min(len(kept_slots), limit)
        order = share_steps(predicted.shares.mean(1))
        is_ordered = self.termination is not None or any(is_cut)
        listed, taken = [], []
        for head in range(cache.kv_heads):
            own = selected[head].nonzero().flatten()
            if is_ordered:
                own = own[order[head][own].argsort(stable=True)]
            ends = sizes[head][own].cumsum(0)
            listed.append(own[:0] if whole[head] else own)
            tokens = (limit - kept - (ends - sizes[head][own])).clamp_min(0).minimum(sizes[head][own])
            taken.append(tokens[: len(listed[-1])])
        members = self._members(layer, row, listed, taken)
        meter.count_bytes(self._is_row[row] * (sum(map(len, members)) * self.index.member_bytes(layer)))
        slots = [torch.cat([kept_slots[:kept], own]) for own in members]
        if self.termination is not None:
            of_kept = _kept_steps(kept_scores[..., : len(kept_slots)], predicted.total)[:, :kept]
            for head, (own, tokens) in enumerate(zip(listed, taken, strict=True)):
                steps = torch.cat([of_kept[head], order[head][own].repeat_interleave(tokens)])
                slots[head] = slots[head][steps.argsort(stable=True)]
        slots = [self._newest_first(row) if is_whole else own for is_whole, own in zip(whole, slots, strict=True)]
        masses = predicted.shares * sizes[:, None]
        cut = torch.zeros_like(sizes)
        for head, (own, tokens) in enumerate(zip(listed, taken, strict=True)):
            cut[head, own] = sizes[head, own] - tokens
        lost = (predicted.shares * cut[:, None]).sum(-1)
        lost += (kept_scores[..., kept : len(kept_slots)] - predicted.total).exp2().sum(-1)
        held = predicted.kept_share[..., 0] + (masses * selected[:, None]).sum(-1) - lost
        is_whole = torch.tensor(whole, device=sizes.device)[:, None]
        is_out = ~selected & (sizes > 0)
        rest = (masses * is_out[:, None]).sum(-1)
        rest *= self._correction(row, layer, queries, predicted, is_out, cache, meter)
        total = predicted.total[..., 0]
        return _Choice(
            slots,
            (total + held.log2()).masked_fill(is_whole, -torch.inf),
            (total + (rest + lost).log2()).masked_fill(is_whole, -torch.inf),
            any(is_cut),
        )

    def _correction(
        self,
        row: int,
        layer: int,
        queries: Tensor,
        predicted: PredictedAttention,
        is_out: Tensor,
        cache: LayerCache,
        meter: Meter,
    ) -> Tensor:
        """Return by what a sample says to multiply the predicted mass of clusters: float64 [KV heads, group].

        Args:
            row: the request.
            layer: the layer.
            queries: float32 [KV heads, group, head dim].
            predicted: of the request.
            is_out: bool [KV heads, clusters]; which clusters it is about.
            cache: the layer's.
            meter: counts what is read.
        """
        sizes = predicted.tokens[:, 0]
        shares = predicted.shares * sizes[:, None]
        # Where p takes everything nothing is left out.
        p = min(self._parameters[row].p, WHOLE_ABOVE)
        expected = expected_samples(shares.mean(1), sizes, p).where(is_out, 0.0)
        chance, place = chances(sizes.shape[1], cache.kv_heads, self._lengths[row], sizes.device)
        counts = (expected + chance).floor().long().where(is_out, 0)
        heads = range(cache.kv_heads)
        listed = [counts[head].nonzero().flatten() for head in heads]
        taken = [counts[head][own] for head, own in zip(heads, listed, strict=True)]
        of_listed = [sizes[head][own] for head, own in zip(heads, listed, strict=True)]
        first = [place[head][own] * of_listed[head] >> 16 for head, own in zip(heads, listed, strict=True)]
        ratios = torch.ones_like(predicted.total[..., 0])
        if not bool(counts.any()):
            return ratios
        members = self._members(layer, row, listed, taken, (first, of_listed))
        numbers = torch.tensor([len(own) for own in members], device=sizes.device)
        slots = pad_sequence(members, batch_first=True)
        meter.count_bytes(
            self._is_row[row] * int(numbers.sum()) * (cache.vector_bytes + self.index.member_bytes(layer))
        )
        keys = peek_keys(cache, Selection(slots[None], numbers[None]))[0].to(queries.dtype)
        scores = (queries @ keys.mT * (self.scale * _LOG2_E)).double() - predicted.total
        of_samples = [own.repeat_interleave(number) for own, number in zip(listed, taken, strict=True)]
        for head, own in enumerate(of_samples):
            # Each stands for as many tokens as its cluster has for each sample.
            worth = sizes[head][own] / expected[head][own]
            weighs = (scores[head, :, : len(own)].exp2() * worth).sum(-1)
            was_predicted = (predicted.shares[head][:, own] * worth).sum(-1)
            ratios[head] = (weighs / was_predicted).where(was_predicted > 0, 1.0)
        return ratios

    def _members(
        self,
        layer: int,
        row: int,
        clusters: list[Tensor],
        taken: list[Tensor],
        wrapped: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> list[Tensor]:
        """Return the slots of members of clusters, for each KV head.

        Args:
            layer: the layer.
            row: the request.
            clusters: int64 [n] of each KV head.
            taken: int64 [n]; how many members of each.
            wrapped: int64 [n] each; which member is the first of these, and how many there are: behind the last comes
                member 0 again. By default the first is member 0.
        """
        numbers, ranks = [], []
        for head, (own, counts) in enumerate(zip(clusters, taken, strict=True)):
            starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
            rank = torch.arange(len(starts), device=starts.device) - starts
            if wrapped is not None:
                first, sizes = (of_heads[head].repeat_interleave(counts) for of_heads in wrapped)
                rank = (rank + first) % sizes
            numbers.append(own.repeat_interleave(counts))
            ranks.append(rank)
        padded = (pad_sequence(of_heads, batch_first=True)[None] for of_heads in (numbers, ranks))
        positions = self.index.members(layer, self._spans_of[row], *padded)[0]
        slots = self.context.slots[row][positions]
        return [of_head[: len(own)] for of_head, own in zip(slots, numbers, strict=True)]

    def _newest_first(self, row: int) -> Tensor:
        return self.context.slots[row, : self._lengths[row]].flip(0)


def _gains(scores: Tensor, variances: Tensor, is_filled: Tensor) -> Tensor:
    """Return what spreading around their mean adds to the scores of clusters.

    Of scores that are spread normally around m with a variance v, exp(m + t - t² ÷ 2v) is about the mean weight of
    those up to m + t; from t = v on all weigh exp(m + v ÷ 2).

    Args:
        scores: float32 [KV heads, group, clusters]; means, to base 2.
        variances: float32, same shape; to base e.
        is_filled: bool [KV heads, 1, clusters]; which clusters have members.

    Returns:
        float32, same shape, to base 2.
    """
    count = scores.shape[-1]
    greatest = (scores + variances.sqrt() * (DEVIATIONS * _LOG2_E)).masked_fill(~is_filled, -torch.inf)
    padded = F.pad(greatest, (0, -count % COMPARED), value=-torch.inf)
    bounds = padded.unflatten(-1, (-1, COMPARED)).amax(-1).repeat_interleave(COMPARED, -1)[..., :count]
    reached = ((bounds - scores) / _LOG2_E).clamp_min_(0).minimum(variances)
    return (reached - reached.square() / (2 * variances).clamp_min_(_MIN_VARIANCE)) * _LOG2_E


def share_steps(shares: Tensor) -> Tensor:
    """Return in which step of the order ``shares`` of the mass are: int64, below ``SHARE_STEPS``."""
    return ((-FIRST_OCTAVE - shares.log2()) * STEPS_OF_OCTAVE).clamp_(0, SHARE_STEPS - 1).long()


def _kept_steps(scores: Tensor, total: Tensor) -> Tensor:
    """Return the steps of tokens in no cluster, which they have by sixteens: of their mean share.

    Args:
        scores: float32 [KV heads, group, n], in order.
        total: float64 [KV heads, group, 1]; logarithm of all mass.

    Returns:
        int64 [KV heads, n].
    """
    count = scores.shape[-1]
    shares = (scores - total).exp2()
    of_sixteens = F.pad(shares, (0, -count % CLUSTER_SIZE)).unflatten(-1, (-1, CLUSTER_SIZE)).sum((1, 3))
    sizes = (count - CLUSTER_SIZE * torch.arange(of_sixteens.shape[1], device=scores.device)).clamp_max(CLUSTER_SIZE)
    steps = share_steps(of_sixteens / (sizes * scores.shape[1]))
    return steps.repeat_interleave(CLUSTER_SIZE, dim=1)[:, :count]
