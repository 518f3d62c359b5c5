"""Which policies there are: a policy's parameters, once here, make it known to service and runtime.

Importing this takes neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, get_args

from pydantic import Field

from winnow_kernels.contract.fields import Parameters
from winnow_kernels.policies.ada_snapkv.parameters import AdaSnapKV
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.dense.parameters import Dense, DensePrefill
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quoka.parameters import QuokaDecode, QuokaPrefill
from winnow_kernels.policies.snapkv.parameters import SnapKV
from winnow_kernels.policies.sparq.parameters import SparQ
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages

DecodePolicy = Annotated[
    Dense
    | StreamingLLM
    | Quest
    | SnapKV
    | PyramidKV
    | AdaSnapKV
    | Delta
    | Tactic
    | QuokaDecode
    | SparQ
    | LowBitTopP
    | LowBitTopK
    | VerifiedPages,
    Field(discriminator="policy"),
]
PrefillPolicy = Annotated[DensePrefill | QuokaPrefill, Field(discriminator="policy")]


def _by_name(union: object) -> dict[str, type[Parameters]]:
    return {model.model_fields["policy"].default: model for model in get_args(get_args(union)[0])}


PARAMETERS: Final[Mapping[str, Mapping[str, type[Parameters]]]] = {
    "decode": _by_name(DecodePolicy),
    "prefill": _by_name(PrefillPolicy),
}
"""The parameters of each phase's policies, by the policies' names."""
DECODE_POLICIES: Final = tuple(PARAMETERS["decode"])
PREFILL_POLICIES: Final = tuple(PARAMETERS["prefill"])
POLICIES_SETTING: Final = "WINNOW_POLICIES"
"""The environment variable by which a server is told the decode policies to serve, with commas between."""
INDEXED_BY_DEFAULT: Final = ("lowbit_top_p", "lowbit_top_k")
"""Decode policies whose indexes a server on a GPU has room for unless it is told what to serve: the presets'."""
