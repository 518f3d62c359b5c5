"""Tactic (Zhu et al., "Tactic: Adaptive Sparse Attention with Clustering and Distribution Fitting", sections 3.3 ff.).

Each query head ranks the clusters of keys by query · centroid and takes tokens from the front of that list until they
hold a share p of its attention mass; the mass of the tail is read off a fitted curve. A KV head attends to the union
over its group. Tokens in no usable cluster (the first ones, the newest, the end of the prompt) are always attended, and
their mass is exact.

What the paper leaves open:

- Sinks: the first tokens are in no cluster. A real model's first token may hold most of a head's attention (an
  attention sink), and the centroid of a cluster that it is in does not show that. The paper has none.
- Rank: by the first 18 bits of query · centroid as a float32, that is in steps of at most 1/512 of it, then by number.
  Centroids, in bf16, are rounded four times as coarsely. Where no two clusters tie there is only one order, and score
  and number together fit 32 bits: a search for a place in the list compares single integers and ends at one cluster.
- Exact weights: the first 2 % of the clustered tokens (the paper says 1 to 2 %).
- Windows: four clusters, 64 tokens on average, around the clusters of rank 10 % and 60 %; a window's place in the list
  of tokens is counted exactly. Both windows together with the exact weights are about 2.5 % of a context of 25,000
  tokens, the paper's figure, and no list need be sorted further than its first quarter to find them. Of a cluster of
  more than 16 members the first 16 are sampled, and stand for all. For a window of empty clusters the other one stands.
- A fit that does not fall is flat.
- p = 1 takes everything, whatever the curve says.
- A KV head that would read more than three quarters of the context (after the cap) attends to all of it, as ``dense``
  does, newest first: to read everything in a row costs less than to look most of it up. Where the tokens in no cluster
  are so many by themselves, nothing is scored and no index is read.
- Order, where early termination needs one: by the share of a query head's mass that a token has on average, of the
  head to which it matters most. It is exact for the tokens in no cluster, of which there may be thousands that hold
  most of the mass or next to none: they are put in order by sixteens. It is exact for the clusters with exact weights;
  of the others a token is taken to weigh what the centroid would, times what makes that true of the near window.
  Shares are told apart in quarters of an octave: what is in one step differs by a fifth. Within a step tokens in no
  cluster come first, newest first, then clusters by number. Nothing has to be compared with anything else: a counting
  sort over ``SHARE_STEPS`` steps does.
- A cap keeps sinks, then what else is in no cluster, newest first, then clusters in that order. Of a query head's own
  list it leaves what comes before the first token lost.
- The reported share is of what was read, and its mass is exact: attention itself yields it. Only the mass of what
  was not read is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, e, log2

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter, peek_keys
from winnow_kernels.attend.reference import Attended, group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.full_layers import FullLayersStep
from winnow_kernels.decode.row_groups import termination_of
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.clusters import ClusterIndex, Clusters
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.policies.tactic.distribution_fit import Curve, RankedMass
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.selection.tokens import Selection

EXACT_SHARE = 0.02
WINDOW_CLUSTERS = 4
WINDOW_CENTRES = (0.1, 0.6)
IGNORED_BITS = 14
"""Trailing bits of a float32 score that are 0 in the order of clusters."""
LISTED_SHARE = 0.25
"""Share of the clusters that are ranked at first; all of them where a query head needs more."""
WHOLE_SHARE = 0.75
"""A KV head that would attend to more than this share of the context attends to all of it."""
MIN_WEIGHT = 1e-290
"""A token on the curve is taken to weigh no less when its logarithm is asked for."""
STEPS_OF_OCTAVE = 4
"""Into how many steps shares of the mass are divided from one to its half."""
FIRST_OCTAVE = 2
"""Shares above 2 to the power of minus this are one step."""
SHARE_STEPS = 64
"""Steps of shares: as many as lead to 2^-18, a token's in an even context of 256K; what is below is in the last."""

_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Ranking:
    """The first clusters of each query head's list, the best first.

    Attributes:
        clusters: int64 [requests, KV heads, group, listed]; their numbers.
        scores: float32, same shape; in steps (``IGNORED_BITS``).
        sizes: int64, same shape.
        ends: int64, same shape; tokens in the list up to and with the cluster.
    """

    clusters: Tensor
    scores: Tensor
    sizes: Tensor
    ends: Tensor

    @cached_property
    def starts(self) -> Tensor:
        return self.ends - self.sizes


