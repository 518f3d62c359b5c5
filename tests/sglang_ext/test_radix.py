"""The rules for the radix cache, on SGLang's own cache, pools and prefill planner."""

from __future__ import annotations

import pkgutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins.hook_registry import _wrap_fn
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_winnow import radix
from sglang_winnow.allocator import TorchPagedAllocator
from sglang_winnow.metrics import METRICS
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

PAGE = 16
CONTEXT = 1024
DENSE = AttentionPolicy()
QUOKA = parse_policy('{"prefill": {"policy": "quoka", "block": 64}}')
QUOKA_WIDE = parse_policy('{"prefill": {"policy": "quoka", "block": 96}}')
QUOKA_OF_THE_PAPER = parse_policy('{"prefill": {"policy": "quoka", "block": 64, "sinks": 0, "recency_ratio": 0}}')
QUOKA_WITHOUT_SINKS = parse_policy('{"prefill": {"policy": "quoka", "block": 64, "sinks": 0}}')
QUEST = parse_policy('{"decode": {"policy": "quest"}}')
SNAPKV = parse_policy('{"decode": {"policy": "snapkv", "observation_window": 32}}')
TERMINATED = parse_policy('{"early_termination": {}}')
POLICIES = [DENSE, QUOKA, QUOKA_WIDE, QUEST, SNAPKV, TERMINATED]


