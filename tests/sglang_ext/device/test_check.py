"""A pass that checks drafts on the device computes and counts what the torch path does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_winnow.device.check import CheckBackend
from sglang_winnow.device.decode import DeviceDecode
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.verification_plan import Accepted, VerificationPlan
from tests.kernels.caches import random_cache
from tests.sglang_ext.device.test_decode import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    SHAPE,
    Server,
    by_torch,
    device_decode,
    in_8_bits,
    on_device,
    policies_act_at_every_length,
)
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.verified_pages.reference import CheckedPages

ALL_FULL = ModelLayers(tuple(range(LAYERS)), {})


def batch_of(server: Server, new_tokens: int, padding: int) -> Any:
    """What SGLang hands to a backend: ``new_tokens`` behind each context, and rows of padding."""
    lengths = torch.tensor(server.lengths, device=server.device) + new_tokens
    written = [
        server.table[slot, length - new_tokens : length]
        for slot, length in zip(server.request_slots.tolist(), lengths.tolist(), strict=True)
    ]
    unused = torch.zeros(padding * new_tokens, dtype=torch.int32, device=server.device)
    return SimpleNamespace(
        req_pool_indices=torch.nn.functional.pad(server.request_slots, (0, padding)),
        input_ids=torch.zeros((len(server.lengths) + padding) * new_tokens, dtype=torch.int64, device=server.device),
        seq_lens=torch.nn.functional.pad(lengths, (0, padding), value=1),
        out_cache_loc=torch.cat([*written, unused]).long(),
    )


def check_backend(server: Server, decode: DeviceDecode, layers: ModelLayers = ALL_FULL) -> CheckBackend:
    slots, dtype = server.caches[0].slots, server.caches[0].keys.dtype
    windowed = [random_cache(slots, KV_HEADS, HEAD_DIM, seed=number, dtype=dtype) for number in sorted(layers.windows)]
    return CheckBackend(
        layers,
        server.caches,
        {
            number: LayerCache(
                cache.keys.to(server.device), cache.values.to(server.device), softmax=server.softmax_of(number)
            )
            for number, cache in zip(sorted(layers.windows), windowed, strict=True)
        },
        SHAPE.scale,
        KV_HEADS * GROUP,
        None,
        server.table,
        decode,
        server.indexes.generations,
        server.statistics,
    )


def all_drafted(tokens: list[int], width: int, device: torch.device) -> Accepted:
    """What a check has come to whose rows have all drafted as many."""
    accepted = torch.tensor(tokens, device=device)
    return Accepted(accepted, torch.full_like(accepted, width - 1), torch.zeros_like(accepted))


@pytest.mark.parametrize(
    ("new_tokens", "padding", "scales"), [(2, 0, None), (5, 2, None), (17, 1, None), (3, 1, (2.0, 0.5))]
)
def test_outputs_and_counts_are_those_of_the_torch_path(
    new_tokens: int, padding: int, scales: tuple[float, float] | None, device: torch.device
) -> None:
    """``scales`` are those of a cache in 8 bits."""
    names = ["quest, verified", "streaming_llm, verified", "quest, verified"]
    stored = Tensor.clone if scales is None else in_8_bits
    of_keys, of_values = scales or (1.0, 1.0)
    torch_server, server = (Server(names, [143, 30, 16], device, stored=stored) for _ in range(2))
    check = check_backend(server, device_decode(server))
    batch = batch_of(server, new_tokens, padding)
    before = server.indexes.generations.counts.clone()
    check.init_forward_metadata(batch)
    lengths = torch.tensor(server.lengths, device=device) + new_tokens
    slots = torch_server.table[torch_server.request_slots, : int(lengths.max())].long()
    context = Context.of(slots, lengths, torch_server.caches[0].slots)
    slots_of_rows, states = torch_server.request_slots, torch_server.states
    plan = VerificationPlan(context, new_tokens, slots_of_rows, states, torch_server.statistics)
    real = len(names) * new_tokens
    for number, cache in enumerate(torch_server.caches):
        generator = torch.Generator().manual_seed(number)
        queries = torch.randn(len(batch.input_ids), KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(device)
        layer: Any = SimpleNamespace(
            layer_id=number,
            tp_q_head_num=KV_HEADS * GROUP,
            qk_head_dim=HEAD_DIM,
            k_scale_float=of_keys,
            v_scale_float=of_values,
        )
        output = check.forward_extend(queries.flatten(1), queries, queries, layer, batch, save_kv_cache=False)
        expected = of_values * plan.attend(number, of_keys * queries[:real], cache, SHAPE.scale, None)
        torch.testing.assert_close(output[:real], expected.flatten(1), rtol=1e-4, atol=1e-4)
    plan.finish()
    accepted = all_drafted([1, 2, 2], new_tokens, device)
    plan.accept(accepted)
    check.accept(accepted)
    wanted, got = (own.statistics.rows[1:4].cpu() for own in (torch_server, server))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert got[:, Field.VERIFICATIONS].tolist() == [1, 1, 1]
    assert got[:, Field.ACCEPTED].tolist() == [0, 1, 1]
    # Pages that are written over count as begun anew, and no others.
    begun = (server.indexes.generations.counts != before).nonzero().flatten()
    pages = (batch.out_cache_loc // server.indexes.page_size).unique()
    assert begun.tolist() == pages.tolist()


def test_rows_that_drafted_nothing_decode_a_token(device: torch.device) -> None:
    """One of them is dense, the other rests; tokens that fill them up are not theirs."""
    width = 5
    names = ["quest, verified", "dense", "quest, verified"]
    torch_server, server = (Server(names, [143, 30, 16], device) for _ in range(2))
    check = check_backend(server, device_decode(server))
    batch = batch_of(server, width, padding=1)
    batch.spec_info = SimpleNamespace(own_tokens=torch.tensor([width, 1, 1], dtype=torch.int32, device=device))
    requests: Any = [SimpleNamespace(winnow_state=state) for state in server.states]
    check.note(requests, batch, 0)
    check.init_forward_metadata(batch)
    plans = []
    for rows, new_tokens in ([0], width), ([1, 2], 1):
        slots = torch_server.request_slots[rows]
        lengths = torch.tensor([torch_server.lengths[row] + new_tokens for row in rows], device=device)
        context = Context.of(
            torch_server.table[slots, : int(lengths.max())].long(), lengths, torch_server.caches[0].slots
        )
        states = [torch_server.states[row] for row in rows]
        plans.append(VerificationPlan(context, new_tokens, slots, states, torch_server.statistics))
    for number, cache in enumerate(torch_server.caches):
        generator = torch.Generator().manual_seed(number)
        queries = torch.randn(len(batch.input_ids), KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(device)
        layer: Any = SimpleNamespace(
            layer_id=number, tp_q_head_num=KV_HEADS * GROUP, qk_head_dim=HEAD_DIM, k_scale_float=1.0, v_scale_float=1.0
        )
        output = check.forward_extend(queries.flatten(1), queries, queries, layer, batch, save_kv_cache=False)
        first_of_others = [width, 2 * width]
        for plan, own in zip(plans, (list(range(width)), first_of_others), strict=True):
            expected = plan.attend(number, queries[own], cache, SHAPE.scale, None)
            torch.testing.assert_close(output[own], expected.flatten(1), rtol=1e-4, atol=1e-4)
        others = [row * width + token for row in (1, 2) for token in range(1, width)]
        assert output[others].eq(0).all()
    accepted = Accepted(*torch.tensor([[3, 1, 1], [4, 0, 0], [0, 0, 1]], device=device))
    for plan, rows in zip(plans, ([0], [1, 2]), strict=True):
        plan.finish()
        plan.accept(Accepted(*(values[rows] for values in accepted)))
    check.accept(accepted)
    wanted, got = (own.statistics.rows[1:4].cpu() for own in (torch_server, server))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    counted = {
        Field.VERIFICATIONS: [1, 0, 0],
        Field.DENSE_STEPS: [0, 0, 1],
        Field.STEPS: [3, 1, 1],
        Field.CONTEXT: [146, 31, 17],
    }
    for field, values in counted.items():
        assert got[:, field].tolist() == values
    heads = LAYERS * KV_HEADS
    assert got[:, Field.DECODE_ATTENDED].tolist() == [148 * heads, 31 * heads, 17 * heads]


@pytest.mark.usefixtures(policies_act_at_every_length.__name__)
def test_drafts_read_the_pages_that_held_most_in_the_check_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds of two drafts and a check; the rows of other policies are left alone."""
    names = ["verified_pages", "quest, verified", "verified_pages"]
    torch_server, server = (Server(names, [143, 90, 181], device) for _ in range(2))
    decode = device_decode(server)
    check = check_backend(server, decode)
    # One row at a time, as where there is little scratch.
    for observer in decode.observers:
        monkeypatch.setattr(observer, "rows_observed", lambda _new_tokens, _step: 1)
    new_tokens = 3
    for number in range(3):
        for draft in range(2):
            step = 10 * number + draft
            expected = by_torch(torch_server, step)
            for layer, output in enumerate(on_device(server, decode, step, padding=1)):
                torch.testing.assert_close(output, expected[layer], rtol=1e-4, atol=1e-4)
            torch_server.grow()
            server.grow()
        # The check begins with the token before the first draft.
        for each in (torch_server, server):
            each.lengths = [length - new_tokens for length in each.lengths]
        batch = batch_of(server, new_tokens, padding=1)
        check.init_forward_metadata(batch)
        lengths = torch.tensor(server.lengths, device=device) + new_tokens
        context = Context.of(
            torch_server.table[torch_server.request_slots, : int(lengths.max())].long(),
            lengths,
            torch_server.caches[0].slots,
        )
        plan = VerificationPlan(
            context, new_tokens, torch_server.request_slots, torch_server.states, torch_server.statistics
        )
        for of_layer, cache in enumerate(torch_server.caches):
            generator = torch.Generator().manual_seed(1000 * number + of_layer)
            queries = torch.randn(len(batch.input_ids), KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(device)
            served = SimpleNamespace(layer_id=of_layer, tp_q_head_num=KV_HEADS * GROUP, qk_head_dim=HEAD_DIM)
            check.forward_extend(queries.flatten(1), queries, queries, served, batch, save_kv_cache=False)
            plan.attend(of_layer, queries[: len(names) * new_tokens], cache, SHAPE.scale, None)
        for each in (torch_server, server):
            each.lengths = [length + 2 for length in each.lengths]
    kept = [state.checked for state in torch_server.states]
    assert [isinstance(state, CheckedPages) for state in kept] == [True, False, True]
