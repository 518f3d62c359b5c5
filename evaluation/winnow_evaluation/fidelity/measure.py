"""Measuring: every policy on the same prompts, beside dense attention, oracles, and dense attention asked once more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from winnow_evaluation.fidelity.forcing import Forcing, Outcome
from winnow_evaluation.fidelity.oracles import Oracle
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.fidelity.results import Distances, Result
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.policies.attention_policy import AttentionPolicy

FLOOR: Final = "dense"
"""What the noise floor's rows are called: dense attention beside itself."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how.

    Attributes:
        policies: with dense prefill, with sparse prefill, or both.
        oracles: of decode.
        batch: prompts whose KV cache is held at a time.
        scored: last tokens of a prompt that prefill policies are compared on.
        prefilled: of how many prompts prefill policies are measured, from the first on.
        memory: bytes that a step may take for what it reads.
    """

    policies: Sequence[Measured]
    oracles: Sequence[Oracle]
    batch: int
    scored: int
    prefilled: int
    memory: int

    @property
    def after_dense_prefill(self) -> list[Measured]:
        return [measured for measured in self.policies if measured.policy.has_dense_prefill]

    @property
    def after_sparse_prefill(self) -> list[Measured]:
        return [measured for measured in self.policies if not measured.policy.has_dense_prefill]

    @property
    def window(self) -> int:
        """The longest observation window of the policies."""
        windows = [getattr(measured.policy.decode, "observation_window", 0) for measured in self.policies]
        return max(windows, default=0)

    def steps(self, prompts: int) -> int:
        """Return how often ``measured`` tells how far it is."""
        batches = range(0, prompts, self.batch)
        # Dense attention, once more, and prefill once more.
        steps = len(batches) * (2 + len(self.after_dense_prefill) + len(self.oracles))
        if sparse := self.after_sparse_prefill:
            steps += sum(begin < self.prefilled for begin in batches) * (1 + len(sparse))
        return steps

    def measured(
        self, model: OfflineModel, prompts: Sequence[Continued], advance: Callable[[str], None]
    ) -> Iterator[list[dict[str, Any]]]:
        """Measure all policies on the prompts; yield the rows so far, after each batch's decode and each prefill.

        A row says of how many prompts it is. The last rows are complete.

        Args:
            model: what reads them.
            prompts: and what follows each.
            advance: called with what was measured last.
        """
        rows = _Rows()
        for begin in range(0, len(prompts), self.batch):
            some = prompts[begin : begin + self.batch]
            with torch.inference_mode():
                batch = _Batch(model, some, self)
                advance("dense")
                batch.measure_decode(rows, advance)
            yield rows.rows()
            for _ in batch.measured_prefills(min(len(some), self.prefilled - begin), rows, advance):
                yield rows.rows()


class _Rows:
    """The results so far, by what they are of, in the order of their first."""

    def __init__(self) -> None:
        self._results: dict[str, tuple[dict[str, Any], Result]] = {}

    def of(self, phase: str, policy: str, parameters: dict[str, Any], preset: str | None = None) -> Result:
        """Return the result to add to."""
        about = {"phase": phase, "policy": policy, "parameters": parameters, "preset": preset}
        return self._results.setdefault(repr(about), (about, Result()))[1]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows."""
        return [about | result.row() for about, result in self._results.values()]


