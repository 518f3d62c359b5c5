"""Prefill on the device: QUOKA's requests as the reference computes them, between dense ones that SGLang computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_winnow.device.prefill import DevicePrefill
from sglang_winnow.prefill_plan import Chunk
from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.parameters import quoka_prefill_parameters
from winnow_kernels.cache import LayerCache
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillWorkspace
from winnow_kernels.policies.quoka.reference import quoka_prefill

PAGE, SLOTS, KV_HEADS, GROUP, DIM = 16, 1024, 1, 2, 32
SCALE = DIM**-0.5
QUOKA = quoka_prefill_parameters(budget=70, block=64, queries=16, sinks=16, recency_ratio=0.5)


@pytest.mark.parametrize(("longest", "dtype"), [(256, torch.float32), (330, torch.float32), (330, torch.float8_e4m3fn)])
def test_a_pass_of_sparse_and_dense_requests(longest: int, dtype: torch.dtype, device: torch.device) -> None:
    requests = [(64, longest, QUOKA), (0, 40, None), (128, 200, QUOKA), (0, 60, QUOKA)]
    context = scattered_context([end for _, end, _ in requests], SLOTS, PAGE)
    table = torch.full((9, 512), -1, dtype=torch.int32)
    chunks, row = [], 0
    for number, (start, end, quoka) in enumerate(requests):
        slots = context.slots[number, :end]
        table[2 * number, :end] = slots
        chunks.append(
            Chunk(
                number,
                SimpleNamespace(prompt_length=end),  # type: ignore[arg-type]
                torch.tensor([2 * number], device=device),
                slots,
                start,
                end,
                row,
                quoka,
                range(0),
            )
        )
        row += end - start
    cache = random_cache(SLOTS, KV_HEADS, DIM, dtype=dtype)
    queries = random_queries(row, KV_HEADS * GROUP, DIM)
    on_device = LayerCache(cache.keys.to(device), cache.values.to(device))

    prefill = DevicePrefill(
        SimpleNamespace(chunks=chunks),  # type: ignore[arg-type]
        _forward_batch(chunks, device),
        table.to(device),
        PAGE,
        [on_device],
        QuokaPrefillWorkspace.empty(KV_HEADS, 512, device, 2**20),
        queries.dtype,
    )
    output = torch.full_like(queries, torch.nan, device=device)
    prefill.attend(0, queries.to(device), SCALE, output)

    assert not prefill.is_dense
    assert prefill._blocks.page_table.stride(0) % 16 == 0
    # A prompt that a budget covers is dense, too.
    dense = [chunks[1], chunks[3]]
    assert prefill.dense_tokens is not None
    assert prefill.dense_tokens.tolist() == [i for chunk in dense for i in range(chunk.rows.start, chunk.rows.stop)]
    assert output[prefill.dense_tokens].isnan().all()
    assert prefill.dense_batch is not None
    # A backend would write to it what it has for all tokens.
    assert prefill.dense_batch._attn_output is None
    for chunk in (chunks[0], chunks[2]):
        expected, _ = quoka_prefill(queries[chunk.rows], chunk.slots, cache, SCALE, QUOKA)
        torch.testing.assert_close(output[chunk.rows].cpu(), expected, atol=1e-5, rtol=1e-5)


def _forward_batch(chunks: list[Chunk], device: torch.device) -> SimpleNamespace:
    ends = torch.tensor([chunk.end for chunk in chunks])
    starts = torch.tensor([chunk.start for chunk in chunks])
    rows = torch.tensor([chunk.first_row for chunk in chunks], dtype=torch.int32)
    tokens = torch.arange(int((ends - starts).sum()), device=device)
    return SimpleNamespace(
        req_pool_indices=torch.cat([chunk.table_row for chunk in chunks]),
        seq_lens=ends.to(device),
        seq_lens_cpu=ends,
        out_cache_loc=tokens,
        positions=tokens,
        input_ids=tokens,
        extend_seq_lens=(ends - starts).to(device),
        extend_prefix_lens=starts.to(device),
        extend_start_loc=rows.to(device),
        _attn_output=torch.empty(len(tokens), device=device),
    )
