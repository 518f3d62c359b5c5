"""What is measured of a policy: distances from dense attention, shares of attention, and what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from winnow_evaluation.fidelity.forcing import Outcome
from winnow_evaluation.offline_model import OfflineModel

RESAMPLES: Final = 10_000
INTERVAL: Final = "95 % percentile bootstrap over prompts"
_LARGE: Final = 0.95


@dataclass(frozen=True)
class Distances:
    """How far predictions are from dense attention's, of each token.

    Attributes:
        kl: KL(dense ‖ policy) of the next token in nats; float64 [prompts, tokens].
        top1: whether both rank the same token first; float64, 0 or 1.
        loss_change: −log p of the true next token, less dense attention's; float64.
    """

    kl: Tensor
    top1: Tensor
    loss_change: Tensor

    @classmethod
    def between(cls, model: OfflineModel, dense: Tensor, found: Tensor, true: Tensor) -> Distances:
        """Compare what was ``found`` with ``dense``, both [prompts, tokens, hidden size].

        Args:
            model: whose predictions they are.
            dense: before the model's last step.
            found: the same.
            true: int64 [prompts, tokens]; the next tokens.
        """
        of_prompts = []
        for own, other, following in zip(dense, found, true, strict=True):
            expected, got = model.log_probabilities(own), model.log_probabilities(other)
            # Rounding may leave less than nothing.
            kl = (expected.exp() * (expected - got)).sum(-1, dtype=torch.float64).clamp_min(0)
            top1 = (expected.argmax(-1) == got.argmax(-1)).double()
            change = (expected - got).gather(-1, following[:, None])[:, 0].double()
            of_prompts.append((kl, top1, change))
        return cls(*(torch.stack(of_all).cpu() for of_all in zip(*of_prompts, strict=True)))


@dataclass
class Result:
    """One policy on some prompts; lists have an entry for each.

    Attributes:
        kl: means over tokens.
        top1: the same.
        loss_change: the same.
        tokens: how many each has.
        counts: sums over tokens, by the names of ``Meter``.
        true_share: means over layers, tokens and query heads.
        reported_share: the same; empty where the policy reports none.
        successes: (token, layer, query head) that hold the share asked for; empty where none was.
        errors: reported less true share, of each (layer, token) a mean over query heads.
        layers: the numbers of those that see the whole context.
        by_layer: their true shares, float64 [layers] for each prompt.
    """

    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    loss_change: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    true_share: list[float] = field(default_factory=list)
    reported_share: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    layers: Sequence[int] = ()
    by_layer: list[Tensor] = field(default_factory=list)

    def add(self, distances: Distances, tokens: Sequence[int]) -> None:
        """Add prompts of which the first ``tokens`` count."""
        for number, count in enumerate(tokens):
            for name in ("kl", "top1", "loss_change"):
                getattr(self, name).append(float(getattr(distances, name)[number, :count].mean()))
        self.tokens += tokens

    def add_reads(self, outcome: Outcome, tokens: Sequence[int], p: float | None) -> None:
        """Add what the same prompts read, and the shares of it; ``p`` is the share asked for, if one was."""
        self.layers = outcome.layers
        true = outcome.true_share.double().cpu()
        reported = None if outcome.reported_share is None else outcome.reported_share.double().cpu()
        counts = {name: of_tokens.cpu() for name, of_tokens in outcome.counts.items()}
        for number, count in enumerate(tokens):
            self.add_counts({name: int(of_tokens[number, :count].sum()) for name, of_tokens in counts.items()})
            own = true[:, number, :count]
            self.true_share.append(float(own.mean()))
            self.by_layer.append(own.mean((1, 2)))
            if p is not None:
                self.successes.append(float((own >= p).double().mean()))
            if reported is not None:
                self.reported_share.append(float(reported[:, number, :count].mean()))
                self.errors.append((reported[:, number, :count] - own.mean(-1)).flatten())

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add what was read, by the names of ``Meter``."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def row(self) -> dict[str, Any]:
        """Return the figures of all prompts; None where something was not measured."""
        values = {"kl": self.kl, "top1": self.top1, "loss_change": self.loss_change}
        found = {"prompts": len(self.tokens), "tokens": sum(self.tokens)}
        means = {name: _mean(of_prompts) for name, of_prompts in values.items()}
        return (
            found
            | means
            | self._reads()
            | self._shares()
            | {"intervals": {name: interval(of_prompts) for name, of_prompts in values.items()}}
        )

    def _reads(self) -> dict[str, float | None]:
        return {
            "kv_read_ratio": self._ratio("read_bytes", "context_bytes"),
            "attended_ratio": self._ratio("attended", "context"),
            "terminated_ratio": self._ratio("terminated", "traversals"),
            "skipped_ratio": self._ratio("skipped_tiles", "tiles"),
        }

    def _shares(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "reported_share": _mean(self.reported_share),
            "true_share": _mean(self.true_share),
            "share_error": None,
            "share_error_p95": None,
            "success": _mean(self.successes),
            "worst_layer": None,
            "true_share_by_layer": None,
        }
        if self.by_layer:
            by_layer = torch.stack(self.by_layer).mean(0)
            worst = int(by_layer.argmin())
            found["worst_layer"] = {"layer": self.layers[worst], "true_share": float(by_layer[worst])}
            found["true_share_by_layer"] = [round(share, 4) for share in by_layer.tolist()]
        if self.errors:
            errors = torch.cat(self.errors)
            found["share_error"] = float(errors.mean())
            # Of more than 2^24 numbers torch.quantile takes none.
            found["share_error_p95"] = float(errors.abs().kthvalue(max(1, round(_LARGE * len(errors)))).values)
        return found

    def _ratio(self, part: str, whole: str) -> float | None:
        return self.counts[part] / self.counts[whole] if self.counts.get(whole) else None


def interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of a mean over prompts, the same for the same values; there is at least one."""
    data = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(data), (RESAMPLES, len(data)), generator=torch.Generator().manual_seed(0))
    bounds: list[float] = data[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return bounds


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