@dataclass
class Engine:
    """What a scheduler does with a request's KV, with a note in each slot of how it was computed."""

    tokens: int = 4096
    disable: bool = False
    chunks: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = ReqToTokenPool(16, CONTEXT, "cpu", enable_memory_saver=False)
        self.allocator = TorchPagedAllocator(
            self.tokens, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        parameters = CacheInitParams(
            disable=self.disable,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
        )
        self.cache = ChunkCache(parameters) if self.disable else RadixCache(parameters)
        self.notes: dict[int, object] = {}
        self.computed: dict[Any, list[tuple[int, int]]] = {}

    def request(self, prompt: list[int], policy: AttentionPolicy = DENSE, extra_key: str | None = None) -> Any:
        parameters = SamplingParams(max_new_tokens=64, ignore_eos=self.disable)
        parameters.normalize(None)
        req = Req("r", "", array("q", prompt), parameters)
        req.extra_key = radix.namespace_of(policy, extra_key, PAGE)
        req.winnow_state = SimpleNamespace(policy=policy, prompt_length=len(prompt))
        return req

    def prefill(self, req: Any, chunk: int | Iterator[int] = 256) -> int:
        """Prefill a request; return how many tokens of it were in the cache."""
        sizes = iter(lambda: chunk, None) if isinstance(chunk, int) else chunk
        req.init_next_round_input(self.cache)
        cached = len(req.prefix_indices)
        self.computed[req] = []
        while True:
            adder = self.adder(next(sizes))
            result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            if req in adder.can_run_list:
                break
            assert result == AddReqResult.OTHER
        chunked = adder.new_chunked_req
        self.compute(req)
        while chunked is not None:
            self.cache.cache_unfinished_req(req, chunked=True)
            assert len(req.prefix_indices) == req.extend_range.end
            req.init_next_round_input()
            chunked = self.adder(next(sizes)).add_chunked_req(req)
            self.compute(req)
        req.output_ids.append(1)
        self.cache.cache_unfinished_req(req)
        return cached

    def adder(self, chunk: int) -> Any:
        return PrefillAdder(PAGE, self.cache, self.allocator, None, 1.0, 16384, chunk)

    def compute(self, req: Any) -> None:
        start, end = req.extend_range
        new = end - start
        if self.allocator.available_size() < new + PAGE:
            self.cache.evict(EvictParams(num_tokens=new + PAGE))
        if req.req_pool_idx is None:
            self.pool.alloc([req])
        prefix = req.prefix_indices
        self.pool.req_to_token[req.req_pool_idx, :start] = prefix.int()
        last = prefix[-1:] if start else torch.tensor([-1])
        starts, ends = torch.tensor([start]), torch.tensor([end])
        slots = self.allocator.alloc_extend(starts, starts, ends, ends, last, new)
        assert slots is not None
        self.pool.req_to_token[req.req_pool_idx, start:end] = slots.int()
        self.computed[req].append((start, end))
        ids = list(req.full_untruncated_fill_ids)
        for position, slot in zip(range(start, end), slots.tolist(), strict=True):
            self.notes[slot] = prefilled(req.winnow_state.policy, ids, position, start, end)
        req.kv_committed_len = end

    def decode(self, req: Any, count: int) -> None:
        for _ in range(count):
            length = req.kv_committed_len + 1
            if self.allocator.available_size() < PAGE:
                self.cache.evict(EvictParams(num_tokens=PAGE))
            last = self.pool.req_to_token[req.req_pool_idx, length - 2][None].long()
            slots = self.allocator.alloc_decode(torch.tensor([length]), torch.tensor([length]), last)
            assert slots is not None
            self.pool.req_to_token[req.req_pool_idx, length - 1] = slots.int()
            ids = [*req.origin_input_ids, *req.output_ids]
            dense = req.winnow_state.policy.is_dense
            self.notes[int(slots)] = dense_note(ids, length - 1) if dense else ("generated", id(req), length)
            req.kv_committed_len = length
            req.output_ids.append(length % 5)

    def end(self, req: Any, is_insert: bool = True) -> None:
        self.cache.cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=req.kv_committed_len)
        self.pool.free(req)

    def retract(self, req: Any) -> None:
        self.end(req, is_insert=False)
        req.reset_for_retract()

    def notes_of(self, req: Any, count: int) -> list[object]:
        return [self.notes[slot] for slot in self.pool.req_to_token[req.req_pool_idx, :count].tolist()]

    def assert_nothing_lost(self, running: list[Any]) -> None:
        own = sum(-(-req.kv_committed_len // PAGE) * PAGE - req.cache_protected_len for req in running)
        cached = 0 if self.disable else self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + cached + own == self.tokens


def dense_note(ids: list[int], position: int) -> object:
    return ("dense", tuple(ids[: position + 1]))


def prefilled(policy: AttentionPolicy, ids: list[int], position: int, start: int, end: int) -> object:
    """Return what determines the KV of a token that a chunk from ``start`` to ``end`` computed."""
    block = getattr(policy.prefill, "block", None)
    if block is None:
        return dense_note(ids, position)
    first = position // block * block
    last = min(first + block, end)
    # Queries of a block that are in the chunk choose for it together.
    return (policy.prefill_namespace(), tuple(ids[:last]), max(first, start))


def alone(policy: AttentionPolicy, prompt: list[int]) -> list[object]:
    """Return the notes of a prompt on a cold server that prefills it in one piece."""
    return [prefilled(policy, prompt, position, 0, len(prompt)) for position in range(len(prompt))]


@pytest.fixture(autouse=True, scope="module")
def _hooks() -> Iterator[None]:
    arguments = ServerArgs.__new__(ServerArgs)
    arguments.__dict__.update(page_size=PAGE, speculative_algorithm=None, strip_thinking_cache=False)
    set_global_server_args_for_scheduler(arguments)
    with pytest.MonkeyPatch.context() as patch:
        for hook in radix.HOOKS:
            owner, _, name = hook.target.rpartition(".")
            target = pkgutil.resolve_name(owner)
            patch.setattr(target, name, _wrap_fn(getattr(target, name), hook.function, hook.kind))
        yield


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def next_turn_cached(engine: Engine, policy: AttentionPolicy, turn: list[int]) -> int:
    request = engine.request([*turn, 7, 7, 7], policy)
    cached = engine.prefill(request)
    engine.end(request)
    return cached


@pytest.mark.parametrize("policy", [QUEST, SNAPKV, TERMINATED, QUOKA, QUOKA_WIDE])
def test_tokens_generated_after_sparse_attention_are_not_kept(policy: AttentionPolicy) -> None:
    engine = Engine()
    first = engine.request(prompt(200), policy)
    engine.prefill(first)
    engine.decode(first, 100)
    before = METRICS.totals()["uncached_generated_tokens_total"]
    engine.end(first)
    block = getattr(policy.prefill, "block", PAGE)
    assert METRICS.totals()["uncached_generated_tokens_total"] - before == 100
    engine.assert_nothing_lost([])
    assert engine.cache.evictable_size() == 200 // block * block
    assert next_turn_cached(engine, policy, [*first.origin_input_ids, *first.output_ids]) == 200 // block * block


def test_tokens_generated_densely_are_kept() -> None:
    engine = Engine()
    first = engine.request(prompt(200))
    engine.prefill(first)
    engine.decode(first, 100)
    before = METRICS.totals()["uncached_generated_tokens_total"]
    engine.end(first)
    assert METRICS.totals()["uncached_generated_tokens_total"] == before
    assert next_turn_cached(engine, DENSE, [*first.origin_input_ids, *first.output_ids]) == 300 // PAGE * PAGE


@pytest.mark.parametrize("policy", [QUEST, TERMINATED])
def test_a_densely_prefilled_prompt_is_shared_by_all(policy: AttentionPolicy) -> None:
    engine = Engine()
    first = engine.request(prompt(200), policy)
    engine.prefill(first)
    engine.end(first)
    assert next_turn_cached(engine, DENSE, prompt(200)) == 192


def test_sparse_prefill_shares_with_its_own_policy_and_key_only() -> None:
    engine = Engine()
    of_keys = [(QUOKA, None), (QUOKA, "a"), (QUOKA, "b"), (QUOKA_WIDE, "a"), (DENSE, None), (DENSE, "a")]
    for policy, key in [*of_keys, (QUOKA_WITHOUT_SINKS, None), (QUOKA_OF_THE_PAPER, None)]:
        first, second = (engine.request(prompt(300), policy, key) for _ in range(2))
        assert engine.prefill(first) == 0
        engine.end(first)
        block = getattr(policy.prefill, "block", PAGE)
        assert engine.prefill(second) == 299 // block * block
        engine.end(second)
    engine.assert_nothing_lost([])


def test_a_match_that_ends_inside_a_block_is_cut() -> None:
    engine = Engine()
    first = engine.request(prompt(256), QUOKA)
    engine.prefill(first)
    fork = [*prompt(256)[:176], *prompt(80, seed=1)]
    second = engine.request(fork, QUOKA)
    assert engine.prefill(second) == 128
    assert engine.notes_of(second, 256) == alone(QUOKA, fork)
    engine.end(first)
    engine.end(second)
    engine.assert_nothing_lost([])


@pytest.mark.parametrize("policy", [QUOKA, QUOKA_WIDE])
@pytest.mark.parametrize("disable", [False, True])
def test_chunks_end_between_blocks(policy: AttentionPolicy, disable: bool) -> None:
    engine = Engine(disable=disable)
    block = policy.prefill.block  # type: ignore[union-attr]
    request = engine.request(prompt(700), policy)
    # What is left of a chunk's budget when others have taken their part.
    engine.prefill(request, chunk=iter([40, 200, 250, 33, *[208] * 9]))
    ends = [end for _, end in engine.computed[request]]
    assert ends[-1] == 700
    assert len(ends) > 3
    assert all(end % block == 0 for end in ends[:-1])
    assert engine.notes_of(request, 700) == alone(policy, prompt(700))
    engine.end(request)
    engine.assert_nothing_lost([])


@pytest.mark.parametrize("disable", [False, True])
def test_dense_chunks_are_sglangs(disable: bool) -> None:
    engine = Engine(disable=disable)
    request = engine.request(prompt(700), QUEST)
    engine.prefill(request, chunk=208)
    assert engine.computed[request] == [(0, 208), (208, 416), (416, 624), (624, 700)]


@pytest.mark.parametrize(("length", "computed"), [(200, 40), (192, 32), (100, 36), (32, 32), (20, 20)])
def test_the_observation_window_is_computed_again(length: int, computed: int) -> None:
    engine = Engine()
    for policy in (DENSE, SNAPKV):
        request = engine.request(prompt(length), policy)
        cached = engine.prefill(request)
        engine.end(request)
    assert length - cached == computed


def test_a_retracted_request_shares_its_prompt_only() -> None:
    for policy in (QUEST, QUOKA, SNAPKV):
        engine = Engine()
        request = engine.request(prompt(200), policy)
        engine.prefill(request)
        engine.decode(request, 50)
        engine.retract(request)
        engine.assert_nothing_lost([])
        # Its generated tokens are prefilled with the prompt, in chunks that end after it.
        engine.prefill(request, chunk=iter([128, 128, 128]))
        engine.decode(request, 20)
        engine.end(request)
        engine.assert_nothing_lost([])
        block = getattr(policy.prefill, "block", PAGE)
        assert engine.cache.evictable_size() == 200 // block * block


def test_an_aborted_request_leaves_nothing_else() -> None:
    engine = Engine()
    request = engine.request(prompt(300), QUOKA)
    request.init_next_round_input(engine.cache)
    engine.computed[request] = []
    engine.adder(128).add_one_req(request, has_chunked_req=False, truncation_align_size=None)
    engine.compute(request)
    engine.cache.cache_unfinished_req(request, chunked=True)
    engine.end(request, is_insert=False)
    engine.assert_nothing_lost([])
    assert engine.cache.evictable_size() == 128


# Few tokens, so that prompts share beginnings of many lengths.
pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=4)
steps = st.tuples(
    st.sampled_from(["submit", "submit", "end", "retract", "abort"]),
    pieces,
    st.sampled_from(POLICIES),
    st.lists(st.sampled_from([17, 64, 100, 208]), min_size=1, max_size=3),
    st.integers(0, 40),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=4, max_size=14))
def test_kv_depends_neither_on_load_nor_on_who_came_before(actions: list[Any]) -> None:
    engine = Engine(tokens=2048)
    running: list[Any] = []
    for action, parts, policy, chunks, generated in actions:
        ids = [token for token, count in parts for _ in range(count)]
        if action == "submit" and len(running) < 3:
            request = engine.request(ids, policy)
            # The last is what an idle server has.
            engine.prefill(request, chunk=iter([*chunks, *[208] * 9]))
            assert engine.notes_of(request, len(ids)) == alone(policy, ids)
            engine.decode(request, generated)
            running.append(request)
        elif running:
            request = running.pop(0)
            if action == "retract":
                engine.retract(request)
                engine.prefill(request, chunk=iter([*chunks, *[208] * 9]))
                ids = list(request.origin_input_ids)
                # Its generated tokens are in the last block of its prompt now.
                whole = len(ids) // block_of(request) * block_of(request)
                assert engine.notes_of(request, whole) == alone(request.winnow_state.policy, ids)[:whole]
                running.append(request)
            else:
                engine.end(request, is_insert=action != "abort")
        engine.assert_nothing_lost(running)


def block_of(request: Any) -> int:
    return getattr(request.winnow_state.policy.prefill, "block", 1)