@dataclass(frozen=True)
class Estimate:
    """What each query head takes, and why. float64 [requests, KV heads, group].

    Attributes:
        ranking: of the clusters, at least as many as are taken.
        mass: what is known of the attention mass.
        tokens: how many of the clustered tokens are taken, from the front of the list.
        reference: natural logarithm of the unit of all masses.
        above_centroids: natural logarithm of how many times what their centroids would weigh tokens do on average.
    """

    ranking: Ranking
    mass: RankedMass
    tokens: Tensor
    reference: Tensor
    above_centroids: Tensor

    @property
    def total(self) -> Tensor:
        """Natural logarithm of the mass of all tokens."""
        return self.reference + self.mass.total.log()


@dataclass(frozen=True)
class _Beliefs:
    """What is believed of a selection's mass. Natural logarithms, float64 [requests, KV heads, group].

    Attributes:
        selected: of what is selected.
        rest: of all else; no mass where everything is read.
    """

    selected: Tensor
    rest: Tensor


@dataclass(frozen=True)
class _Needs:
    """What a KV head needs of its clusters, in the order in which they are read.

    Attributes:
        clusters: int64 [requests, KV heads, most]; numbers of clusters.
        steps: int64, same shape; the best steps of the shares of their tokens.
        sizes: int64, same shape; tokens needed of the cluster.
        ends: int64, same shape; tokens needed up to and with the cluster.
    """

    clusters: Tensor
    steps: Tensor
    sizes: Tensor
    ends: Tensor

    def kept(self, room: Tensor, clusters: int) -> Tensor:
        """Return how many tokens of each of all ``clusters``, by number, are within the first ``room`` tokens.

        Args:
            room: int64 [requests, KV heads].
            clusters: how many there are.

        Returns:
            int64 [requests, KV heads, clusters].
        """
        kept = (room[..., None] - (self.ends - self.sizes)).clamp_min(0).minimum(self.sizes)
        return kept.new_zeros(*room.shape, clusters).scatter_(2, self.clusters, kept)


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
        self._share = torch.tensor([p.p for p in parameters], dtype=torch.float64, device=device).view(-1, 1, 1)
        caps = [p.max_tokens for p in parameters]
        longest = context.longest
        self._cap = (
            torch.tensor([longest if c is None else c for c in caps], device=device).view(-1, 1) if any(caps) else None
        )
        sinks = torch.tensor([p.sinks for p in parameters], device=device)
        self.spans = index.lookup(context, clustered, sinks)
        kept = (context.lengths - self.spans.tokens)[:, None]
        whole = self._exceeds(kept if self._cap is None else torch.minimum(kept, self._cap))
        self._whole = whole[:, 0]
        # Where all is attended to, none comes first.
        self._sinks = torch.minimum(sinks, context.lengths).masked_fill(self._whole, 0)
        if bool(whole.any()):
            self.spans = index.lookup(context, clustered.masked_fill(self._whole, 0), sinks)
            if self._cap is not None:
                self._cap.masked_fill_(whole, longest)
        self._keep_unclustered()
        self._plan_lists()

    @property
    def estimated_share(self) -> Tensor:
        """The share of attention mass that is believed to have been attended: float64 [requests].

        A mean over query heads, summed over the layers so far; 1 where everything was attended to. The mass of what was
        read is exact, that of the rest is the fit's.
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
        read = attended.log_sum_exp.double().unflatten(1, self._beliefs.rest.shape[1:])
        is_cut = (attended.read < selection.counts)[..., None]
        # What is selected weighs at least as much as what was read of it.
        selected = self._beliefs.selected.maximum(read).where(is_cut, read)
        unread = (selected - read).exp() - 1 + (self._beliefs.rest - read).exp()
        self._estimated_share += (1 / (1 + unread)).mean((1, 2))

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:
        statistics.add(table_rows, Field.ESTIMATED_SHARE, self.estimated_share)
        statistics.add(table_rows, Field.ESTIMATES, float(layers))
        statistics.add(table_rows, Field.CAPPED_STEPS, self.capped)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        grouped = group(queries, cache.kv_heads)
        kept = self._kept(cache)
        kept_scores = self._kept_scores(grouped, kept, cache, meter)
        if self.spans.most == 0:
            return self._select_kept(kept, kept_scores)
        estimate = self._estimate(layer, grouped, kept_scores, cache, meter)
        return self._select(layer, kept, estimate, kept_scores, meter)

    def estimate(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Estimate:
        """Return what each query head takes of the clustered tokens; some request has some."""
        grouped = group(queries, cache.kv_heads)
        kept_scores = self._kept_scores(grouped, self._kept(cache), cache, meter)
        return self._estimate(layer, grouped, kept_scores, cache, meter)

    def _kept(self, cache: LayerCache) -> Selection:
        return Selection(
            self._kept_slots[:, None].expand(-1, cache.kv_heads, -1),
            self._kept_counts[:, None].expand(-1, cache.kv_heads),
        )

    def _kept_scores(self, grouped: Tensor, kept: Selection, cache: LayerCache, meter: Meter) -> Tensor:
        # Where everything is kept, no score matters: a kernel reads none.
        meter.count_bytes((kept.counts.sum(1) * cache.vector_bytes).masked_fill(self._whole, 0))
        scores = grouped @ peek_keys(cache, kept).to(grouped.dtype).mT * self.scale
        return scores.masked_fill_(~kept.filled[:, :, None], -torch.inf)

    def _estimate(self, layer: int, grouped: Tensor, kept_scores: Tensor, cache: LayerCache, meter: Meter) -> Estimate:
        clusters = self.index.read(layer, self.spans)
        meter.count_bytes(self.spans.clusters * self.index.read_bytes(layer))
        sizes = clusters.sizes.transpose(0, 1).long()
        if self._unused is not None:
            sizes = sizes.masked_fill(self._unused[:, None], 0)
        scores = _cluster_scores(grouped, clusters)
        cluster_keys = _cluster_keys(scores)
        ranking = self._rank(cluster_keys, scores, sizes, self._listed)
        mass, *scales = self._weigh(layer, grouped, cache, meter, cluster_keys, sizes, ranking, kept_scores)
        tokens = mass.tokens_for(self._share)
        if bool((tokens > ranking.ends[..., -1]).any()):
            ranking = self._rank(cluster_keys, scores, sizes, sizes.shape[-1])
        return Estimate(ranking, mass, tokens, *scales)

    def _keep_unclustered(self) -> None:
        """Find the tokens in no cluster: the sinks, then the others, newest first."""
        context, spans = self.context, self.spans
        clustered = torch.zeros(context.requests, context.longest // self.index.span + 1, device=context.device)
        used = torch.arange(spans.most, device=context.device) < spans.counts[:, None]
        clustered.scatter_add_(1, spans.starts // self.index.span, used.to(clustered.dtype))
        in_span = clustered.bool().repeat_interleave(self.index.span, dim=1)[:, : context.longest]
        is_sink = context.positions < self._sinks[:, None]
        rows, positions = (context.inside & ~in_span & ~is_sink).flip(1).nonzero(as_tuple=True)
        counts = context.lengths - spans.tokens
        others = counts - self._sinks
        before = others.cumsum(0) - others
        kept = context.positions.where(is_sink, 0)[:, : int(counts.max())]
        places = self._sinks[rows] + torch.arange(len(rows), device=context.device) - before[rows]
        kept[rows, places] = context.longest - 1 - positions
        self._kept_slots = context.slots_at(kept)
        self._kept_counts = counts

    def _plan_lists(self) -> None:
        """Work out which ranks are looked at: in clusters, [requests] each."""
        device = self.context.device
        counts = self.spans.counts * self.index.clusters
        most = self.spans.most * self.index.clusters
        self._tokens = self.spans.tokens.double().view(-1, 1, 1)
        self._known = (self._tokens * EXACT_SHARE).ceil()
        self._window = min(WINDOW_CLUSTERS, most)
        self._listed = min(most, max(self._window, ceil(LISTED_SHARE * most)))
        self._listed_of_each = (LISTED_SHARE * counts).ceil().long().clamp_min(1)
        near, far = (centre * counts.double() - self._window / 2 for centre in WINDOW_CENTRES)
        self._near_start = near.ceil().long().clamp_min(0)
        far_end = torch.minimum(far.ceil().long() + self._window, counts)
        self._far_end = int(far_end.max())
        # A list's unused places at its end; for the far window as many of them as makes all windows end at one rank
        # are moved to the front, so that one top-k finds it in every list.
        places = torch.arange(most, device=device)
        unused = places >= counts[:, None]
        ragged = most * len(counts) > int(counts.sum())
        self._unused = unused if ragged else None
        self._in_front = unused & (places < (counts + self._far_end - far_end)[:, None])

    def _rank(self, cluster_keys: Tensor, scores: Tensor, sizes: Tensor, listed: int) -> Ranking:
        if self._unused is not None:
            cluster_keys = cluster_keys.masked_fill(self._unused[:, None, None], _LOWEST)
        order = cluster_keys.topk(listed, dim=-1, sorted=True).indices
        of_listed = _of_group(sizes, order)
        return Ranking(order, scores.gather(-1, order), of_listed, of_listed.cumsum(-1))

    def _weigh(
        self,
        layer: int,
        grouped: Tensor,
        cache: LayerCache,
        meter: Meter,
        cluster_keys: Tensor,
        sizes: Tensor,
        ranking: Ranking,
        kept_scores: Tensor,
    ) -> tuple[RankedMass, Tensor, Tensor]:
        """Compute the weights that are exact, and fit the curve. Return ``mass`` and what follows it in Estimate."""
        shape = ranking.ends.shape[:3]
        last_listed = (self._listed_of_each - 1).view(-1, 1, 1, 1).expand(*shape, 1)
        known = torch.minimum(self._known, ranking.ends.gather(-1, last_listed)[..., 0].double())
        places = torch.arange(int(self._known.max()), device=known.device)
        at = torch.searchsorted(ranking.ends, places.expand(*shape, -1).contiguous(), right=True)
        at.clamp_max_(ranking.ends.shape[-1] - 1)
        first_clusters, first_ranks = ranking.clusters.gather(-1, at), places - ranking.starts.gather(-1, at)
        first_valid = places < known[..., None]

        window_clusters, window_starts = self._windows(cluster_keys, sizes, ranking)
        window_sizes = _of_group(sizes, window_clusters)
        ranks = torch.arange(CLUSTER_SIZE, device=known.device)
        window_valid = ranks < window_sizes[..., None]

        sampled = torch.cat([first_clusters, window_clusters.repeat_interleave(CLUSTER_SIZE, dim=-1)], -1)
        member = torch.cat([first_ranks, ranks.repeat(window_clusters.shape[-1]).expand(*shape, -1)], -1)
        valid = torch.cat([first_valid, window_valid.flatten(3)], -1)
        scores = self._member_scores(layer, grouped, cache, meter, sampled, member, valid)

        reference = torch.maximum(kept_scores.amax(-1), scores.amax(-1))[..., None]
        weights = (scores - reference).exp_()
        first, in_windows = weights.split([len(places), weights.shape[-1] - len(places)], dim=-1)
        in_windows = in_windows.unflatten(-1, (-1, CLUSTER_SIZE)).sum(-1) / window_sizes.clamp(1, CLUSTER_SIZE)
        of_window = (2, self._window)
        tokens = window_sizes.unflatten(-1, of_window).sum(-1)
        means = (in_windows * window_sizes).unflatten(-1, of_window).sum(-1) / tokens.clamp_min(1)
        means = means.where(tokens > 0, means.flip(-1))
        # Places count from 1: a window of t tokens after s others is centred at s + (t + 1) / 2.
        centres = window_starts + (tokens + 1) / 2
        curve = Curve.through(centres[..., 0], means[..., 0], centres[..., 1], means[..., 1])
        mass = RankedMass(
            outside=(kept_scores - reference).exp_().sum(-1, dtype=torch.float64),
            first=first.cumsum(-1, dtype=torch.float64),
            known=known,
            tokens=self._tokens.expand(shape),
            curve=curve,
        )
        near = (self._near_start[:, None] + torch.arange(self._window, device=known.device))[:, None, None]
        of_centroids = ranking.scores.gather(-1, near.expand(*shape, -1)).double().mean(-1) * self.scale
        weight = (curve.a / centres[..., 0] + curve.b).clamp_min(MIN_WEIGHT).log()
        reference = reference[..., 0].double()
        return mass, reference, reference + weight - of_centroids

    def _windows(self, cluster_keys: Tensor, sizes: Tensor, ranking: Ranking) -> tuple[Tensor, Tensor]:
        """Return the clusters of both windows, [..., 2 × window], and the tokens before each window, [..., 2]."""
        shape = ranking.ends.shape[:3]
        near = self._near_start[:, None] + torch.arange(self._window, device=sizes.device)
        near = near[:, None, None].expand(*shape, -1)
        if self._unused is not None:
            cluster_keys = cluster_keys.masked_fill(self._unused[:, None, None], _LOWEST)
            cluster_keys = cluster_keys.masked_fill(self._in_front[:, None, None], _HIGHEST)
        # The far window's clusters are the last of as many as rank before its end; their order does not matter.
        upper = cluster_keys.topk(self._far_end, dim=-1, sorted=False)
        last = upper.values.topk(self._window, dim=-1, largest=False, sorted=False).indices
        far = upper.indices.gather(-1, last)
        before_far = _of_group(sizes, upper.indices).sum(-1) - _of_group(sizes, far).sum(-1)
        before_near = ranking.starts.gather(-1, near[..., :1])[..., 0]
        return torch.cat([ranking.clusters.gather(-1, near), far], -1), torch.stack([before_near, before_far], -1)

    def _member_scores(
        self,
        layer: int,
        grouped: Tensor,
        cache: LayerCache,
        meter: Meter,
        clusters: Tensor,
        ranks: Tensor,
        valid: Tensor,
    ) -> Tensor:
        """Return query heads' scores of members of clusters, float32 [..., n]; -inf where not ``valid``."""
        positions = self.index.members(layer, self.spans, clusters.flatten(2), ranks.flatten(2))
        slots = self.context.slots_at(positions.masked_fill_(~valid.flatten(2), 0))
        counts = torch.full(slots.shape[:2], slots.shape[2], device=slots.device)
        # What is not valid reads the first token's key, to no effect, and is not counted.
        keys = peek_keys(cache, Selection(slots, counts))
        meter.count_bytes(valid.flatten(1).sum(1) * (cache.vector_bytes + self.index.member_bytes(layer)))
        keys = keys.to(grouped.dtype).view(*clusters.shape, -1)
        scores = (grouped[..., None, :] @ keys.mT)[..., 0, :] * self.scale
        return scores.masked_fill(~valid, -torch.inf)

    def _exceeds(self, counts: Tensor) -> Tensor:
        """Return whether ``counts``, [requests, n], are so much of the context that all of it is read instead."""
        return counts > WHOLE_SHARE * self.context.lengths[:, None]

    def _select_kept(self, kept: Selection, kept_scores: Tensor) -> Selection:
        counts = kept.counts if self._cap is None else self._capped_kept(kept)
        total = kept_scores.logsumexp(-1).double()
        share = _share_of_first(kept_scores, counts)
        rest = (1 - share).clamp_min(0).masked_fill(counts[..., None] == kept.counts[..., None], 0)
        self._beliefs = _Beliefs(total + share.log(), total + rest.log())
        slots = kept.slots
        if self.termination is not None:
            slots = _in_order(slots, _kept_steps(kept_scores, total), counts)
        return Selection(slots, counts, self._whole[:, None].expand_as(counts))

    def _capped_kept(self, kept: Selection) -> Tensor:
        assert self._cap is not None
        self._capped |= (kept.counts > self._cap).any(1)
        return torch.minimum(kept.counts, self._cap)

    def _select(self, layer: int, kept: Selection, estimate: Estimate, kept_scores: Tensor, meter: Meter) -> Selection:
        mass, tokens = estimate.mass, estimate.tokens
        clusters = self.spans.most * self.index.clusters
        needs = _union(estimate, tokens.long(), clusters, self.scale)
        taken = needs.ends[..., -1]
        kept_counts = kept.counts
        outside = mass.outside
        if self._cap is not None:
            wanted = kept_counts + taken
            self._capped |= ((wanted > self._cap) & ~self._exceeds(wanted.minimum(self._cap))).any(1)
            kept_counts = torch.minimum(kept_counts, self._cap)
            room = self._cap - kept_counts
            tokens = _before_first_lost(estimate.ranking, tokens.long(), needs.kept(room, clusters)).double()
            taken = torch.minimum(taken, room)
            outside = mass.outside * _share_of_first(kept_scores, kept_counts)
        whole = self._exceeds(kept_counts + taken)
        taken = taken.masked_fill(whole, 0)
        held = outside + mass.held_by(tokens)
        rest = (mass.total - held).clamp_min(0).masked_fill_(whole[..., None], 0)
        self._beliefs = _Beliefs(estimate.reference + held.log(), estimate.reference + rest.log())

        places = torch.arange(int(taken.max()), device=taken.device).expand(*taken.shape, -1).contiguous()
        at = torch.searchsorted(needs.ends, places, right=True).clamp_max_(needs.ends.shape[-1] - 1)
        before = torch.nn.functional.pad(needs.ends, (1, 0)).gather(-1, at)
        positions = self.index.members(layer, self.spans, needs.clusters.gather(-1, at), places - before)
        meter.count_bytes(taken.sum(1) * self.index.member_bytes(layer))
        slots = _joined(kept.slots, kept_counts, self.context.slots_at(positions), taken)
        if self.termination is not None:
            of_kept = _kept_steps(kept_scores, estimate.total)
            steps = _joined(of_kept, kept_counts, needs.steps.gather(-1, at), taken)
            slots = _in_order(slots, steps, kept_counts + taken)
        selected = Selection(slots, kept_counts + taken, whole)
        return self._with_whole(selected) if bool(whole.any()) else selected

    def _with_whole(self, selected: Selection) -> Selection:
        """Return ``selected``, but the whole context, newest first, for the KV heads that read to the end."""
        lengths, whole = self.context.lengths[:, None], selected.to_the_end
        assert whole is not None
        newest_first = self.context.slots_at((lengths - 1 - self.context.positions).clamp_min(0))
        slots = torch.nn.functional.pad(selected.slots, (0, self.context.longest - selected.width))
        return Selection(
            torch.where(whole[..., None], newest_first[:, None], slots), selected.counts.where(~whole, lengths), whole
        )


