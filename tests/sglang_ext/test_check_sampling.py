"""Penalties, masks and log-probabilities of tokens that are checked together."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from sglang_winnow.check_logprobs import CheckedLogprobs, join_logprobs
from sglang_winnow.grammar_walk import begin_walk
from sglang_winnow.token_logprobs import HOOKS
from sglang_winnow.token_penalties import TokenPenalties, is_penalized

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
PENALIZERS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}


def request(prompt: list[int], answer: list[int], known: int, **parameters: Any) -> Any:
    """Return a request of whose ``answer`` SGLang has taken over the first ``known`` tokens."""
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q", answer[:known]),
        sampling_params=SamplingParams(**parameters),
        tokenizer=SimpleNamespace(eos_token_id=1, additional_stop_token_ids={2}),
        eos_token_ids={1, 3},
        winnow_state=SimpleNamespace(prompt_length=len(prompt), stood=answer[known : len(answer) - 1]),
    )


@st.composite
def requests(draw: st.DrawFn, *, late: bool) -> Any:
    answer = draw(st.lists(TOKENS, min_size=1, max_size=6))
    # What the last round came to is not known yet where rounds overlap.
    known = draw(st.integers(0, len(answer) - 1)) if late else len(answer)
    return request(
        draw(st.lists(TOKENS, min_size=1, max_size=3)),
        answer,
        known,
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        min_new_tokens=draw(st.integers(0, 12)),
        stop_token_ids=draw(st.sampled_from([None, [5]])),
        max_new_tokens=20,
    )


@dataclass(eq=False)
class Batch:
    """What SGLang's penalties look at; they have a weak reference to it."""

    reqs: list[Any]
    device: str = "cpu"


def dense(req: Any, answer: list[int], *, late: bool) -> torch.Tensor:
    """Return the logits of SGLang's own penalties behind ``answer``, drawn a token a step, from 1.0 for each token."""
    batch = Batch([req])
    orchestrator = BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS)
    for token in [req.origin_input_ids[-1], *answer[:-1]] if late else answer:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits = torch.ones(1, VOCAB)
    orchestrator.accumulate_additive_penalties(logits)
    return scaled(logits, orchestrator.accumulate_scaling_penalties())[0]


def scaled(logits: torch.Tensor, scaling: torch.Tensor | None) -> torch.Tensor:
    return logits if scaling is None else torch.where(logits < 0, logits * scaling, logits / scaling)


@given(st.data(), st.booleans(), st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=150)
def test_penalties_are_those_of_tokens_drawn_one_by_one(
    data: st.DataObject, late: bool, rows: int, drafts: int
) -> None:
    reqs = [data.draw(requests(late=late)) for _ in range(rows)]
    answers = [[*req.output_ids, *req.winnow_state.stood] for req in reqs]
    if late:
        answers = [[*answer, data.draw(TOKENS)] for answer in answers]
    drafted = [data.draw(st.lists(TOKENS, min_size=drafts, max_size=drafts)) for _ in reqs]
    lengths = [len(req.origin_input_ids) + len(answer) - 1 for req, answer in zip(reqs, answers, strict=True)]
    batch: Any = SimpleNamespace(
        reqs=reqs,
        enable_overlap=late,
        seq_lens=torch.tensor(lengths),
        sampling_info=SimpleNamespace(vocab_size=VOCAB),
    )
    chosen = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))]
    penalties = TokenPenalties(batch, sorted(chosen), lengths)
    first = data.draw(st.integers(0, drafts))
    inputs = torch.tensor([[answers[row][-1], *drafted[row]] for row in chosen])
    additive, scaling = penalties.at(chosen, first, inputs)
    found = scaled(1 + additive, scaling)
    for place, row in enumerate(chosen):
        for position in range(first, drafts + 1):
            expected = dense(reqs[row], answers[row] + drafted[row][:position], late=late)
            torch.testing.assert_close(found[place, position - first], expected)


def test_who_has_penalties() -> None:
    assert not is_penalized(request([3], [4], 1))
    for name, value in (("frequency", 1.0), ("presence", -1.0), ("repetition", 0.9)):
        assert is_penalized(request([3], [4], 1, **{f"{name}_penalty": value}))
    assert is_penalized(request([3], [4], 1, min_new_tokens=1))


