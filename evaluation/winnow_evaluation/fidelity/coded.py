"""Low-bit keys, for many tokens at once: what policies that choose by them read, without a step for each token.

The policies' reference chooses for one token after another, as a server needs it. Here the tokens behind a prompt share
its keys, so that one product predicts the scores of all of them. What is read is the same; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_evaluation.fidelity.exact import Following, Scores
from winnow_evaluation.fidelity.passes import ExactPass
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import Attended, attend, group
from winnow_kernels.decode.coded_tokens import WHOLE_SHARE, kept_sinks, scored_tokens
from winnow_kernels.decode.predicted_attention import FLOOR, KEY_STEPS, LOWEST_KEY, ORDER_KEYS, STEPS
from winnow_kernels.indexes.key_codes import BLOCK, KeyCodes, RoundedQueries, bytes_of_key
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import declaration_of
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.quoka.parameters import QuokaDecode
from winnow_kernels.policies.quoka.reference import COSINE_STEPS, cosine_steps
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import capped

LOG2_E: Final = 1.4426950408889634
_NOTHING: Final = FLOOR * STEPS - 1
"""The step, counted from that of the whole mass, of what weighs nothing."""
_PLACES: Final = 2**20
"""More than a context has tokens."""
_FIRST: Final = 2**32
"""More than any place in the order by shares."""
_COPIES: Final = 8
"""Of what is selected: keys and values, as cached and in float32, and outputs tile by tile."""


def reads_codes(policy: AttentionPolicy) -> bool:
    """Return whether a policy's decode reads low-bit keys."""
    return declaration_of(policy.decode).index is KeyCodes


def is_at_once(policy: AttentionPolicy) -> bool:
    """Return whether ``coded_pass`` computes a policy's decode: no bounds on what p takes, no early end of QUOKA's."""
    decode = policy.decode
    if isinstance(decode, LowBitTopP):
        return not decode.takes_all and decode.max_tokens is None and decode.min_tokens == 0
    if isinstance(decode, QuokaDecode):
        return policy.early_termination is None
    return isinstance(decode, LowBitTopK)


def coded_pass(following: Following, policy: AttentionPolicy, codes: KeyCodes) -> ExactPass:
    """Return the pass of a policy that is computed ``is_at_once``."""
    if isinstance(policy.decode, QuokaDecode):
        return _CosinePass(following, policy.decode, codes)
    if policy.early_termination is None:
        return CodedPass(following, policy, codes)
    return _TerminatedPass(following, policy, codes)


@dataclass(frozen=True, eq=False)
class _Predicted:
    """What is predicted of a prompt's tokens, to base 2. Shapes are [KV heads, tokens, group, context].

    Attributes:
        scores: float32; exact ones of what is kept, predicted ones in whole steps, -inf beyond a token's own place.
        kept: bool [tokens, context]; what is read in any case.
        others: bool, same form; what is predicted.
    """

    scores: Tensor
    kept: Tensor
    others: Tensor

    @cached_property
    def total(self) -> Tensor:
        """Logarithm of the mass: float64 [KV heads, tokens, group, 1]."""
        highest = self.scores.amax(-1, keepdim=True)
        return highest + (self.scores - highest).exp2_().sum(-1, keepdim=True, dtype=torch.float64).log2()

    @cached_property
    def shares(self) -> Tensor:
        """Share of the mass of each token: float32, 0 where so little is predicted that it counts as nothing."""
        logarithms = (self.scores - self.total).float()
        is_nothing = (logarithms < FLOOR) & self.others[:, None]
        return logarithms.exp2_().masked_fill_(is_nothing, 0)

    def held(self, tokens: Tensor) -> Tensor:
        """Return the share of the mass of some ``tokens``, bool that fits: float64 [KV heads, tokens, group]."""
        return self.shares.where(tokens, 0).sum(-1, dtype=torch.float64)

    def reaching(self, share: float) -> Tensor:
        """Return the others with which each query head's mass reaches ``share``: bool [KV heads, tokens, context]."""
        missing = share - self.held(self.kept[:, None])
        steps = (self.scores * STEPS - (self.total * STEPS).floor()).where(self.shares > 0, _NOTHING).short()
        weights = self.shares.where(self.others[:, None], 0)
        # Above ``enough`` lies all that is missing, above ``cut`` less than that.
        enough = torch.full_like(missing, _NOTHING - 1, dtype=torch.int16)
        cut = torch.zeros_like(enough)
        for _ in range((1 - _NOTHING).bit_length()):
            middle = (enough + cut) >> 1
            is_short = weights.where(steps > middle[..., None], 0).sum(-1, dtype=torch.float64) < missing
            enough, cut = enough.where(is_short, middle), middle.where(is_short, cut)
        is_needed = (steps >= cut[..., None]) & (missing > 0)[..., None]
        return (is_needed & self.others[:, None]).any(2)

    def ranks(self, alike: int) -> Tensor:
        """Return what ranks the others, those with the largest shares first: int32 [KV heads, tokens, context], from 0.

        Args:
            alike: so many neighbouring keys make no difference.
        """
        keys = (self.shares.mean(2).log2_() * KEY_STEPS).floor_().clamp_min_(LOWEST_KEY).int() - LOWEST_KEY
        places = torch.arange(keys.shape[-1], dtype=torch.int32, device=keys.device)
        return keys // alike * _PLACES + (_PLACES - 1 - places)

    def heaviest(self, counts: Tensor) -> Tensor:
        """Return the others with the largest shares, of equal ones the first: bool [KV heads, tokens, context].

        Args:
            counts: int64 [tokens]; how many.
        """
        return _first(self.ranks(1), self.others, counts)


