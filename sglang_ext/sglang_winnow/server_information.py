"""What the served model allows of a policy, and where SGLang says so: the key ``winnow`` of ``/server_info``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.audit_share import ENVIRONMENT, audits_on
from sglang_winnow.backend_name import NAME
from sglang_winnow.crossover import measured_here
from sglang_winnow.delta_profiles import delta_profile
from sglang_winnow.hooks import LAUNCH, Hook, refusing_to_start
from sglang_winnow.key_bits import index_settings
from sglang_winnow.metrics import METRICS
from sglang_winnow.profile_settings import default_kl, load_requests, profile, served_profile, under_load_kl
from sglang_winnow.quality_profile import Curve, Point, Profile
from sglang_winnow.served_policies import served_policies
from sglang_winnow.sglang_versions.arguments import attention_backends, resolved, verifies_drafts
from sglang_winnow.sglang_versions.releases import OLDEST, PASSES_WITHOUT_GRAPH
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.contract.layers import check_layers
from winnow_kernels.indexes.settings import DEFAULT
from winnow_kernels.policies.attention_policy import AttentionPolicy, check_against_model, check_served, parse_policy
from winnow_kernels.policies.declarations import declaration_of
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

# Where a policy travels in ``sampling_params.custom_params``: as JSON text, the one form that every transport carries.
PARAMETER: Final = "attention"

_TOLD_OF_PROFILE: Final[Mapping[str, bool | set[str]]] = {
    "device": True,
    "dtype": True,
    "date": True,
    "data": {"source", "prompts", "tokens"},
    "lengths": True,
    "floor": True,
}


@dataclass(frozen=True)
class ServedModel:
    """What a policy is checked against. Lengths are in tokens.

    Attributes:
        delta_layers: the Δ-layers calibrated for the model; None if it has not been calibrated.
        sliding_layers: those with a sliding window, which cannot be Δ-layers.
        linear_layers: those with linear attention, which cannot be Δ-layers, either.
        page_size: of the KV cache.
        chunk: most tokens of a prompt in one forward pass; None for no limit.
        has_policies: whether the server computes attention with Winnow; if not, every request is dense.
        decode_policies: those that it serves then.
        key_bits: bits of a channel in the codes of keys.
        verifies: whether the server checks drafts, for requests that ask for it.
        device: where it runs.
        kv_heads: of a layer.
        ranks: how many processes share the layers' heads.
        profile: what policies lose and read on this model; None if the server was given none.
    """

    layers: int
    context_length: int
    delta_layers: tuple[int, ...] | None = None
    sliding_layers: frozenset[int] = frozenset()
    linear_layers: frozenset[int] = frozenset()
    page_size: int = 16
    chunk: int | None = None
    has_policies: bool = True
    decode_policies: tuple[str, ...] = DECODE_POLICIES
    key_bits: int = DEFAULT.key_bits
    verifies: bool = False
    device: str = "cpu"
    kv_heads: int = 1
    ranks: int = 1
    profile: Profile | None = None

    def policy_of(self, custom_params: Mapping[str, Any] | None) -> AttentionPolicy:
        """Return the policy that a request's ``custom_params`` ask for, as this model runs it; dense if they ask none.

        Raises:
            PolicyError: it cannot be served.
        """
        text = (custom_params or {}).get(PARAMETER)
        if text is None:
            return AttentionPolicy()
        if not isinstance(text, str):
            raise PolicyError(PARAMETER, "must be a string of JSON")
        policy = parse_policy(text)
        if not (policy.is_dense or self.has_policies):
            raise PolicyError(PARAMETER, f"must be dense: the server was started without --attention-backend {NAME}")
        check_served(policy, self.decode_policies, verifies=self.verifies, calibrated=self.profile is not None)
        policy = self._as_run(policy)
        self._check_audit(policy)
        return policy

    @cached_property
    def choices(self) -> tuple[Curve, ...]:
        """The policies that the server chooses from: those of its profile that it serves."""
        curves = () if self.profile is None else self.profile.curves
        return tuple(curve for curve in curves if self._serves(curve.attention))

    def _serves(self, policy: AttentionPolicy) -> bool:
        try:
            check_served(policy, self.decode_policies, verifies=self.verifies, calibrated=True)
            self._as_run(policy)
        except PolicyError:
            return False
        return True

    def _as_run(self, policy: AttentionPolicy) -> AttentionPolicy:
        """Return ``policy`` as this model runs it.

        Raises:
            PolicyError: it cannot.
        """
        policy = check_against_model(policy, self.layers, self.context_length, self.delta_layers)
        self._check_chunk(policy)
        self._check_delta_layers(policy)
        self._check_release(policy)
        return policy

    @property
    def explains_not(self) -> str | None:
        """Where explanations are not served, if this server is such a place."""
        if not self.has_policies:
            return f"without --attention-backend {NAME}"
        if self.device != "cpu" and not PASSES_WITHOUT_GRAPH:
            return f"on {self.device} with this SGLang (use {OLDEST})"
        return f"with --tp-size {self.ranks}: no rank sees all heads" if self.ranks > 1 else None

    def _check_delta_layers(self, policy: AttentionPolicy) -> None:
        layers = declaration_of(policy.decode).own_layers(policy.decode)
        check_layers(f"{PARAMETER}.decode.delta_layers", layers, self.sliding_layers, self.linear_layers)

    def _check_release(self, policy: AttentionPolicy) -> None:
        if not policy.decode.releases_prompt:
            return
        if self.sliding_layers:
            raise PolicyError(
                f"{PARAMETER}.decode.release",
                f"must be false: layer {min(self.sliding_layers)} has a sliding window, which is part of the prompt",
            )

    def _check_audit(self, policy: AttentionPolicy) -> None:
        if policy.audits_next_token and self.device != "cpu" and not PASSES_WITHOUT_GRAPH:
            problem = f"must be false: it is not served on {self.device} with this SGLang (use {OLDEST})"
            raise PolicyError(f"{PARAMETER}.audit.kl", problem)
        if policy.audits_next_token and self.linear_layers:
            layer = min(self.linear_layers)
            problem = f"must be false: layer {layer} has linear attention, whose state one more pass moves on"
            raise PolicyError(f"{PARAMETER}.audit.kl", problem)
        if policy.audit_share and not audits_on(self.device):
            problem = f"must be 0: the server, on {self.device}, was started without {ENVIRONMENT}"
            raise PolicyError(f"{PARAMETER}.audit", problem)

    def _check_chunk(self, policy: AttentionPolicy) -> None:
        # A chunk that holds no whole block would never be scheduled.
        step = block_of(policy, self.page_size)
        if isinstance(policy.prefill, QuokaPrefill) and self.chunk is not None and step > self.chunk:
            raise PolicyError(
                f"{PARAMETER}.prefill.block",
                f"must fit --chunked-prefill-size ({self.chunk}) in whole pages of {self.page_size}",
            )

    def describe(self) -> dict[str, Any]:
        """Return the JSON object that ``/server_info`` shows."""
        return {
            "layers": self.layers,
            "sliding_layers": sorted(self.sliding_layers),
            "linear_layers": sorted(self.linear_layers),
            "context_length": self.context_length,
            "delta_layers": None if self.delta_layers is None else list(self.delta_layers),
            "policies": list(self.decode_policies) if self.has_policies else ["dense"],
            "prefill_policies": list(PREFILL_POLICIES) if self.has_policies else ["dense"],
            "key_bits": self.key_bits,
            "verifies": self.verifies,
            "kv_heads": self.kv_heads,
            "explains": self.explains_not is None,
            "profile": None if self.profile is None else self._describe_profile(self.profile),
        }

    def _describe_profile(self, profile: Profile) -> dict[str, Any]:
        return {
            "model": profile.model.name,
            "times_are_of_this_machine": measured_here() is not None,
            "kl": default_kl(),
            "under_load_kl": under_load_kl(),
            "load_requests": load_requests(),
            **profile.model_dump(mode="json", include=_TOLD_OF_PROFILE),
            "curves": [self._describe_curve(profile, curve) for curve in profile.curves],
        }

    def _describe_curve(self, profile: Profile, curve: Curve) -> dict[str, Any]:
        return {
            "attention": json.loads(curve.attention.canonical()),
            "served": curve in self.choices,
            "points": [_describe_point(profile, curve, point) for point in curve.points],
        }


def _describe_point(profile: Profile, curve: Curve, point: Point) -> dict[str, Any]:
    timed = profile.time_at(curve.attention, point.length)
    time = None if timed is None else timed.model_dump(mode="json", include={"seconds", "ratio"})
    return point.model_dump(mode="json") | {"time": time}


def block_of(policy: AttentionPolicy, page_size: int) -> int:
    """Return the grid, in tokens, on which a policy's prefill may be divided: whole blocks that are whole pages."""
    return math.lcm(policy.prefill.block, page_size) if isinstance(policy.prefill, QuokaPrefill) else page_size


