"""Which policies are measured: those asked for, the presets, and a sweep over each policy's parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from winnow_evaluation.fidelity.coded import reads_codes
from winnow_evaluation.fidelity.oracles import Oracle, TopP, TopPages, TopTokens
from winnow_evaluation.fidelity.record import SWEPT
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.decode.coded_tokens import WINDOW
from winnow_kernels.indexes.key_codes import DEFAULT_BITS
from winnow_kernels.policies.attention_policy import AttentionPolicy, check_against_model, parse_policy
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.quoka.parameters import QuokaDecode
from winnow_kernels.policies.registry import PARAMETERS
from winnow_service.policies.presets import PRESETS

BUDGETS: Final = (256, 512, 1024, 2048, 4096)
TOKEN_BUDGETS: Final = (128, *BUDGETS)
"""Of what reads the best tokens one by one: fewer than others can do with."""
SHARES: Final = (0.5, 0.75, 0.9, 0.95, 0.99)
_SINKS_OF_STREAMING: Final = 4
_CODED: Final = ("lowbit_top_k", "quoka")
_BUDGETED: Final = tuple(
    name
    for name, kind in PARAMETERS["decode"].items()
    if "budget" in kind.model_fields and name not in _CODED and not kind.drafts_only
)


@dataclass(frozen=True)
class Measured:
    """A policy that is measured.

    Attributes:
        policy: as the model runs it.
        preset: its name among the presets, or the name it was given on the command line; None without.
        bits: of a channel of low-bit keys, if it reads such.
    """

    policy: AttentionPolicy
    preset: str | None = None
    bits: int = DEFAULT_BITS

    @property
    def name(self) -> str:
        """The policy's, of the phase in which it is not dense."""
        decode, prefill = self.policy.decode, self.policy.prefill
        return prefill.policy if self.is_prefill else decode.policy

    @property
    def is_prefill(self) -> bool:
        """Whether all of it that is not dense is the prefill."""
        return not self.policy.has_dense_prefill and self.policy.decode.policy == "dense"

    @property
    def is_coded(self) -> bool:
        """Whether it reads low-bit keys."""
        return reads_codes(self.policy)

    @property
    def prefill(self) -> AttentionPolicy:
        """Its prefill alone."""
        return AttentionPolicy(prefill=self.policy.prefill)

    @property
    def p(self) -> float | None:
        """The share that each query head is to hold; None where there is no such."""
        share = getattr(self.policy.decode, "p", None)
        return share if isinstance(share, float) else None

    def parameters(self) -> dict[str, Any]:
        """Return what tells it from others of its name."""
        parameters = self.policy.model_dump(mode="json", exclude_none=True)
        own = parameters.pop("prefill" if self.is_prefill else "decode")
        own.pop("policy")
        if self.policy.has_dense_prefill:
            parameters.pop("prefill")
        if self.is_prefill:
            parameters.pop("decode")
        bits = {"bits": self.bits} if self.is_coded else {}
        return {**own, **bits, **parameters}

    @property
    def named(self) -> tuple[str, dict[str, Any], str | None]:
        """Its name, parameters and preset."""
        return self.name, self.parameters(), self.preset

    @property
    def label(self) -> str:
        """What it is called while it is being measured."""
        parameters = self.parameters()
        shown = [f"{name} {parameters[name]:g}" for name in SWEPT if name in parameters]
        more = [f"{self.bits} bits"] if self.is_coded else []
        more += ["early termination"] if "early_termination" in parameters else []
        return ", ".join([" ".join([self.name, *shown]), *more]) + (f" ({self.preset})" if self.preset else "")