def _first(ranks: Tensor, others: Tensor, counts: Tensor) -> Tensor:
    """Return the ``others`` that rank highest: bool [KV heads, tokens, context].

    Args:
        ranks: int32 [KV heads, tokens, context], from 0; no two of a token are equal.
        others: bool [tokens, context].
        counts: int64 [tokens]; how many.
    """
    order = ranks.where(others, -1)
    counts = counts.minimum(others.sum(-1))
    best = order.topk(max(1, int(counts.max())), dim=-1).values
    last = best.gather(-1, (counts - 1).clamp_min(0).expand(len(order), -1)[..., None])
    return (order >= last) & (counts > 0)[:, None] & others


class _PassOverCodes(ExactPass):
    """Attend to what codes choose, one prompt after another."""

    def __init__(self, following: Following, codes: KeyCodes, scored: Sequence[Sequence[int]]) -> None:
        """
        Args:
            following: the tokens.
            codes: of the keys.
            scored: of each prompt, how many tokens each of its tokens looks up: a multiple of the page.
        """
        super().__init__(following)
        self._codes, self._scored = codes, scored
        pages = [
            following.batch.slots[prompt, : own[-1] : PAGE_SIZE] // PAGE_SIZE
            for prompt, own in zip(following.prompts, self._scored, strict=True)
        ]
        codes.ensure(torch.cat(pages))
        self._blocks = [codes.blocks_of(own) for own in pages]

    def parts(self) -> Iterator[slice]:
        yield from (slice(row, row + 1) for row in range(len(self.following.prompts)))

    def kept(self, row: int, sinks: Sequence[int], visible: Tensor) -> Tensor:
        """Return what a prompt's tokens read in any case: bool like ``visible``, [tokens, context].

        Args:
            row: the prompt.
            sinks: how many first tokens each of its tokens keeps.
            visible: what each can see.
        """
        places = torch.arange(visible.shape[-1], device=visible.device)
        firsts, scored = (torch.tensor(own, device=visible.device)[:, None] for own in (sinks, self._scored[row]))
        return ((places < firsts) | (places >= scored)) & visible

    def rows_of(self, row: int) -> slice:
        """Return which rows are a prompt's."""
        return slice(row * self.following.tokens, (row + 1) * self.following.tokens)