def served_model(arguments: ServerArgs, config: ModelConfig) -> ServedModel:
    """Return what the model and the server's command line allow."""
    chunk = resolved(arguments).chunked_prefill_size
    has_policies = set(attention_backends(arguments)) == {NAME}
    verifies = verifies_drafts(resolved(arguments))
    return ServedModel(
        layers=config.num_hidden_layers,
        context_length=config.context_len,
        delta_layers=delta_profile(_folder(config.model_path)),
        sliding_layers=sliding_layers(config),
        linear_layers=linear_layers(config),
        page_size=resolved(arguments).page_size,
        chunk=chunk if chunk is not None and chunk > 0 else None,
        has_policies=has_policies,
        decode_policies=served_policies(verifies=verifies),
        key_bits=index_settings().key_bits,
        verifies=verifies,
        device=resolved(arguments).device,
        # Models that Winnow's attention does not serve may have none.
        kv_heads=config.get_total_num_kv_heads() if has_policies else 1,
        ranks=resolved(arguments).tp_size,
        profile=served_profile(_folder(config.model_path), index_settings().key_bits),
    )


def served_model_of(part: TokenizerManager | Scheduler) -> ServedModel:
    """Return the model that a part of SGLang serves; looked up once."""
    try:
        return part.winnow_model
    except AttributeError:
        part.winnow_model = served_model(part.server_args, part.model_config)
        return part.winnow_model


