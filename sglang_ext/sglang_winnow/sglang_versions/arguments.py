"""The arguments that SGLang was started with, and what was decided of those that the command line left open.

Until 0.5.18 decisions are written to the arguments. From 0.5.19 on the arguments are what the command line says, and
decisions are declared beside them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from sglang_winnow.sglang_versions.releases import ARGUMENTS_DECLARED, ATTENTION_DATA_SIZE, runs
from winnow_kernels.contract.verification import ALGORITHM

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

_SOURCE: Final = "winnow"


def resolved(arguments: ServerArgs) -> Any:
    """Return the arguments as they were resolved, or as far as they are by now: to be read, not written."""
    if not runs(ARGUMENTS_DECLARED):
        return arguments
    from sglang.srt.arg_groups.overrides import resolving_view  # noqa: PLC0415

    return resolving_view(arguments)


def decide(arguments: ServerArgs, **decisions: Any) -> None:
    """Decide arguments while SGLang resolves them."""
    if runs(ARGUMENTS_DECLARED):
        from sglang.srt.arg_groups.overrides import declare_resolution  # noqa: PLC0415

        declare_resolution(arguments, _SOURCE, **decisions)
        return
    for name, value in decisions.items():
        setattr(arguments, name, value)


def decide_graph_backends(arguments: ServerArgs, **backends: str) -> None:
    """Decide which kind of CUDA graphs a phase, ``prefill`` or ``decode``, is captured in."""
    graphs = deepcopy(resolved(arguments).cuda_graph_config)
    for phase, backend in backends.items():
        getattr(graphs, phase).backend = backend
    decide(arguments, cuda_graph_config=graphs)


def attention_backends(arguments: ServerArgs) -> tuple[str | None, str | None]:
    """Return the names of the backends that compute attention in prefill and in decode."""
    of = resolved(arguments)
    return (
        of.prefill_attention_backend or of.attention_backend,
        of.decode_attention_backend or of.attention_backend,
    )


def verifies_drafts(arguments: ServerArgs) -> bool:
    """Return whether ``arguments`` ask for Winnow's speculative algorithm, in capitals or not, as SGLang takes it."""
    return (arguments.speculative_algorithm or "").upper() == ALGORITHM


def splits_attention_by_data(arguments: ServerArgs) -> bool:
    """Return whether ``arguments`` ask that ranks of one model attend to requests of their own."""
    return bool(arguments.enable_dp_attention or (runs(ATTENTION_DATA_SIZE) and arguments.attn_dp_size > 1))


def model_config_of(arguments: ServerArgs) -> ModelConfig:
    """Return the configuration of the model that ``arguments`` name, which SGLang reads once."""
    if not runs(ARGUMENTS_DECLARED):
        own: ModelConfig = arguments.get_model_config()
        return own
    from sglang.srt.arg_groups import overrides  # noqa: PLC0415

    declared: ModelConfig = overrides.model_config_of(arguments)
    return declared


def default_attention_backend(arguments: ServerArgs, model: ModelConfig) -> str:
    """Return the name of the backend that SGLang would choose for a model without latent attention (MLA)."""
    if not runs(ARGUMENTS_DECLARED):
        return str(arguments._get_default_attn_backend(False, model))  # noqa: SLF001
    from sglang.srt.arg_groups.overrides import get_default_attn_backend  # noqa: PLC0415

    return str(get_default_attn_backend(arguments, False, model))
