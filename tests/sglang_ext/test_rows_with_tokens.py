"""What SGLang is given of a step in which some rows only draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_winnow.rows_with_tokens import process_rows_with_tokens, processes_first, report_whole_batch


def result_of(rows: int, width: int = 1) -> GenerationBatchResult:
    """Return what a step of ``rows`` came to, with room for three tokens of each."""
    flat = [f"{row}/{place}" for row in range(rows) for place in range(width)]
    output = LogitsProcessorOutput(
        next_token_logits=None,
        next_token_logprobs=torch.arange(rows * width).view(rows, width),
        next_token_top_logprobs_val=[torch.tensor([row]) for row in range(rows) for _ in range(width)],
        next_token_top_logprobs_idx=list(flat),
        next_token_token_ids_logprobs_val=[],
        next_token_token_ids_logprobs_idx=list(flat),
        hidden_states=torch.arange(rows).repeat_interleave(3)[:, None].expand(-1, 5),
    )
    output.customized_info = {"name": list(range(rows))}
    return GenerationBatchResult(
        logits_output=output,
        next_token_ids=torch.arange(rows * 3),
        accept_lens=torch.ones(rows, dtype=torch.int32),
    )


def batch_of(rows: int) -> Any:
    return SimpleNamespace(reqs=[f"request {row}" for row in range(rows)])


def test_rows_that_only_drafted_are_left_out() -> None:
    batch, result, seen = batch_of(4), result_of(4), []
    result.winnow_drafting = frozenset({0, 2})
    process_rows_with_tokens(lambda *given: seen.append(given), "processor", batch, result)
    [(processor, part, given)] = seen
    assert processor == "processor"
    assert given is result
    assert part.reqs == ["request 1", "request 3"]
    assert len(batch.reqs) == 4
    assert result.next_token_ids.tolist() == [3, 4, 5, 9, 10, 11]
    assert result.accept_lens.tolist() == [1, 1]
    output = result.logits_output
    assert output.next_token_logprobs.tolist() == [[1], [3]]
    assert [value.tolist() for value in output.next_token_top_logprobs_val] == [[1], [3]]
    assert output.next_token_top_logprobs_idx == output.next_token_token_ids_logprobs_idx == ["1/0", "3/0"]
    assert output.next_token_token_ids_logprobs_val == []
    assert output.hidden_states[:, 0].tolist() == [1, 1, 1, 3, 3, 3]
    assert output.customized_info == {"name": [1, 3]}


def test_other_steps_are_as_they_were() -> None:
    batch, result = batch_of(2), result_of(2, width=2)
    before = result.next_token_ids.tolist()
    assert process_rows_with_tokens(lambda *given: given, None, batch, result) == (None, batch, result)
    assert result.next_token_ids.tolist() == before


def test_rows_that_only_drafted_run() -> None:
    """SGLang 0.5.16 takes it that each request of a batch has got a token, beside correct drafts."""
    whole = batch_of(5)
    part = SimpleNamespace(reqs=whole.reqs[:2], winnow_whole=whole)

    def reported(_reporter: None, _graph: bool, *, running_batch: Any, **counts: int) -> tuple[int, dict[str, int]]:
        return len(running_batch.reqs), counts

    ask: Any = report_whole_batch
    assert ask(reported, None, False, running_batch=part, num_correct_drafts=0) == (5, {"num_correct_drafts": -3})
    assert ask(reported, None, False, running_batch=part, num_generated_tokens=2) == (5, {"num_generated_tokens": 2})
    assert ask(reported, None, False, running_batch=whole, num_correct_drafts=4) == (5, {"num_correct_drafts": 4})


@pytest.mark.parametrize("decided", [False, True])
def test_results_of_a_check_are_processed_before_the_next_step_is_launched(decided: bool) -> None:
    def decide(_scheduler: object, batch: str, *, last_batch: str) -> bool:
        assert (batch, last_batch) == ("batch", "last")
        return decided

    check, step = result_of(2), result_of(2)
    check.winnow_is_awaited = True
    for queue, expected in (([], decided), ([("batch", step)], decided), ([("batch", check)], True)):
        scheduler = SimpleNamespace(result_queue=queue)
        assert processes_first(decide, scheduler, "batch", last_batch="last") == expected