def _cluster_scores(grouped: Tensor, clusters: Clusters) -> Tensor:
    """Return query · centroid in steps (``IGNORED_BITS``), float32 [requests, KV heads, group, clusters]."""
    scores = (grouped.transpose(0, 1) @ clusters.centroids.to(grouped.dtype).mT).transpose(0, 1).float()
    # Adding zero makes -0 a 0.
    return (scores.view(torch.int32) >> IGNORED_BITS << IGNORED_BITS).view(torch.float32) + 0.0


def _cluster_keys(scores: Tensor) -> Tensor:
    """Return what orders the clusters, the largest first and no two alike, int64 [requests, KV heads, group, clusters].

    It is the score in steps, and among equal ones the number, the first the largest.
    """
    # The bits of negative floats compare the other way round.
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)
    count = scores.shape[-1]
    return (ordered.long() + 1) * count - torch.arange(count, device=scores.device)


def _share_of_first(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the share of all mass that the first ``counts``, [requests, KV heads], of ``scores``, [..., n], have."""
    first = torch.arange(scores.shape[-1], device=scores.device) < counts[..., None]
    return scores.softmax(-1).masked_fill(~first[:, :, None], 0).sum(-1, dtype=torch.float64)


def _of_group(of_clusters: Tensor, clusters: Tensor) -> Tensor:
    """Return ``of_clusters``, [requests, KV heads, clusters], at ``clusters``, [requests, KV heads, group, n]."""
    return of_clusters.gather(-1, clusters.flatten(2)).view_as(clusters)


def _union(estimate: Estimate, tokens: Tensor, clusters: int, scale: float) -> _Needs:
    """Return what any query head of a group needs that takes ``tokens``, int64 [..., group], of its list."""
    ranking = estimate.ranking
    needed = (tokens[..., None] - ranking.starts).clamp_min(0).minimum(ranking.sizes)
    last = int((ranking.starts < tokens[..., None]).sum(-1).max())
    numbers = ranking.clusters[..., :last].flatten(2)
    needed = needed[..., :last].flatten(2)
    steps = _cluster_steps(estimate, last, scale).flatten(2)
    shape = (*tokens.shape[:2], clusters)
    best = steps.new_full(shape, SHARE_STEPS)
    best.scatter_reduce_(2, numbers, steps.where(needed > 0, SHARE_STEPS), "amin")
    most = ranking.ends.new_zeros(shape).scatter_reduce_(2, numbers, needed, "amax")
    width = max(1, int((most > 0).sum(-1).max()))
    key = best * clusters + torch.arange(clusters, device=best.device)
    order = key.topk(width, dim=-1, largest=False, sorted=True).indices
    sizes = most.gather(-1, order)
    return _Needs(order, best.gather(-1, order), sizes, sizes.cumsum(-1))


def _cluster_steps(estimate: Estimate, count: int, scale: float) -> Tensor:
    """Return the steps of the first ``count`` clusters of each list: int64 [..., count].

    Of clusters that are partly or all among the exact weights it is the step of these weights' mean, of the others that
    of the centroid's weight. In float32 that is a difference and a product, and so the same everywhere.
    """
    ranking, mass = estimate.ranking, estimate.mass
    starts, ends = ranking.starts[..., :count], ranking.ends[..., :count]
    exact = ends.minimum(mass.known[..., None].long())
    sums = torch.nn.functional.pad(mass.first, (1, 0))
    held = sums.gather(-1, exact) - sums.gather(-1, starts.minimum(exact))
    mean = held / (exact - starts).clamp_min(1)
    of_members = _share_steps((estimate.reference[..., None] * log2(e) + mean.log2()).float(), estimate.total)
    octaves_of_score = scale * log2(e)
    best_score = ((estimate.total - estimate.above_centroids) * log2(e) - FIRST_OCTAVE) / octaves_of_score
    steps_of_score = torch.tensor(octaves_of_score, dtype=torch.float32, device=mean.device) * STEPS_OF_OCTAVE
    of_centroid = _in_steps((best_score.float()[..., None] - ranking.scores[..., :count]) * steps_of_score)
    return of_members.where(exact > starts, of_centroid)


def _share_steps(weights: Tensor, total: Tensor) -> Tensor:
    """Return in which step of shares ``weights`` are, logarithms to base 2: int64, below ``SHARE_STEPS``.

    Args:
        weights: float32 [..., n].
        total: float64 [...]; natural logarithm of all mass.
    """
    best = (total * log2(e) - FIRST_OCTAVE).float()[..., None]
    return _in_steps((best - weights) * STEPS_OF_OCTAVE)


def _in_steps(steps: Tensor) -> Tensor:
    return steps.clamp(0, SHARE_STEPS - 1).long()


def _before_first_lost(ranking: Ranking, tokens: Tensor, kept: Tensor) -> Tensor:
    """Return how many of its first ``tokens``, int64 [..., group], a query head has before the first that is lost.

    ``kept`` is how many members of each cluster there are, int64 [requests, KV heads, clusters].
    """
    needed = (tokens[..., None] - ranking.starts).clamp_min(0).minimum(ranking.sizes)
    kept = _of_group(kept, ranking.clusters)
    before = torch.where(kept < needed, ranking.starts + kept, tokens[..., None])
    return before.amin(-1)


def _joined(kept: Tensor, kept_counts: Tensor, taken: Tensor, taken_counts: Tensor) -> Tensor:
    """Return the first ``kept_counts`` of ``kept``, and behind them the first ``taken_counts`` of ``taken``."""
    counts = kept_counts + taken_counts
    places = torch.arange(int(counts.max()), device=counts.device)
    at = places.where(places < kept_counts[..., None], places - kept_counts[..., None] + kept.shape[2])
    both = torch.cat([kept, taken], -1)
    return both.gather(-1, at.clamp_max(both.shape[2] - 1))


def _kept_steps(kept_scores: Tensor, total: Tensor) -> Tensor:
    """Return the steps of the tokens in no cluster, for the query head to which they matter most.

    They have them by sixteens: the step of their mean weight.

    Args:
        kept_scores: float32 [requests, KV heads, group, n]; -inf where there is none.
        total: float64 [requests, KV heads, group]; natural logarithm of all mass.

    Returns:
        int64 [requests, KV heads, n].
    """
    count = kept_scores.shape[-1]
    padded = torch.nn.functional.pad(kept_scores, (0, -count % CLUSTER_SIZE), value=-torch.inf)
    of_sixteens = padded.unflatten(-1, (-1, CLUSTER_SIZE))
    sizes = of_sixteens.isfinite().sum(-1).clamp_min(1)
    means = of_sixteens.logsumexp(-1) * log2(e) - sizes.log2()
    return _share_steps(means, total).amin(2).repeat_interleave(CLUSTER_SIZE, dim=-1)[..., :count]


def _in_order(slots: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    """Return ``slots``, of which the first ``counts`` count, by ascending ``steps``; all of one step as they stand."""
    beyond = torch.arange(slots.shape[-1], device=slots.device) >= counts[..., None]
    order = steps.masked_fill(beyond, SHARE_STEPS).sort(dim=-1, stable=True).indices
    return slots.gather(-1, order)
