"""What a request's attention cost, from the attention backend's counters to ``meta_info["attention"]``.

The counters of a batch are copied after each forward pass, so that the copy of a request's last step holds that step
and none that overlap scheduling ran beyond it. The answer travels as JSON text inside the finish reason, which every
path out of the scheduler carries once, and carries whole; the process that takes requests moves it to its place.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic_core import from_json, to_json
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.backend_name import NAME
from sglang_winnow.hooks import Hook
from sglang_winnow.metrics import (
    ACCEPTED_TOKENS,
    ATTENDED_TOKENS,
    CONTEXT_TOKENS,
    DENSE_BYTES,
    DRAFTED_TOKENS,
    METRICS,
    READ_BYTES,
    REQUESTS,
    UNDER_LOAD_REQUESTS,
    VERIFICATIONS,
)
from sglang_winnow.own_backend import own_backend
from sglang_winnow.sglang_versions.arguments import resolved
from sglang_winnow.text_offsets import text_and_offsets

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_winnow.quality_choice import Choice

KEY: Final = "attention"
EXPLAIN: Final = "explain"

logger = logging.getLogger(__name__)


def note_rows(
    result: GenerationBatchResult, worker: TpModelWorker, batch: ScheduleBatch | None, *_: object, **__: object
) -> None:
    """After a forward pass, note the counters of the batch's requests on its result, as ``winnow_rows``."""
    if batch is not None and resolved(worker.server_args).attention_backend == NAME:
        result.winnow_rows = own_backend(worker.model_runner).statistics.snapshot(batch.req_pool_indices)


def copy_rows(result: GenerationBatchResult, *_: object, **__: object) -> None:
    """Start copying the counters to the host with the rest of a result."""
    from sglang.srt.managers.utils import _async_d2h  # noqa: PLC0415

    if (rows := getattr(result, "winnow_rows", None)) is not None:
        result.winnow_rows = _async_d2h(rows)