def sliding_layers(config: ModelConfig) -> frozenset[int]:
    """Return the layers that have a sliding window by the model's configuration."""
    kinds = getattr(config.hf_text_config, "layer_types", None) or ()
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def linear_layers(config: ModelConfig) -> frozenset[int]:
    """Return the layers that have linear attention by the model's configuration."""
    return frozenset(getattr(config.hf_text_config, "linear_layer_ids", ()))


def _folder(model: str) -> Path:
    """Return the folder of a model that is named by its path or by its repository, as SGLang's command line does."""
    path = Path(model)
    if path.exists():
        return path
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return path
    return Path(cached).parent if isinstance(cached, str) else path


def _check_profile(_engine: type, server_args: ServerArgs, *_: object, **__: object) -> None:
    """End the start before SGLang loads a model that the server's profile is not of."""
    if profile() is not None:
        with refusing_to_start():
            served_profile(_folder(server_args.model_path), index_settings().key_bits)


def _add_model(information: dict[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    with refusing_to_start():
        model = served_model(scheduler.server_args, scheduler.model_config)
    return information | {"winnow": model.describe()}


def _add_totals(output: GetInternalStateReqOutput, _scheduler: Scheduler, *_: object) -> None:
    output.internal_state["winnow"] = METRICS.totals()


_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
HOOKS: Final = (
    Hook(LAUNCH, _check_profile, HookType.BEFORE),
    Hook(f"{_SCHEDULER}.get_init_info", _add_model, HookType.AFTER),
    Hook(f"{_SCHEDULER}.get_internal_state", _add_totals, HookType.AFTER),
)