class _Batch:
    """Some prompts, prefilled densely, and dense attention's predictions behind them.

    All is compared with dense attention and a cache of the model's own dtype.
    """

    def __init__(self, model: OfflineModel, prompts: Sequence[Continued], plan: Plan) -> None:
        self._model, self._prompts, self._plan = model, prompts, plan
        self._counts = [len(prompt.following) - 1 for prompt in prompts]
        self._following = _padded([prompt.following for prompt in prompts], model.device)
        exact = self._prefill(len(prompts), cache_dtype=model.dtype)
        self._reference = self._forcing_of(exact).dense().hidden
        self._reference_last = exact.last
        self._dense = exact if model.cache_dtype == model.dtype else self._prefill(len(prompts))
        self._forcing = self._forcing_of(self._dense)

    def measure_decode(self, rows: _Rows, advance: Callable[[str], None]) -> None:
        """Measure the noise floor, the policies that begin with a dense prefill, and the oracles."""
        self._add(rows.of("decode", FLOOR, {"prompts_at_once": 1}), self._forcing.dense_one_by_one(), None)
        advance("dense, one prompt at a time")
        by_policy: defaultdict[tuple[str, int], list[Measured]] = defaultdict(list)
        for measured in self._plan.after_dense_prefill:
            by_policy[measured.policy.canonical(), measured.bits].append(measured)
        for same in by_policy.values():
            outcome = self._forcing.policy(same[0].policy, bits=same[0].bits)
            for measured in same:
                self._add(rows.of("decode", *measured.named), outcome, measured.p)
                advance(measured.label)
        for oracle in self._plan.oracles:
            self._add(rows.of("decode", oracle.name, oracle.parameters()), self._forcing.oracle(oracle), oracle.p)
            advance(oracle.label)

    def measured_prefills(self, count: int, rows: _Rows, advance: Callable[[str], None]) -> Iterator[None]:
        """Measure the prefill policies of the first ``count`` prompts, and what is decoded after each, one by one."""
        sparse = self._plan.after_sparse_prefill
        if not sparse or count < 1:
            return
        # Not around all of it: a generator that pauses in inference mode would leave its caller in it.
        with torch.inference_mode():
            halves = self._prefill(count, chunk=-(-max(self._dense.lengths) // 2))
            self._add_prefill(rows.of("prefill", FLOOR, {"chunks": 2}), halves)
        advance("dense prefill in two chunks")
        by_prefill: defaultdict[str, list[Measured]] = defaultdict(list)
        for measured in sparse:
            by_prefill[measured.prefill.canonical()].append(measured)
        for of_prefill in by_prefill.values():
            with torch.inference_mode():
                self._measure_prefill(count, of_prefill, rows, advance)
            yield

    def _measure_prefill(
        self, count: int, of_prefill: Sequence[Measured], rows: _Rows, advance: Callable[[str], None]
    ) -> None:
        prefill = Measured(of_prefill[0].prefill)
        batch = self._prefill(count, policy=prefill.policy)
        self._add_prefill(rows.of("prefill", prefill.name, prefill.parameters()), batch)
        for measured in of_prefill:
            if not measured.is_prefill:
                outcome = self._forcing_of(batch).policy(measured.policy, bits=measured.bits)
                self._add(rows.of("decode", *measured.named), outcome, measured.p)
            advance(measured.label)

    def _prefill(
        self,
        count: int,
        *,
        policy: AttentionPolicy | None = None,
        chunk: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> PrefilledBatch:
        prompts = [prompt.tokens for prompt in self._prompts[:count]]
        scored = min(self._plan.scored, *map(len, prompts)) if self._plan.after_sparse_prefill else 1
        room = self._following.shape[1] - 1
        return PrefilledBatch(
            self._model,
            prompts,
            room,
            policy=policy,
            scored=scored,
            window=self._plan.window,
            chunk=chunk,
            cache_dtype=cache_dtype,
        )

    def _forcing_of(self, batch: PrefilledBatch) -> Forcing:
        return Forcing(batch, self._following[: batch.prompts, :-1], self._plan.memory)

    def _add(self, result: Result, outcome: Outcome, p: float | None) -> None:
        counts = self._counts[: len(outcome.hidden)]
        true = self._following[: len(counts), 1:]
        result.add(Distances.between(self._model, self._reference[: len(counts)], outcome.hidden, true), counts)
        result.add_reads(outcome, counts, p)

    def _add_prefill(self, result: Result, batch: PrefilledBatch) -> None:
        scored = batch.last.shape[1]
        # Behind the last of a prompt's tokens comes the first of what follows it.
        texts = [[*prompt.tokens, prompt.following[0]] for prompt in self._prompts[: batch.prompts]]
        true = torch.tensor([text[-scored:] for text in texts], device=batch.last.device)
        dense = self._reference_last[: batch.prompts]
        result.add(Distances.between(self._model, dense, batch.last, true), [scored] * batch.prompts)
        result.add_counts(batch.reads)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of tokens, those that are shorter than the longest with token 0 behind them."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
