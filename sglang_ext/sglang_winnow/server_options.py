"""What a server may be started with beside the attention backend, on which device, and why not where it is refused.

The documentation's table and the tests are made of these rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.backend_name import NAME
from sglang_winnow.hooks import LAUNCH, Hook
from sglang_winnow.sglang_versions.arguments import resolved, splits_attention_by_data, verifies_drafts
from sglang_winnow.sglang_versions.hook_targets import target
from sglang_winnow.sglang_versions.releases import OLDEST, VERIFIES_ON_CUDA
from winnow_kernels.contract.verification import ALGORITHM

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class Device(StrEnum):
    """Where a server computes attention."""

    CPU = "CPU"
    CUDA = "CUDA"


@dataclass(frozen=True)
class Option:
    """Something of SGLang's that the command line asks for.

    Attributes:
        feature: what it is called.
        example: a command line that asks for it, the flag first.
        asked: whether the arguments ask for it.
        served_on: the devices on which the backend serves it.
        reason: why it is refused elsewhere, as a clause.
    """

    feature: str
    example: str
    asked: Callable[[ServerArgs], bool]
    served_on: frozenset[Device] = frozenset()
    reason: str = ""

    def refusal(self, on: Device) -> str:
        """Return the sentence that refuses it on a device."""
        where = f" on {on}" if self.served_on else ""
        return (
            f"Winnow: the server does not start, because --attention-backend {NAME} does not serve {self.feature}"
            f"{where} ({self.flag}): {self.reason}."
        )

    @property
    def flag(self) -> str:
        return self.example.split()[0]


def _drafts(*algorithms: str) -> Callable[[ServerArgs], bool]:
    return lambda arguments: arguments.speculative_algorithm in algorithms


_CPU: Final = frozenset({Device.CPU})
_CUDA: Final = frozenset({Device.CUDA})
_UNVERIFIED: Final = "a step that verifies drafted tokens has no policy yet"
_ONE_CACHE: Final = "its pages come and go in ways that the rules of the radix cache do not see"
_ONE_POOL: Final = "a policy looks at the whole context, of which each rank would have a part"
_ONE_BATCH: Final = "a forward pass has one plan, for one batch"

OPTIONS: Final = (
    Option(
        "data parallelism",
        "--dp-size 2",
        lambda arguments: arguments.dp_size > 1 and not splits_attention_by_data(arguments),
        _CPU | _CUDA,
    ),
    Option(
        "mixed chunks",
        "--enable-mixed-chunk",
        lambda arguments: arguments.enable_mixed_chunk,
        _CPU,
        "kernels of a policy's decode steps take a batch that decodes, and no other rows",
    ),
    Option(
        "LoRA",
        "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj k_proj v_proj",
        lambda arguments: bool(arguments.enable_lora or arguments.lora_paths),
        reason="SGLang's adapters need CUDA, where its graphs are of adapters or of kinds of batches, not of both",
    ),
    Option(
        "pipeline parallelism",
        "--pipeline-parallel-size 2",
        lambda arguments: arguments.pp_size > 1,
        reason="each stage would count, and answer, for its own layers only",
    ),
    Option(
        "the hierarchical cache",
        "--enable-hierarchical-cache",
        # Later releases have links to other hosts' caches beside it.
        lambda arguments: bool(
            arguments.enable_hierarchical_cache or getattr(arguments, "enable_unified_cache_external_linker", False)
        ),
        reason="pages come back from the host beside the forward pass, and indexes would not know of it",
    ),
    Option("LMCache", "--enable-lmcache", lambda arguments: arguments.enable_lmcache, reason=_ONE_CACHE),
    Option(
        "another radix cache",
        "--radix-cache-backend cpp",
        lambda arguments: arguments.radix_cache_backend is not None,
        reason=_ONE_CACHE,
    ),
    Option(
        "streaming sessions",
        "--enable-streaming-session",
        lambda arguments: arguments.enable_streaming_session,
        reason=_ONE_CACHE,
    ),
    Option(
        "prefill-decode disaggregation",
        "--disaggregation-mode decode --disaggregation-transfer-backend fake",
        lambda arguments: arguments.disaggregation_mode != "null",
        reason="what arrives is keys and values, without the queries and the counts of the prefill",
    ),
    Option(
        "prefill-decode multiplexing", "--enable-pdmux", lambda arguments: arguments.enable_pdmux, reason=_ONE_BATCH
    ),
    Option(
        "two-batch overlap",
        "--enable-two-batch-overlap",
        lambda arguments: arguments.enable_two_batch_overlap,
        reason=_ONE_BATCH,
    ),
    *(
        Option(
            f"speculative decoding by {kind}",
            f"--speculative-algorithm {algorithms[0]}",
            _drafts(*algorithms),
            reason=_UNVERIFIED,
        )
        for kind, algorithms in (("EAGLE", ("EAGLE", "EAGLE3")), ("MTP", ("NEXTN",)), ("NGRAM", ("NGRAM",)))
    ),
    Option(
        "other speculative decoding",
        "--speculative-algorithm STANDALONE",
        lambda arguments: arguments.speculative_algorithm is not None and not verifies_drafts(arguments),
        reason=_UNVERIFIED,
    ),
    Option(
        "verification of drafts",
        f"--speculative-algorithm {ALGORITHM}",
        verifies_drafts,
        _CPU | _CUDA if VERIFIES_ON_CUDA else _CPU,
        "" if VERIFIES_ON_CUDA else f"it has run there with SGLang {OLDEST} only",
    ),
    Option(
        "torch.compile",
        "--enable-torch-compile",
        lambda arguments: arguments.enable_torch_compile,
        reason="what a policy does depends on the request, and would be compiled anew or fixed",
    ),
    Option(
        "deterministic inference",
        "--enable-deterministic-inference",
        lambda arguments: arguments.enable_deterministic_inference,
        reason="which tokens are selected may depend on the rounding of another batch",
    ),
    Option(
        "data-parallel attention",
        "--enable-dp-attention --dp-size 2 --tensor-parallel-size 2",
        splits_attention_by_data,
        reason=_ONE_BATCH,
    ),
    Option(
        "context parallelism",
        "--attention-context-parallel-size 2 --tensor-parallel-size 2",
        lambda arguments: arguments.attn_cp_size > 1,
        reason=_ONE_POOL,
    ),
    Option(
        "context parallelism in decode",
        "--decode-context-parallel-size 2 --tensor-parallel-size 2",
        lambda arguments: arguments.dcp_size > 1,
        reason=_ONE_POOL,
    ),
    Option(
        "another backend for prefill or decode than for the rest",
        "--prefill-attention-backend torch_native",
        lambda arguments: any(
            backend not in (None, NAME)
            for backend in (arguments.prefill_attention_backend, arguments.decode_attention_backend)
        ),
        reason="what prefill notes, decode needs",
    ),
    Option(
        "tensor parallelism",
        "--tensor-parallel-size 2",
        lambda arguments: arguments.tp_size > 1,
        _CUDA,
        "the attention in torch does not add what ranks have read",
    ),
)


def device() -> Device:
    """Return where this process would compute attention; tests run the kernels of CUDA in an interpreter."""
    return Device.CUDA if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else Device.CPU


def refused(arguments: ServerArgs, on: Device) -> Iterator[str]:
    """Return a sentence for each option that ``arguments`` ask for and the backend does not serve on ``on``."""
    return (option.refusal(on) for option in OPTIONS if on not in option.served_on and option.asked(arguments))


def require_served(arguments: ServerArgs) -> None:
    """Raise SystemExit with one sentence for the first option that is not served. Other backends serve what they do."""
    named = {
        arguments.attention_backend,
        arguments.prefill_attention_backend,
        arguments.decode_attention_backend,
    } - {None}
    # The platform for CPUs has no other default.
    if NAME in named or not (named or torch.cuda.is_available()):
        for sentence in refused(arguments, device()):
            raise SystemExit(sentence)
    elif verifies_drafts(arguments):
        flag = f"--speculative-algorithm {ALGORITHM}"
        raise SystemExit(f"Winnow: the server does not start, because {flag} needs --attention-backend {NAME}.")


def _check_command_line(arguments: ServerArgs) -> None:
    # Before SGLang, which says of some options something else, or nothing.
    require_served(arguments)


def _check_before_launch(_engine: object, server_args: ServerArgs, *_: object, **__: object) -> None:
    # SGLang has decided what follows from the model and the environment.
    require_served(resolved(server_args))


HOOKS: Final = (
    Hook(target("resolve the command line"), _check_command_line, HookType.BEFORE),
    Hook(LAUNCH, _check_before_launch, HookType.BEFORE),
)
