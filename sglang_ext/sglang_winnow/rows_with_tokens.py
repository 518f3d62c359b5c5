"""Steps in which some rows only draft, and the steps that check them: how SGLang processes their results.

SGLang expects a token of every row in every step. It would count a row without one as a check in which a draft too many
fell, look for the end of its answer in all tokens once more, and send its client an event that holds nothing.

Under overlap it processes a step's results when it has launched the next one, which takes it milliseconds. After a
check it can launch nothing before the lengths of contexts are known. So clients get those tokens first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from sglang_winnow.hooks import around

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

_BY_TOKEN: Final = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)


def process_rows_with_tokens(
    process: Callable[..., Any], processor: object, batch: ScheduleBatch, result: GenerationBatchResult
) -> Any:
    """Process the results of a decode step without the rows that only drafted, ``winnow_drafting`` of the result."""
    if not (drafting := getattr(result, "winnow_drafting", ())):
        return process(processor, batch, result)
    if result.copy_done is not None:
        result.copy_done.synchronize()
    rows = [row for row in range(len(batch.reqs)) if row not in drafting]
    keep_results(result, rows, len(batch.reqs))
    part = copy(batch)
    part.reqs = [batch.reqs[row] for row in rows]
    part.winnow_whole = batch
    return process(processor, part, result)


def report_whole_batch(
    report: Callable[..., Any], reporter: object, *arguments: Any, running_batch: ScheduleBatch, **counts: Any
) -> Any:
    """Report how many requests run, with those that only drafted."""
    whole: ScheduleBatch = getattr(running_batch, "winnow_whole", running_batch)
    if "num_correct_drafts" in counts:
        # Some releases take it that every request has got a token beside them.
        counts["num_correct_drafts"] -= len(whole.reqs) - len(running_batch.reqs)
    return report(reporter, *arguments, running_batch=whole, **counts)


def processes_first(decides: Callable[..., bool], scheduler: Any, *arguments: Any, **options: Any) -> bool:
    """Return whether the results of the last step are processed before the next one is launched: those of a check."""
    waiting = scheduler.result_queue
    if waiting and getattr(waiting[-1][1], "winnow_is_awaited", False):
        return True
    return decides(scheduler, *arguments, **options)


def keep_results(result: GenerationBatchResult, rows: Sequence[int], count: int) -> None:
    """Reduce a result, on the host, to those of some ``rows`` of a batch that has ``count``."""
    index = list(rows)
    result.next_token_ids = result.next_token_ids.view(count, -1)[index].flatten()
    result.accept_lens = result.accept_lens[index]
    output: LogitsProcessorOutput = result.logits_output
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs[index]
    for name in _BY_TOKEN:
        if values := getattr(output, name):
            width = len(values) // count
            setattr(output, name, [value for row in rows for value in values[row * width : (row + 1) * width]])
    if output.hidden_states is not None:
        states = output.hidden_states
        output.hidden_states = states.view(count, -1, states.shape[-1])[index].flatten(0, 1)
    if output.customized_info is not None:
        output.customized_info = {name: [of[row] for row in rows] for name, of in output.customized_info.items()}


_COMPONENTS: Final = "sglang.srt.managers.scheduler_components"
_PROCESSOR: Final = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
HOOKS: Final = around(
    {
        f"{_PROCESSOR}.process_batch_result_decode": process_rows_with_tokens,
        "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch": processes_first,
        f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter.report_decode_stats": report_whole_batch,
    }
)