class _CosinePass(_PassOverCodes):
    """Attend to the keys whose predicted cosines with the group's mean query are highest."""

    def __init__(self, following: Following, decode: QuokaDecode, codes: KeyCodes) -> None:
        self._lengths = following.lengths.tolist()
        newest = [[(length - 1) // PAGE_SIZE * PAGE_SIZE for length in own] for own in self._lengths]
        super().__init__(following, codes, newest)
        self._decode = decode

    def read(self, layer: int, queries: Tensor, part: slice, scores: Scores) -> Tensor:
        row, visible = part.start, scores.visible[0, 0]
        self._count(row)
        kept = self.kept(row, [self._decode.sinks] * len(visible), visible)
        grouped = group(queries[row], scores.scores.shape[1])
        means = F.normalize(grouped, dim=-1).mean(2).transpose(0, 1)
        steps = cosine_steps(self._codes, layer, means, self._blocks[row]).int() + COSINE_STEPS
        context = visible.shape[-1]
        places = torch.arange(context, dtype=torch.int32, device=visible.device)
        ranks = F.pad(steps, (0, context - steps.shape[-1])) * _PLACES + (_PLACES - 1 - places)
        budgets = [self._decode.tokens(length - 1) for length in self._lengths[row]]
        counts = (torch.tensor(budgets, device=kept.device) - kept.sum(-1)).clamp_min(0)
        return (_first(ranks, visible & ~kept, counts) | kept)[None]

    def _count(self, row: int) -> None:
        cache = self.following.batch.caches[0]
        of_block = cache.kv_heads * self._codes.layout.size
        blocks = torch.tensor(self._scored[row], device=self.meter.read_bytes.device) // BLOCK
        self.meter.read_bytes[self.rows_of(row)] += blocks * of_block


class CodedPass(_PassOverCodes):
    """Attend to what the scores of low-bit keys choose."""

    def __init__(self, following: Following, policy: AttentionPolicy, codes: KeyCodes) -> None:
        """
        Args:
            following: the tokens.
            policy: one that is computed ``is_at_once``.
            codes: of the keys.
        """
        self._lengths = following.lengths.tolist()
        scored = [[scored_tokens(length, PAGE_SIZE) for length in own] for own in self._lengths]
        super().__init__(following, codes, scored)
        assert isinstance(policy.decode, LowBitTopP | LowBitTopK)
        self._decode = policy.decode
        self._reported: list[Tensor] = []

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        self._reported = []
        output = super().attend(layer, queries)
        self.reported_share.append(torch.cat(self._reported))
        return output

    def read(self, layer: int, queries: Tensor, part: slice, scores: Scores) -> Tensor:
        predicted, read = self.chosen(layer, queries, part, scores)
        held = scores.scores[0].masked_fill(~read[:, :, None], -torch.inf).logsumexp(-1)
        self.report(predicted, read, held.double() * LOG2_E)
        return read[None]

    def chosen(self, layer: int, queries: Tensor, part: slice, scores: Scores) -> tuple[_Predicted, Tensor]:
        """Return what is predicted of a prompt, and what is chosen of it: bool [KV heads, tokens, context]."""
        row, lengths = part.start, self.following.lengths[part.start]
        predicted = self._predicted(layer, queries[row], row, scores)
        kept = predicted.kept.sum(-1)
        if isinstance(self._decode, LowBitTopP):
            chosen = predicted.reaching(aimed_share(self._decode.p, self._codes.bits))
        else:
            budgets = [self._decode.tokens(length - 1) for length in self._lengths[row]]
            chosen = predicted.heaviest((torch.tensor(budgets, device=kept.device) - kept).clamp_min(0))
        chosen |= predicted.kept
        is_whole = chosen.sum(-1) > WHOLE_SHARE * lengths
        read = (chosen | is_whole[..., None]) & scores.visible[0]
        self._count(row, kept)
        return predicted, read

    def _predicted(self, layer: int, queries: Tensor, row: int, exact: Scores) -> _Predicted:
        grouped = queries.float().unflatten(1, (exact.scores.shape[1], -1)).transpose(0, 1)
        rounded = RoundedQueries.of(grouped.flatten(1, 2), self.following.batch.scale)
        scores = capped(self._codes.scores(layer, rounded, self._blocks[row]), exact.softmax.cap, LOG2_E)
        scores = (scores * STEPS).round_().div_(STEPS).unflatten(1, grouped.shape[1:3])
        visible = exact.visible[0, 0]
        kept = self.kept(row, [kept_sinks(self._decode.sinks, own) for own in self._scored[row]], visible)
        scores = F.pad(scores, (0, visible.shape[-1] - scores.shape[-1]))
        scores = scores.where(~kept[:, None], exact.scores[0] * LOG2_E)
        return _Predicted(scores.masked_fill_(~visible[:, None], -torch.inf), kept, visible & ~kept)

    def report(self, predicted: _Predicted, chosen: Tensor, held: Tensor, read_all: Tensor | None = None) -> None:
        """Note the share that a server reports of a prompt.

        Args:
            predicted: of its tokens.
            chosen: as ``chosen`` returns it.
            held: float64 [KV heads, tokens, group]; logarithm to base 2 of the mass of what was read, which is exact.
            read_all: bool [KV heads, tokens]; whether that is all that was chosen. Everywhere, if not given.
        """
        of_chosen, total = predicted.held(chosen[:, :, None]), predicted.total[..., 0]
        is_partial = (predicted.others & ~chosen).any(-1)[..., None]
        missed = (1 - of_chosen).clamp_min(0) * is_partial * (total - held).exp2()
        if read_all is not None:
            unread = (of_chosen.log2() + total - held).clamp_min(0).exp2() - 1
            missed += unread.masked_fill(read_all[..., None], 0)
        self._reported.append((1 / (1 + missed)).mean((0, 2)))

    def _count(self, row: int, kept: Tensor) -> None:
        """Count the codes, and the keys whose scores are exact; where they are most of the context, neither is read."""
        cache, lengths = self.following.batch.caches[0], self.following.lengths[row]
        codes = torch.tensor(self._scored[row], device=kept.device) * bytes_of_key(cache.head_dim, self._codes.bits)
        amounts = (cache.kv_heads * (kept * cache.vector_bytes + codes)).round().long()
        self.meter.read_bytes[self.rows_of(row)] += amounts.where(kept <= WHOLE_SHARE * lengths, 0)


class _TerminatedPass(CodedPass):
    """Attend to what low-bit keys choose, in order, until the output has settled."""

    def __init__(self, following: Following, policy: AttentionPolicy, codes: KeyCodes) -> None:
        super().__init__(following, policy, codes)
        self._termination = policy.early_termination

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        self._reported = []
        batch, tokens = self.following.batch, self.following.tokens
        output = torch.empty_like(queries)
        for part in self.parts():
            scores = Scores.of(self.following, layer, queries, part)
            predicted, chosen = self.chosen(layer, queries, part, scores)
            lengths = self.following.lengths[part.start]
            order = self._in_order(predicted, chosen, part.start)
            counts = chosen.sum(-1)
            positions = order.topk(int(counts.max()), dim=-1).indices.transpose(0, 1)
            slots = batch.slots[self.following.prompts[part.start]][positions]
            selection = Selection(slots, counts.T, lengths[:, None] == counts.T)
            rows = slice(part.start * tokens, (part.start + 1) * tokens)
            attended = self._attend(layer, queries[part.start], selection, rows)
            output[part.start] = attended.output
            exact = scores.log_sum_exp()[0]
            self.true_share[layer, rows] = (attended.log_sum_exp - exact).exp().clamp_max(1)
            held = attended.log_sum_exp.double().unflatten(1, (len(counts), -1)).transpose(0, 1) * LOG2_E
            self.report(predicted, chosen, held, counts <= attended.read.T)
        self.reported_share.append(torch.cat(self._reported))
        self.count_context(batch.caches[layer])
        return output

    def _in_order(self, predicted: _Predicted, chosen: Tensor, row: int) -> Tensor:
        """Return the order of what is chosen: int64 [KV heads, tokens, context], the highest first, others -1."""
        places = torch.arange(chosen.shape[-1], device=chosen.device)
        is_newest = places >= torch.tensor(self._scored[row], device=places.device)[:, None]
        newest, sinks = places + 2 * _FIRST, _FIRST + _PLACES - places
        order = (
            predicted.ranks(ORDER_KEYS).long().where(~predicted.kept, sinks.expand_as(chosen)).where(~is_newest, newest)
        )
        is_whole = chosen.sum(-1) == self.following.lengths[row]
        return order.where(~is_whole[..., None], newest).where(chosen, -1)

    def _attend(self, layer: int, queries: Tensor, selection: Selection, rows: slice) -> Attended:
        """Attend from a prompt's tokens, [tokens, query heads, head dim], some at a time; count what is read."""
        batch = self.following.batch
        cache = batch.caches[layer]
        of_token = _COPIES * selection.width * cache.kv_heads * cache.head_dim * torch.float32.itemsize
        at_once = max(1, self.following.memory // of_token)
        parts = []
        for begin in range(0, len(queries), at_once):
            own = slice(begin, min(begin + at_once, len(queries)))
            assert selection.to_the_end is not None
            some = Selection(selection.slots[own], selection.counts[own], selection.to_the_end[own])
            meter = Meter(own.stop - own.start, queries.device)
            termination = Termination.of([self._termination] * meter.context.shape[0], queries.device)
            parts.append(attend(queries[own], cache, some, batch.scale, meter, termination))
            for name, counts in vars(meter).items():
                vars(self.meter)[name][rows.start + own.start : rows.start + own.stop] += counts
        return Attended(
            torch.cat([part.output for part in parts]),
            torch.cat([part.log_sum_exp for part in parts]),
            torch.cat([part.read for part in parts]),
        )