class Letters:
    """What llguidance asks of a tokenizer: a token for each byte, and one for the end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


END = Letters.eos_token_id


@pytest.fixture(params=["llguidance", "xgrammar"])
def grammar(request: pytest.FixtureRequest) -> BaseGrammarObject:
    """A grammar of what is served: ``a``, then ``b`` or ``c``, then ``d``."""
    regex = "a[bc]d"
    if request.param == "llguidance":
        tokenizer = LLTokenizer(TokenizerWrapper(Letters()), n_vocab=257)
        return GuidanceGrammar(tokenizer, LLMatcher.grammar_from_regex(regex))
    information = TokenizerInfo(list(Letters.tokens), stop_token_ids=[END])
    compiled = GrammarCompiler(information).compile_regex(regex)
    return XGrammarGrammar(GrammarMatcher(compiled, max_rollback_tokens=20), 257, compiled, None)


def allowed(mask: torch.Tensor) -> set[int]:
    return {token for token in range(257) if int(mask[token // 32]) >> token % 32 & 1}


A, B, C, D = b"abcd"


@pytest.mark.parametrize("steps", [[4], [1, 2, 3, 4]], ids=["at once", "step by step"])
def test_masks_follow_drafts_and_the_grammar_is_left_as_it_was(grammar: BaseGrammarObject, steps: list[int]) -> None:
    walk = begin_walk(grammar, 257, 4)
    assert walk is not None
    drafts = [A, C, D, END]
    for count in steps:
        masks = walk.masks(drafts[:count])
        assert len(masks) == count + 1
    found = [allowed(mask) for mask in masks]
    assert found[:4] == [{A}, {B, C}, {D}, {END}]
    assert len(found[4]) == 257
    walk.go_back()
    again = begin_walk(grammar, 257, 0)
    assert again is not None
    assert allowed(again.masks([])[0]) == {A}


def test_nothing_is_asked_behind_a_draft_that_the_grammar_forbids(grammar: BaseGrammarObject) -> None:
    grammar.accept_token(A)
    walk = begin_walk(grammar, 257, 3)
    assert walk is not None
    masks = walk.masks([B, A, D])
    assert [len(allowed(mask)) for mask in masks] == [2, 1, 257, 257]
    walk.go_back()
    grammar.accept_token(C)
    assert not grammar.is_terminated()


def test_an_answer_that_has_ended_is_not_walked_on(grammar: BaseGrammarObject) -> None:
    assert begin_walk(None, 257, 2) is None
    for token in (A, B, D, END):
        grammar.accept_token(token)
    assert begin_walk(grammar, 257, 2) is None


def output(rows: int, start: float, *, top: bool = True) -> Any:
    numbers = torch.arange(rows) + start
    return SimpleNamespace(
        next_token_logprobs=numbers,
        next_token_top_logprobs_val=[number[None] for number in numbers] if top else None,
        next_token_top_logprobs_idx=[number[None].long() for number in numbers] if top else None,
        next_token_token_ids_logprobs_val=None,
        next_token_token_ids_logprobs_idx=None,
    )


def test_log_probabilities_are_of_the_tokens_that_an_answer_has() -> None:
    first = output(4, 0.0)
    checks = [
        CheckedLogprobs([3, 1], 3, [2, 3], output(6, 10.0)),
        # Nobody in it asked for the most probable tokens.
        CheckedLogprobs([2], 2, [1], output(2, 20.0, top=False)),
    ]
    join_logprobs(first, checks)
    assert first.next_token_logprobs.shape == (4, 3)
    assert first.next_token_logprobs[0, 0] == 0
    assert first.next_token_logprobs[1].tolist() == [13, 14, 15]
    assert first.next_token_logprobs[2, 0] == 20
    assert first.next_token_logprobs[3, :2].tolist() == [10, 11]
    for name in ("next_token_top_logprobs_val", "next_token_top_logprobs_idx"):
        told = [value.tolist() for value in getattr(first, name)]
        assert told == [[0], [], [], [13], [14], [15], [2], [], [], [10], [11], []]
    assert first.next_token_token_ids_logprobs_val is None


def test_without_a_check_each_row_has_one_log_probability() -> None:
    first = output(2, 5.0)
    join_logprobs(first, [])
    assert first.next_token_logprobs.tolist() == [[5], [6]]
    assert [value.tolist() for value in first.next_token_top_logprobs_val] == [[5], [6]]


def test_all_rows_have_tensors_where_any_asks_for_named_tokens() -> None:
    (hook,) = HOOKS
    values, tokens = hook.function(lambda: ([[], torch.tensor([0.5])], [[], [7]]))
    assert [value.tolist() for value in values] == [[], [0.5]]
    assert tokens == [[], [7]]
    assert hook.function(lambda: ([[], [0.5]], [[], [7]]))[0] == [[], [0.5]]
