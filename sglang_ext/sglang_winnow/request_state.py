"""Which request has which slot, and what its policy keeps from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch import Tensor

from sglang_winnow.draft_length import DraftLength
from sglang_winnow.open_drafts import OpenDrafts
from sglang_winnow.quality_choice import Choice
from sglang_winnow.sglang_versions.prefix_cache import shared_length
from sglang_winnow.sglang_versions.requests import slot_of
from winnow_kernels.contract.fields import Parameters
from winnow_kernels.decode.explanation import Explanation
from winnow_kernels.decode.request import CheckObserver, PromptSelection
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.policies.attention_policy import AttentionPolicy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class Released:
    """What a request has given back of its prompt, in its present slot.

    Attributes:
        tokens: how many; 0 if what it keeps and what it shares leave no whole page.
        slots: theirs, int64, until SGLang's allocator has them.
    """

    tokens: int
    slots: Tensor | None = None


@dataclass(eq=False)
class RequestState:
    """One request's policy and what it keeps between steps. Lives as long as SGLang's request.

    Attributes:
        policy: what the request asked for, checked against the model.
        prompt_length: tokens.
        slot: the request slot that it has, or had last.
        saved: its row of the statistics from before a retraction, float64 [fields].
        prefilled: prompt tokens whose prefill has been counted; after a retraction they are computed once more.
        last_prefill: where the last prefill ended; after a retraction, behind the prompt.
        kept: what its policy keeps of the prompt, from the first prefill on; None for all.
        checked: what its policy keeps of the checks of its drafts, on a CPU; None for nothing.
        kept_answer: generated tokens whose KV was kept for later turns when the request ended.
        stage: on CUDA, which stage of its selector's preparation it has reached; -1 for none in its present slot, or
            since the last prefill.
        draft_length: how many tokens it drafts; of those that are verified.
        rests: whether its steps are dense, whatever its policy: it is verified, and drafts nothing in this round.
        open_drafts: those whose check comes in a later step; None if there are none.
        stood: of those with penalties, the drafts that stood in its last check; SGLang takes them over a step later.
        anew_from: on CUDA, the position from which on a check has written keys anew since its last sparse step.
        sliding_layers: how many layers have a sliding window: they are dense and not counted. None before it has run.
        linear_layers: how many have linear attention, and are not counted; None likewise.
        shared: how many of its first tokens lie in pages of the prefix cache.
        audit_offset: what is added to the numbers of its decode steps where it is asked which are audited.
        explanation: of some of its decode steps, if it asks for one.
        released: what it has given back of its prompt since its last prefill; None while it has all of it.
        choice: how its policy was chosen; None if the request named it.
        decode: the parameters of its decode policy. On CUDA they name layers by places (``RequestTable``).
    """

    policy: AttentionPolicy
    prompt_length: int
    slot: int = -1
    saved: Tensor | None = None
    prefilled: int = 0
    last_prefill: int = 0
    kept: PromptSelection | None = None
    checked: CheckObserver | None = None
    kept_answer: int = 0
    stage: int = -1
    draft_length: DraftLength | None = None
    rests: bool = False
    open_drafts: OpenDrafts | None = None
    stood: Sequence[int] = ()
    anew_from: int | None = None
    sliding_layers: int | None = None
    linear_layers: int | None = None
    audit_offset: int = 0
    explanation: Explanation | None = None
    shared: int = 0
    released: Released | None = None
    choice: Choice | None = None
    decode: Parameters = field(init=False)

    def __post_init__(self) -> None:
        self.decode = self.policy.decode
        if self.policy.verify is not None:
            self.draft_length = DraftLength(self.policy.verify.draft_tokens)

    @property
    def releases(self) -> bool:
        """Whether it gives back what it will not read again of its prompt."""
        return self.policy.decode.releases_prompt

    def begin_prefill(self, end: int) -> None:
        """Note a prefill of the tokens before ``end``: they may lie in other pages than a selector has looked at."""
        self.last_prefill = end
        self.stage = -1
        self.anew_from = None
        self.released = None
        if self.kept is not None:
            self.kept.moved = None

    def written_anew(self, begin: int) -> None:
        """Note that keys were written anew from position ``begin`` on; drafts' may have been indexed."""
        self.anew_from = begin if self.anew_from is None else min(begin, self.anew_from)


class RequestTable:
    """The states of the requests in a batch, by request slot.

    SGLang's requests own their states: one that has finished or was aborted is gone without a word.
    """

    def __init__(
        self,
        statistics: Statistics,
        sliding_layers: int = 0,
        placed_layers: Sequence[int] | None = None,
        linear_layers: int = 0,
    ) -> None:
        """
        Args:
            statistics: a row for each request slot.
            sliding_layers: how many layers of the model have a sliding window.
            placed_layers: the numbers of the others, where these are known by their places among them; None where all
                layers are known by their numbers.
            linear_layers: how many layers of the model have linear attention.
        """
        self.statistics = statistics
        self._sliding_layers = sliding_layers
        self._linear_layers = linear_layers
        self._placed_layers = placed_layers
        self._by_slot: WeakValueDictionary[int, RequestState] = WeakValueDictionary()

    def __getitem__(self, slot: int) -> RequestState | None:
        """Return the state of the request in ``slot``; None for a slot of SGLang's own (warm-up, padding)."""
        return self._by_slot.get(slot)

    def begin(self, requests: Sequence[Req]) -> None:
        """Note the slots of a batch's requests; call before each forward pass, in the order of the passes."""
        for request in requests:
            slot = slot_of(request)
            state: RequestState = request.winnow_state
            state.shared = shared_length(request)
            if slot is None or self._by_slot.get(slot) is state:
                continue
            if (previous := self._by_slot.get(slot)) is not None:
                previous.saved = self.statistics.rows[slot].clone()
            if self._by_slot.get(state.slot) is state:
                state.saved = self.statistics.rows[state.slot].clone()
                del self._by_slot[state.slot]
            self.statistics.rows[slot] = 0.0 if state.saved is None else state.saved
            state.saved = None
            state.slot = slot
            state.sliding_layers = self._sliding_layers
            state.linear_layers = self._linear_layers
            if self._placed_layers is not None:
                state.decode = state.policy.decode.at_places(self._placed_layers)
            self._by_slot[slot] = state