def keep_rows(_processor: object, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """Note each request's counters; one that has ended or was retracted ran this step in vain."""
    if (rows := getattr(result, "winnow_rows", None)) is None:
        return
    for index, req in enumerate(batch.reqs):
        if not (req.finished() or req.is_retracted):
            req.winnow_row = (rows, index)


def report_finished(_nothing: None, accumulator: Any, *, req: Req) -> None:
    """Add the cost of a request that has ended to what the scheduler sends out."""
    if req.finished() and hasattr(req, "winnow_state"):
        accumulator.finished_reasons[-1] = _with_cost(accumulator.finished_reasons[-1], req)


def report_aborted(_sender: object, output: object, req: object = None) -> None:
    """Add its cost to the notice that a request was aborted outside of a batch."""
    from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415

    if isinstance(output, AbortReq) and hasattr(req, "winnow_state"):
        reason = output.finished_reason or {
            "type": "abort",
            "message": output.abort_message or "Abort in waiting queue",
        }
        output.finished_reason = _with_cost(reason, req)


def _with_cost(reason: dict[str, Any], req: Any) -> dict[str, Any]:
    from sglang_winnow.answer import answer, trimmed  # noqa: PLC0415
    from sglang_winnow.audit_share import audited_share  # noqa: PLC0415
    from winnow_kernels.decode.statistics import FIELDS  # noqa: PLC0415

    state = req.winnow_state
    policy = state.policy
    if (kept := getattr(req, "winnow_row", None)) is None:
        row = torch.zeros(FIELDS, dtype=torch.float64)
    else:
        rows, index = kept
        row = rows[index].cpu()
    if policy.verify is not None:
        # Prefill comes to the first token, and to one more after each retraction.
        row = trimmed(row, len(req.output_ids_through_stop) - 1 - req.retraction_count)
    told = answer(
        row,
        policy,
        req.cached_tokens,
        state.kept_answer,
        0 if state.released is None else state.released.tokens,
        req.retraction_count,
        state.sliding_layers,
        state.linear_layers,
        audited_share(policy),
        state.choice,
    )
    if reason["type"] == "abort":
        # Its client may be gone.
        logger.info("The attention of request %s until it was aborted: %s", req.rid, to_json(told).decode())
    elif state.explanation is not None:
        from sglang_winnow.explaining import explained  # noqa: PLC0415

        told[EXPLAIN] = explained(state.explanation, req.output_ids_through_stop)
    # Several times as fast as json's, which tells with an explanation: other requests wait meanwhile.
    cost = to_json(told).decode()
    _count(row, req, "aborted" if reason["type"] == "abort" else "finished")
    return reason | {KEY: cost}


def _count(row: torch.Tensor, req: Any, outcome: str) -> None:
    from winnow_kernels.decode.statistics import Field  # noqa: PLC0415

    policy = req.winnow_state.policy
    METRICS.add(REQUESTS, policy=policy.decode.policy, outcome=outcome)
    for phase, name in (("decode", policy.decode.policy), ("prefill", policy.prefill.policy)):
        for counter, column in (
            (CONTEXT_TOKENS, "CONTEXT"),
            (ATTENDED_TOKENS, "ATTENDED"),
            (DENSE_BYTES, "CONTEXT_BYTES"),
            (READ_BYTES, "READ_BYTES"),
        ):
            amount = float(row[Field[f"{phase.upper()}_{column}"]])
            METRICS.add(counter, amount, phase=phase, policy=name, outcome=outcome)
    if policy.verify is not None:
        for counted, field in (
            (VERIFICATIONS, Field.VERIFICATIONS),
            (DRAFTED_TOKENS, Field.DRAFTED),
            (ACCEPTED_TOKENS, Field.ACCEPTED),
        ):
            METRICS.add(counted, float(row[field]), policy=policy.decode.policy)
    if (choice := req.winnow_state.choice) is not None:
        if choice.under_load is not None:
            METRICS.add(UNDER_LOAD_REQUESTS, policy=policy.decode.policy)
        _note_audit(row, choice)


def _note_audit(row: torch.Tensor, choice: Choice) -> None:
    from sglang_winnow.left_policies import LEFT  # noqa: PLC0415
    from winnow_kernels.decode.statistics import Field  # noqa: PLC0415

    heads, promised = float(row[Field.AUDITED_HEADS]), choice.promised_share
    if heads and promised is not None:
        LEFT.note(choice.policy, float(row[Field.AUDITED_SHARE]) / heads, promised)


async def wait_and_place(
    wait_one_response: Callable[..., AsyncIterator[dict[str, Any]]],
    manager: TokenizerManager,
    request: GenerateReqInput,
    *arguments: Any,
    **options: Any,
) -> AsyncIterator[dict[str, Any]]:
    """Move the cost from the finish reason to ``meta_info["attention"]``."""
    async with aclosing(wait_one_response(manager, request, *arguments, **options)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            reason = output["meta_info"].get("finish_reason")
            if reason and (cost := reason.pop(KEY, None)) is not None:
                output["meta_info"][KEY] = _read(cost, manager, request)
            yield output


def _read(cost: str, manager: TokenizerManager, request: GenerateReqInput) -> dict[str, Any]:
    """Return what the scheduler reported, an explanation with the texts that it is of."""
    told: dict[str, Any] = from_json(cost)
    if (explanation := told.get(EXPLAIN)) is not None:
        ids, text = request.winnow_prompt
        explanation["prompt"] = text_and_offsets(manager.tokenizer, ids, text)
        explanation["output"] = text_and_offsets(manager.tokenizer, explanation.pop("output_ids"), None)
    return told


async def generate_and_note(
    generate_request: Callable[..., AsyncIterator[Any]],
    manager: TokenizerManager,
    request: GenerateReqInput,
    *arguments: Any,
    **options: Any,
) -> AsyncIterator[Any]:
    """Note what each choice has cost on a request, as ``winnow_costs``, for those who add it to its stream."""
    costs: dict[int, Any] = {}
    request.winnow_costs = costs
    async with aclosing(generate_request(manager, request, *arguments, **options)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if isinstance(output, dict) and KEY in output.get("meta_info", {}):
                costs[output.get("index", 0)] = output["meta_info"][KEY]
            yield output


_TOKENIZER_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_COMPONENTS: Final = "sglang.srt.managers.scheduler_components"
_PROCESSOR: Final = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
HOOKS: Final[tuple[Hook, ...]] = (
    Hook("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", note_rows, HookType.AFTER),
    Hook("sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", copy_rows, HookType.BEFORE),
    Hook(f"{_PROCESSOR}.process_batch_result_prefill", keep_rows, HookType.BEFORE),
    Hook(f"{_PROCESSOR}.process_batch_result_decode", keep_rows, HookType.BEFORE),
    Hook(f"{_COMPONENTS}.output_streamer._GenerationStreamAccumulator.accept", report_finished, HookType.AFTER),
    Hook(f"{_COMPONENTS}.output_sender.SenderWrapper.send_output", report_aborted, HookType.BEFORE),
    Hook(f"{_TOKENIZER_MANAGER}._wait_one_response", wait_and_place, HookType.AROUND),
    Hook(f"{_TOKENIZER_MANAGER}.generate_request", generate_and_note, HookType.AROUND),
)