def sweep(context: int, bits: Sequence[int] = (DEFAULT_BITS,)) -> list[Measured]:
    """Return every policy over its parameter, budgets as far as they are smaller than the context.

    Args:
        context: tokens of a prompt.
        bits: of a channel of low-bit keys: those that are measured.
    """
    decode: list[Mapping[str, Any]] = [{"policy": "tactic", "p": share} for share in SHARES]
    budgets = [budget for budget in BUDGETS if budget < context]
    for budget in budgets:
        decode += [{"policy": name, "budget": budget} for name in _BUDGETED]
        decode.append({"policy": "streaming_llm", "window": budget - _SINKS_OF_STREAMING})
    prefill: list[Mapping[str, Any]] = [{"policy": "quoka", "budget_ratio": ratio} for ratio in (0.125, 0.25, 0.5)]
    prefill.append({"policy": "quoka", "budget": 1024})
    policies = [Measured(parse_policy({"decode": one})) for one in decode]
    policies.append(Measured(parse_policy({"decode": {"policy": "tactic", "p": 0.9}, "early_termination": {}})))
    for policy in _coded(context):
        policies += [Measured(policy, bits=each) for each in bits]
    return policies + [Measured(parse_policy({"prefill": one})) for one in prefill]


def _coded(context: int) -> Iterator[AttentionPolicy]:
    for share in SHARES:
        yield AttentionPolicy(decode=LowBitTopP(p=share))
    for budget in TOKEN_BUDGETS:
        if budget < context:
            yield AttentionPolicy(decode=LowBitTopK(budget=budget))
    for budget in BUDGETS:
        if budget < context:
            yield AttentionPolicy(decode=QuokaDecode(budget=budget))


def presets() -> Iterator[Measured]:
    """Yield the presets that do not answer as dense attention does."""
    for name, preset in PRESETS.items():
        if not preset.attention.answers_densely:
            yield Measured(preset.attention, name)


def asked_for(given: Iterable[Mapping[str, Any] | str], bits: Sequence[int] = (DEFAULT_BITS,)) -> Iterator[Measured]:
    """Yield the policies of a command line: what JSON says, or the names of presets.

    Policies that read low-bit keys come with each number of ``bits``, presets with a server's default.

    Raises:
        PolicyError: one is no policy, or the name of no preset.
    """
    for asked in given:
        if not isinstance(asked, str):
            measured = Measured(parse_policy(asked))
            yield from (replace(measured, bits=each) for each in (bits if measured.is_coded else (DEFAULT_BITS,)))
        elif asked in PRESETS:
            yield Measured(PRESETS[asked].attention, asked)
        else:
            raise PolicyError("attention", f"{asked} is none of the presets {', '.join(PRESETS)}")


def oracles(context: int) -> list[Oracle]:
    """Return every oracle over its parameter; of tokens also those that keep the newest, as low-bit keys do."""
    budgets = [budget for budget in BUDGETS if budget < context]
    found: list[Oracle] = []
    for newest in (0, WINDOW):
        found += [TopP(share=share, newest=newest) for share in SHARES]
        found += [TopTokens(budget=budget, newest=newest) for budget in TOKEN_BUDGETS if budget < context]
    return [*found, *(TopPages(budget=budget) for budget in budgets)]


def full_layers_of_delta(policies: Iterable[Measured]) -> int | None:
    """Return the most full layers of a DELTA without its Δ-layers; None if there is no such policy."""
    decodes = (measured.policy.decode for measured in policies)
    return max(
        (decode.full_layers for decode in decodes if isinstance(decode, Delta) and decode.delta_layers is None),
        default=None,
    )


def checked(
    policies: Iterable[Measured], layers: int, context_length: int, delta_layers: Sequence[int] | None
) -> list[Measured]:
    """Return the policies as a model runs them, each once.

    Raises:
        PolicyError: the model cannot run one of them.
    """
    found: dict[tuple[str, str | None, int], Measured] = {}
    for measured in policies:
        policy = check_against_model(measured.policy, layers, context_length, delta_layers)
        found.setdefault((policy.canonical(), measured.preset, measured.bits), replace(measured, policy=policy))
    return list(found.values())
