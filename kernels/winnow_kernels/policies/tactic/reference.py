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
- Where scores have a soft cap, so have these means. v is multiplied by the square of how steep the cap is there, and no
  prediction exceeds the cap.
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
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend.dense import take
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter, peek_keys
from winnow_kernels.attend.reference import Attended, group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.choices import Alike, Choice
from winnow_kernels.decode.full_layers import FullLayersStep
from winnow_kernels.decode.predicted_attention import PredictedAttention
from winnow_kernels.decode.row_groups import termination_of
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.clusters import ClusterIndex, Spans
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.policies.tactic.parameters import WHOLE_ABOVE, Tactic
from winnow_kernels.policies.tactic.sample import chances, expected_samples
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import capped

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


class _Key(NamedTuple):
    """What requests agree in that are computed together: their parameters, and which of their tokens are in clusters.

    Attributes:
        parameters: of each.
        spans: the first token and the number of tokens of each span that is used.
        clustered: how many tokens are in clusters.
    """

    parameters: Tactic
    spans: tuple[tuple[int, int], ...]
    clustered: int


@dataclass(frozen=True, eq=False)
class _Clustered:
    """Requests that are computed together.

    Attributes:
        alike: the requests.
        spans: of these.
        clusters: of each request.
        kept: int64 [requests, n]; slots of the tokens in no cluster, in order.
        chance: float32 [KV heads, clusters] (``chances``).
        place: int64, same shape.
    """

    alike: Alike[_Key]
    spans: Spans
    clusters: int
    kept: Tensor
    chance: Tensor
    place: Tensor

    @classmethod
    def of(cls, alike: Alike[_Key], spans: Spans, kv_heads: int) -> _Clustered:
        """Return what is known of requests, given all spans of the batch."""
        device, sinks = alike.rows.device, min(alike.key.parameters.sinks, alike.length)
        is_kept = torch.ones(alike.length, dtype=torch.bool, device=device)
        for start, covered in alike.key.spans:
            is_kept[start : start + covered] = False
        is_kept[:sinks] = False
        kept = torch.cat([torch.arange(sinks, device=device), is_kept.nonzero()[:, 0].flip(0)])
        own = spans.of_requests(alike.rows)
        clusters = int(own.clusters[0])
        drawn = chances(clusters, kv_heads, alike.length, device)
        return cls(alike, own, clusters, alike.context.slots[:, kept], *drawn)

    @property
    def limit(self) -> int:
        """Most tokens that a KV head attends to."""
        return self.alike.key.parameters.max_tokens or self.alike.length

    @property
    def is_whole(self) -> bool:
        """Whether all is attended to, whatever the scores."""
        return min(self.kept.shape[1], self.limit) > WHOLE_SHARE * self.alike.length

    def reaching(self, predicted: PredictedAttention) -> Tensor:
        """Return which clusters each query head takes: bool [requests, KV heads, group, clusters]."""
        p = self.alike.key.parameters.p
        return predicted.reaching(p, self.alike.length if p > WHOLE_ABOVE else 0) & (predicted.tokens > 0)


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
        self._estimated_share = torch.zeros(context.requests, dtype=torch.float64, device=context.device)
        self._capped = torch.zeros(context.requests, dtype=torch.bool, device=context.device)
        sinks = torch.tensor([p.sinks for p in parameters], device=context.device)
        self.spans = index.lookup(context, clustered, sinks)
        of_spans = torch.stack((self.spans.starts, self.spans.covered), -1).tolist()
        keys = [
            _Key(own, tuple((start, covered) for start, covered in spans if covered), tokens)
            for own, spans, tokens in zip(parameters, of_spans, self.spans.tokens.tolist(), strict=True)
        ]
        alike = Alike.of(context, keys, CLUSTER_SIZE)
        self._requests = [_Clustered.of(own, self.spans, index.shape.kv_heads) for own in alike]
        self._choice: Choice

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
        self._estimated_share += self._choice.believed_share(attended)

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:
        statistics.add(table_rows, Field.ESTIMATED_SHARE, self.estimated_share)
        statistics.add(table_rows, Field.ESTIMATES, float(layers))
        statistics.add(table_rows, Field.CAPPED_STEPS, self.capped)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        grouped = group(queries, cache.kv_heads)
        choices = {own.alike: self._choose(own, layer, grouped[own.alike.rows], cache, meter) for own in self._requests}
        self._choice = Choice.of_all(choices)
        return self._choice.selection(self.context.lengths)

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
        taken = torch.zeros(
            *grouped.shape[:3], self.spans.cluster_places.shape[1], dtype=torch.bool, device=grouped.device
        )
        for own in self._requests:
            of_rows = grouped[own.alike.rows]
            predicted = self._predicted(own, layer, of_rows, self._kept_scores(own, of_rows, cache), cache)
            taken[own.alike.rows, ..., : own.clusters] = own.reaching(predicted)
        return taken

    def _kept_scores(self, own: _Clustered, queries: Tensor, cache: LayerCache) -> Tensor:
        """Return the scores, to base 2, of the tokens in no cluster: float32 [requests, KV heads, group, n]."""
        keys = take(cache.keys, own.kept).transpose(1, 2).to(queries.dtype)
        return self._scores(queries, keys, cache)

    def _scores(self, queries: Tensor, keys: Tensor, cache: LayerCache) -> Tensor:
        """Return the scores of keys, or centroids, as logarithms to base 2."""
        return capped(queries @ keys.to(queries.dtype).mT * (self.scale * _LOG2_E), cache.softmax.cap, _LOG2_E)

    def _predicted(
        self, own: _Clustered, layer: int, queries: Tensor, kept_scores: Tensor, cache: LayerCache
    ) -> PredictedAttention:
        clusters = self.index.read(layer, own.spans)
        centroids, spreads, sizes = (
            of_heads.transpose(0, 1)[:, :, : own.clusters]
            for of_heads in (clusters.centroids, clusters.spreads, clusters.sizes)
        )
        sizes = sizes.long()
        scores = self._scores(queries, centroids, cache)
        # How far scores vary along a query in a span, for each unit of its clusters' spread.
        along = queries.square() @ clusters.directions.transpose(0, 1).float().mT
        along *= self.scale**2 / queries.shape[-1]
        along = along.repeat_interleave(self.index.clusters, dim=-1)[..., : own.clusters]
        cap = cache.softmax.cap_log2
        if cap is not None:
            # How steep the cap is where a cluster's mean is: 1 − tanh².
            along *= (1 - (scores / cap).square()).square()
        gains = _gains(scores, along * spreads.float()[:, :, None], (sizes > 0)[:, :, None])
        return PredictedAttention.of(kept_scores, (scores + gains).clamp_max_(torch.inf if cap is None else cap), sizes)

    def _choose(self, own: _Clustered, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Choice:
        alike, limit = own.alike, own.limit
        if own.is_whole:
            return Choice.of_everything(alike.context, queries)
        kept_scores = self._kept_scores(own, queries, cache)
        meter.count_bytes(alike.is_in * (own.kept.shape[1] * cache.kv_heads * cache.vector_bytes))
        if alike.key.clustered == 0:
            return self._choose_kept(own, kept_scores)
        meter.count_bytes(alike.is_in * self.index.read_bytes(layer, self.spans))
        predicted = self._predicted(own, layer, queries, kept_scores, cache)
        sizes, shares, total = predicted.tokens[:, :, 0], predicted.shares, predicted.total
        selected = own.reaching(predicted).any(-2)
        wanted = own.kept.shape[1] + (sizes * selected).sum(-1)
        is_whole = wanted.clamp_max(limit) > WHOLE_SHARE * alike.length
        is_cut = (wanted > limit) & ~is_whole
        self._capped[alike.rows] |= is_cut.any(-1)
        kept = min(own.kept.shape[1], limit)
        of_clusters = share_steps(shares.mean(-2))
        is_ordered = is_cut.any(-1)[:, None, None] if self.termination is None else True
        listed = selected & ~is_whole[..., None]
        numbers = (of_clusters * is_ordered).where(listed, SHARE_STEPS).argsort(stable=True)
        in_order = (sizes * listed).gather(-1, numbers)
        before = in_order.cumsum(-1) - in_order
        tokens = (limit - kept - before).clamp_min(0).minimum(in_order)
        places, ranks, is_member = _members_of(tokens)
        members = numbers.gather(-1, places)
        slots = torch.cat([_for_heads(own.kept[:, :kept], cache.kv_heads), self._slots(own, layer, members, ranks)], -1)
        counts = kept + tokens.sum(-1)
        meter.count_bytes(alike.is_in.scatter(0, alike.rows, tokens.sum((1, 2)) * self.index.member_bytes(layer)))
        if self.termination is not None:
            of_members = of_clusters.gather(-1, members).where(is_member, SHARE_STEPS)
            steps = torch.cat([_kept_steps(kept_scores, total)[..., :kept], of_members], -1)
            slots = slots.gather(-1, steps.argsort(stable=True))
        masses = shares * sizes[:, :, None]
        cut = torch.zeros_like(sizes).scatter(-1, numbers, in_order - tokens)
        lost = (shares * cut[:, :, None]).sum(-1)
        lost += (kept_scores[..., kept:] - total).exp2().sum(-1)
        held = predicted.kept_share[..., 0] + (masses * selected[:, :, None]).sum(-1) - lost
        is_out = ~selected & (sizes > 0)
        rest = (masses * is_out[:, :, None]).sum(-1)
        rest *= self._correction(own, layer, queries, predicted, is_out, cache, meter)
        choice = Choice(
            slots,
            counts,
            (total[..., 0] + held.log2()).masked_fill(is_whole[..., None], -torch.inf),
            (total[..., 0] + (rest + lost).log2()).masked_fill(is_whole[..., None], -torch.inf),
        )
        return choice.or_everything(is_whole, alike.context)

    def _choose_kept(self, own: _Clustered, kept_scores: Tensor) -> Choice:
        """Choose among the tokens in no cluster, where there are no others."""
        count = min(own.kept.shape[1], own.limit)
        scores = kept_scores.double()
        highest = scores.amax(-1, keepdim=True)
        masses = (scores - highest).exp2()
        total = highest + masses.sum(-1, keepdim=True).log2()
        slots = _for_heads(own.kept[:, :count], scores.shape[1])
        if self.termination is not None:
            slots = slots.gather(-1, _kept_steps(scores, total)[..., :count].argsort(stable=True))
        selected, rest = masses[..., :count].sum(-1), masses[..., count:].sum(-1)
        counts = torch.full_like(slots[..., 0], count)
        if count < own.kept.shape[1]:
            self._capped[own.alike.rows] = True
        return Choice(slots, counts, highest[..., 0] + selected.log2(), highest[..., 0] + rest.log2())

    def _correction(
        self,
        own: _Clustered,
        layer: int,
        queries: Tensor,
        predicted: PredictedAttention,
        is_out: Tensor,
        cache: LayerCache,
        meter: Meter,
    ) -> Tensor:
        """Return by what a sample says to multiply the predicted mass of clusters: float64 [requests, KV heads, group].

        Args:
            own: the requests.
            layer: the layer.
            queries: float32 [requests, KV heads, group, head dim].
            predicted: of the requests.
            is_out: bool [requests, KV heads, clusters]; which clusters it is about.
            cache: the layer's.
            meter: counts what is read.
        """
        sizes = predicted.tokens[:, :, 0]
        shares = predicted.shares * sizes[:, :, None]
        # Where p takes everything nothing is left out.
        p = min(own.alike.key.parameters.p, WHOLE_ABOVE)
        expected = expected_samples(shares.mean(-2), sizes, p).where(is_out, 0.0)
        counts = (expected + own.chance).floor().long().where(is_out, 0)
        numbers, ranks, is_sample = _members_of(counts)
        if numbers.shape[-1] == 0:
            return torch.ones_like(predicted.total[..., 0])
        of_sampled = sizes.gather(-1, numbers)
        first = own.place.expand_as(sizes).gather(-1, numbers) * of_sampled >> 16
        slots = self._slots(own, layer, numbers, (ranks + first) % of_sampled.clamp_min(1))
        read = counts.sum((1, 2)) * (cache.vector_bytes + self.index.member_bytes(layer))
        meter.count_bytes(own.alike.is_in.scatter(0, own.alike.rows, read))
        keys = peek_keys(cache, Selection(slots, counts.sum(-1)))
        scores = self._scores(queries, keys, cache).double() - predicted.total
        # Each stands for as many tokens as its cluster has for each sample.
        worth = (of_sampled / expected.gather(-1, numbers)).where(is_sample, 0.0)[:, :, None]
        weighs = (scores.exp2() * worth).sum(-1)
        of_samples = predicted.shares.gather(-1, numbers[:, :, None].expand(*scores.shape))
        was_predicted = (of_samples * worth).sum(-1)
        return (weighs / was_predicted).where(was_predicted > 0, 1.0)

    def _slots(self, own: _Clustered, layer: int, clusters: Tensor, ranks: Tensor) -> Tensor:
        """Return the slots of members of clusters, given as ``ClusterIndex.members`` takes them."""
        return own.alike.context.slots_at(self.index.members(layer, own.spans, clusters, ranks))


def _members_of(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each of ``counts``, int64 [..., n], as many entries of a list.

    Returns:
        int64 [..., most], whose entry it is; int64, same shape, which one of these, from 0; both 0 beyond a list's end;
        and bool, same shape, false there.
    """
    ends = counts.cumsum(-1)
    places = torch.arange(int(ends[..., -1].max()), device=counts.device)
    is_entry = places < ends[..., -1:]
    # An entry is of the first whose end lies behind it.
    are_ends = ends.new_zeros(*counts.shape[:-1], len(places) + 1).scatter_add_(-1, ends, torch.ones_like(ends))
    numbers = are_ends.cumsum(-1)[..., :-1].where(is_entry, 0)
    ranks = places - (ends - counts).gather(-1, numbers)
    return numbers, ranks.where(is_entry, 0), is_entry


def _for_heads(slots: Tensor, kv_heads: int) -> Tensor:
    return slots[:, None].expand(-1, kv_heads, -1)


def _gains(scores: Tensor, variances: Tensor, is_filled: Tensor) -> Tensor:
    """Return what spreading around their mean adds to the scores of clusters.

    Of scores that are spread normally around m with a variance v, exp(m + t - t² ÷ 2v) is about the mean weight of
    those up to m + t; from t = v on all weigh exp(m + v ÷ 2).

    Args:
        scores: float32 [..., KV heads, group, clusters]; means, to base 2.
        variances: float32, same shape; to base e.
        is_filled: bool [..., KV heads, 1, clusters]; which clusters have members.

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
        scores: float32 [..., KV heads, group, n], in order.
        total: float64 [..., KV heads, group, 1]; logarithm of all mass.

    Returns:
        int64 [..., KV heads, n].
    """
    count = scores.shape[-1]
    shares = (scores - total).exp2()
    of_sixteens = F.pad(shares, (0, -count % CLUSTER_SIZE)).unflatten(-1, (-1, CLUSTER_SIZE)).sum((-3, -1))
    sizes = (count - CLUSTER_SIZE * torch.arange(of_sixteens.shape[-1], device=scores.device)).clamp_max(CLUSTER_SIZE)
    steps = share_steps(of_sixteens / (sizes * scores.shape[-2]))
    return steps.repeat_interleave(CLUSTER_SIZE, dim=-1)[..., :count]
