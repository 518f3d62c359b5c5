"""Forcing: the true continuation of prompts under one policy after another, from one prefill that all of them share.

Under a policy the key of a token depends on what the tokens before it attended to, so a server decodes them one after
another. Here they go through the model together: in a layer, the keys and values of all of them are written, and then
each attends as a request of its own, whose context ends with it and whose pages are its prompt's. A step looks at
nothing behind its own token, and what it selects depends on its own queries and on keys before it. So each token gets
what it would get step by step, and the model runs once instead of once for each token. A ``block`` of 1 is step by
step: a test compares the two.

Every step runs its policy: the lengths below which a server runs a policy dense do not apply.

What one layer loses by itself, and how long it takes, is asked with the queries of dense attention, over the keys and
values that dense attention wrote (``replay``, ``time``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

import torch
from torch import Tensor

from sglang_winnow.request_state import RequestState
from winnow_evaluation.fidelity.coded import coded_pass, is_at_once, reads_codes
from winnow_evaluation.fidelity.exact import Following, Scores
from winnow_evaluation.fidelity.oracles import Oracle
from winnow_evaluation.fidelity.passes import ExactPass, Pass, PolicyPass
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_kernels.indexes.clusters import ClusterIndex, clustered_until
from winnow_kernels.indexes.key_codes import DEFAULT_BITS
from winnow_kernels.policies.attention_policy import AttentionPolicy

DENSE: Final = AttentionPolicy()


@dataclass(frozen=True)
class Outcome:
    """What follows the prompts, under one policy.

    Attributes:
        hidden: [prompts, tokens, hidden size]; before the model's last step.
        counts: what each token's step read, by the names of ``Meter``: int64 [prompts, tokens].
        layers: the numbers of those that see the whole context: shares are of these.
        true_share: float32 [layers, prompts, tokens, query heads]; the exact attention mass of what was read.
        reported_share: float64 [layers, prompts, tokens]; what the policy says of it, a mean over query heads; None if
            it says nothing.
    """

    hidden: Tensor
    counts: dict[str, Tensor]
    layers: Sequence[int]
    true_share: Tensor
    reported_share: Tensor | None

    @classmethod
    def joined(cls, parts: Sequence[Outcome], dim: int) -> Outcome:
        """Return parts as one, along the prompts (0) or along the tokens (1)."""
        reported = [part.reported_share for part in parts if part.reported_share is not None]
        return cls(
            torch.cat([part.hidden for part in parts], dim),
            {name: torch.cat([part.counts[name] for part in parts], dim) for name in parts[0].counts},
            parts[0].layers,
            torch.cat([part.true_share for part in parts], dim + 1),
            torch.cat(reported, dim + 1) if reported else None,
        )


@dataclass(frozen=True)
class Replayed:
    """What attention comes to in each layer that sees the whole context, with given queries.

    Attributes:
        outputs: of each of these layers, [prompts, tokens, query heads, head dim].
        counts: what was read, by the names of ``Meter``: sums over prompts, tokens and layers.
    """

    outputs: list[Tensor]
    counts: Mapping[str, int]

    @property
    def kv_read_ratio(self) -> float:
        """Bytes read, of those that dense attention reads."""
        return self.counts["read_bytes"] / self.counts["context_bytes"]


class Forcing:
    """The continuations of a batch's prompts. Only one run at a time may be under way in a batch."""

    def __init__(self, batch: PrefilledBatch, tokens: Tensor, memory: int) -> None:
        """
        Args:
            batch: the prompts, with room for the tokens.
            tokens: int64 [prompts, tokens]; what follows each.
            memory: bytes that a step may take for what it reads.
        """
        self._batch = batch
        self._tokens = tokens
        self._memory = memory
        self._everything = range(batch.prompts)

    @classmethod
    def greedy(cls, batch: PrefilledBatch, count: int, memory: int) -> tuple[Self, Tensor]:
        """Let dense attention say greedily what follows the prompts, as if no token ended an answer.

        Args:
            batch: the prompts, with room for ``count`` tokens.
            count: how many of the tokens it says are fed.
            memory: as for a ``Forcing``.

        Returns:
            The continuation, and what dense attention says behind each of its tokens: int64 [prompts, count].
        """
        said = torch.zeros(batch.prompts, count + 1, dtype=torch.int64, device=batch.model.device)
        said[:, 0] = batch.model.best(batch.last[:, -1])
        forcing = cls(batch, said[:, :-1], memory)
        for token in range(count):
            following = Following(batch, range(batch.prompts), token, 1, memory)
            said[:, token + 1] = batch.model.best(forcing._outcome(following, ExactPass).hidden[:, 0])
        return forcing, said[:, 1:]

    def dense(self) -> Outcome:
        """Attend to everything: what the others are compared with."""
        return self.run(ExactPass)

    def dense_one_by_one(self) -> Outcome:
        """Attend to everything once more, each prompt by itself, by the steps of the policy ``dense``."""
        prompts = (range(prompt, prompt + 1) for prompt in self._everything)
        return Outcome.joined([self.policy(DENSE, prompts=each) for each in prompts], 0)

    def oracle(self, oracle: Oracle) -> Outcome:
        """Attend to what an oracle reads."""
        return self.run(lambda following: ExactPass(following, oracle))

    def policy(
        self,
        policy: AttentionPolicy,
        *,
        bits: int = DEFAULT_BITS,
        block: int | None = None,
        prompts: range | None = None,
    ) -> Outcome:
        """Attend by a policy's decode steps, or as these would.

        Args:
            policy: as the model runs it (``check_against_model``).
            bits: of a channel of low-bit keys.
            block: most tokens that go through the model together; all without it.
            prompts: some of the prompts; all without it.
        """
        return self.run(self._passes_of(policy, bits), block=block, prompts=prompts)

    def steps(self, policy: AttentionPolicy, *, block: int | None = None, prompts: range | None = None) -> Outcome:
        """Attend by a policy's decode steps, those that a CPU server takes; arguments as for ``policy``."""
        states = self._states(policy)
        return self.run(lambda following: PolicyPass(following, policy, states), block=block, prompts=prompts)

    def queries(self) -> list[Tensor]:
        """Attend to everything, and return each layer's queries: [prompts, tokens, query heads, head dim] each."""
        noted: list[list[Tensor]] = [[] for _ in range(self._batch.model.layers)]
        self.run(lambda following: _NotingPass(following, noted))
        # Of layers with a sliding window there are none.
        return [torch.cat(of_layer, 1) if of_layer else torch.empty(0) for of_layer in noted]

    def replay(self, policy: AttentionPolicy, queries: Sequence[Tensor], *, bits: int = DEFAULT_BITS) -> Replayed:
        """Attend by a policy's decode steps with the queries of dense attention.

        Args:
            policy: as for ``policy``.
            queries: what ``queries`` has returned: the cache still holds what it wrote.
            bits: of a channel of low-bit keys.
        """
        make, layers = self._passes_of(policy, bits), self._batch.model.full_layers
        outputs: list[list[Tensor]] = [[] for _ in layers]
        counts: dict[str, int] = {}
        for begin, end in pairwise(self._bounds(self._everything, self._tokens.shape[1])):
            attending = make(Following(self._batch, self._everything, begin, end - begin, self._memory))
            for own, layer in zip(outputs, layers, strict=True):
                own.append(attending.attend(layer, queries[layer][:, begin:end]))
            for name, count in attending.counts.items():
                counts[name] = counts.get(name, 0) + int(count.sum())
        return Replayed([torch.cat(own, 1) for own in outputs], counts)

    def time(
        self, policies: Sequence[AttentionPolicy], queries: Sequence[Tensor], steps: int, *, bits: int = DEFAULT_BITS
    ) -> list[list[float]]:
        """Time the decode steps of policies, those that a CPU server takes: attention in all layers, nothing else.

        Policies take turns, and another one begins each step: what else the machine does slows all of them. A step
        before the first one is not timed. It builds indexes.

        Args:
            policies: as for ``policy``.
            queries: as for ``replay``.
            steps: how many; where so many tokens do not follow the prompts, from the first token on again.
            bits: of a channel of low-bit keys.

        Returns:
            Of each policy the seconds of each step.
        """
        self._batch.use_codes(bits)
        layers = self._batch.model.full_layers
        states = [self._states(policy) for policy in policies]
        seconds: list[list[float]] = [[] for _ in policies]
        for step in range(-1, steps):
            token = max(step, 0) % self._tokens.shape[1]
            own_queries = [queries[layer][:, token : token + 1] for layer in layers]
            following = Following(self._batch, self._everything, token, 1, self._memory)
            for place in range(len(policies)):
                number = (place + step) % len(policies)
                begin = time.perf_counter()
                attending = PolicyPass(following, policies[number], states[number], notes_shares=False)
                for layer, own in zip(layers, own_queries, strict=True):
                    attending.attend(layer, own)
                if step >= 0:
                    seconds[number].append(time.perf_counter() - begin)
        return seconds

    def _states(self, policy: AttentionPolicy) -> list[RequestState]:
        return [self._batch.state(prompt, policy) for prompt in self._everything]

    def _passes_of(self, policy: AttentionPolicy, bits: int) -> Callable[[Following], Pass]:
        """Return what makes passes that attend by a policy's decode steps, or as these would."""
        if reads_codes(policy):
            codes = self._batch.use_codes(bits)
            if is_at_once(policy):
                return lambda following: coded_pass(following, policy, codes)
        states = self._states(policy)
        return lambda following: PolicyPass(following, policy, states)

    def run(
        self, make: Callable[[Following], Pass], *, block: int | None = None, prompts: range | None = None
    ) -> Outcome:
        """Attend as the passes do that ``make`` makes; ``block`` and ``prompts`` as for ``policy``."""
        chosen = self._everything if prompts is None else prompts
        self._batch.forget()
        parts = []
        for begin, end in pairwise(self._bounds(chosen, block or self._tokens.shape[1])):
            following = Following(self._batch, chosen, begin, end - begin, self._memory)
            parts.append(self._outcome(following, make))
        return Outcome.joined(parts, 1)

    def _outcome(self, following: Following, make: Callable[[Following], Pass]) -> Outcome:
        batch, prompts, slots = self._batch, following.prompts, following.slots
        batch.begin(slots)
        attending = make(following)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, _scale: float) -> Tensor:
            batch.write(layer, slots, keys, values)
            return attending.attend(layer, queries) if batch.model.windows[layer] is None else windowed(layer, queries)

        def windowed(layer: int, queries: Tensor) -> Tensor:
            output = torch.empty_like(queries)
            for part in following.parts():
                output[part] = Scores.of(following, layer, queries, part).attend().to(queries.dtype)
            return output

        own = slice(following.first, following.first + following.tokens)
        fed = self._tokens[prompts.start : prompts.stop, own]
        hidden = batch.model.hidden(fed, following.lengths - 1, attend)
        reported = attending.reported_share
        return Outcome(
            hidden,
            {name: counts.view(fed.shape) for name, counts in attending.counts.items()},
            batch.model.full_layers,
            attending.true_share[batch.model.full_layers].unflatten(1, fed.shape),
            torch.stack(reported).unflatten(1, fed.shape) if reported else None,
        )

    def _bounds(self, prompts: range, block: int) -> list[int]:
        """Return where the passes begin, and where the last ends.

        A cluster of decoded tokens is built when they are written, in all layers: it begins a pass.
        """
        tokens, piece = self._tokens.shape[1], self._batch.indexes[ClusterIndex].piece
        bounds = {*range(0, tokens, block), tokens}
        for length in {self._batch.lengths[prompt] for prompt in prompts}:
            clustered = [clustered_until(length, length + 1 + token, piece) for token in range(tokens)]
            bounds |= {token for token in range(1, tokens) if clustered[token] != clustered[token - 1]}
        return sorted(bounds)


class _NotingPass(ExactPass):
    """Attend to everything, and note each layer's queries."""

    def __init__(self, following: Following, noted: Sequence[list[Tensor]]) -> None:
        super().__init__(following)
        self._noted = noted

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        self._noted[layer].append(queries.clone())
        return super().attend(layer, queries)
