"""Parameters as small as tests want them: what a request may ask for is bounded from below."""

from __future__ import annotations

from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quoka.parameters import QuokaDecode, QuokaPrefill
from winnow_kernels.policies.snapkv.parameters import SnapKV
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.policies.tactic.parameters import Tactic


def streaming_llm_parameters(sinks: int, window: int) -> StreamingLLM:
    return StreamingLLM.model_construct(sinks=sinks, window=window)


def quest_parameters(budget: int, full_layers: int, sinks: int = 0) -> Quest:
    return Quest.model_construct(budget=budget, full_layers=full_layers, sinks=sinks)


def snapkv_parameters(budget: int, kernel_size: int, window: int, sinks: int = 0) -> SnapKV:
    return SnapKV.model_construct(budget=budget, kernel_size=kernel_size, observation_window=window, sinks=sinks)


def pyramidkv_parameters(budget: int, kernel_size: int, window: int, sinks: int = 0) -> PyramidKV:
    return PyramidKV.model_construct(budget=budget, kernel_size=kernel_size, observation_window=window, sinks=sinks)


def delta_parameters(
    budget: int, recency: int, full_layers: int, delta_layers: tuple[int, ...], sinks: int = 0
) -> Delta:
    return Delta.model_construct(
        budget=budget, recency=recency, full_layers=full_layers, delta_layers=delta_layers, sinks=sinks
    )


def tactic_parameters(p: float, max_tokens: int | None = None, full_layers: int = 0, sinks: int = 0) -> Tactic:
    return Tactic.model_construct(p=p, max_tokens=max_tokens, full_layers=full_layers, sinks=sinks)


def lowbit_top_p_parameters(p: float, min_tokens: int = 0, max_tokens: int | None = None, sinks: int = 0) -> LowBitTopP:
    return LowBitTopP.model_construct(p=p, min_tokens=min_tokens, max_tokens=max_tokens, sinks=sinks)


def lowbit_top_k_parameters(budget: int | None = None, budget_ratio: float | None = None, sinks: int = 0) -> LowBitTopK:
    return LowBitTopK.model_construct(budget=budget, budget_ratio=budget_ratio, sinks=sinks)


def quoka_decode_parameters(
    budget: int | None = None, budget_ratio: float | None = None, sinks: int = 0
) -> QuokaDecode:
    return QuokaDecode.model_construct(budget=budget, budget_ratio=budget_ratio, sinks=sinks)


def quoka_prefill_parameters(
    budget: int | None = None,
    budget_ratio: float | None = None,
    block: int = 128,
    queries: int = 64,
    dense_prefix: int = 0,
    sinks: int = 0,
    recency_ratio: float = 0.0,
) -> QuokaPrefill:
    return QuokaPrefill.model_construct(
        budget=budget,
        budget_ratio=budget_ratio,
        block=block,
        queries=queries,
        dense_prefix=dense_prefix,
        sinks=sinks,
        recency_ratio=recency_ratio,
    )


def termination_at(scale: float, direction: float, patience: int) -> EarlyTermination:
    return EarlyTermination.model_construct(scale=scale, direction=direction, patience=patience)
