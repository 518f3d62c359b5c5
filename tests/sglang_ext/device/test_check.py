"""A pass that checks drafts on the device computes and counts what the torch path does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_winnow.device.check import CheckBackend
from sglang_winnow.verification_plan import VerificationPlan
from tests.sglang_ext.device.test_decode import GROUP, HEAD_DIM, KV_HEADS, SCALE, Server, device_decode
from winnow_kernels.cache import Context
from winnow_kernels.decode.statistics import Field


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


@pytest.mark.parametrize(("new_tokens", "padding"), [(2, 0), (5, 2), (17, 1)])
def test_outputs_and_counts_are_those_of_the_torch_path(new_tokens: int, padding: int, device: torch.device) -> None:
    names = ["quest, verified", "streaming_llm, verified", "quest, verified"]
    torch_server, server = (Server(names, [143, 30, 16], device) for _ in range(2))
    decode = device_decode(server)
    check = CheckBackend(
        server.caches,
        SCALE,
        KV_HEADS * GROUP,
        None,
        server.table,
        decode.buffers,
        server.indexes.generations,
        server.statistics,
    )
    batch = batch_of(server, new_tokens, padding)
    before = server.indexes.generations.counts.clone()
    check.init_forward_metadata(batch)
    lengths = torch.tensor(server.lengths, device=device) + new_tokens
    slots = torch_server.table[torch_server.request_slots, : int(lengths.max())].long()
    context = Context.of(slots, lengths, torch_server.caches[0].slots)
    plan = VerificationPlan(context, new_tokens, torch_server.request_slots, torch_server.statistics)
    real = len(names) * new_tokens
    for number, cache in enumerate(torch_server.caches):
        generator = torch.Generator().manual_seed(number)
        queries = torch.randn(len(batch.input_ids), KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(device)
        layer = SimpleNamespace(layer_id=number, tp_q_head_num=KV_HEADS * GROUP, qk_head_dim=HEAD_DIM)
        output = check.forward_extend(queries.flatten(1), queries, queries, layer, batch, save_kv_cache=False)
        expected = plan.attend(number, queries[:real], cache, SCALE, None)
        torch.testing.assert_close(output[:real], expected.flatten(1), rtol=1e-4, atol=1e-4)
    plan.finish()
    accepted = torch.tensor([1, 2, 2], device=device)
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
