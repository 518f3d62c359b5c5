"""SGLang's Triton backend sees in a layer with a sliding window what the model says, once Winnow has mended it.

It bounds scores, and takes sink logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_winnow.dense_backend import TRITON, mend_windows
from sglang_winnow.sglang_versions.releases import WINDOWS_ON_CUDA
from tests.kernels.caches import SOFTMAXES, random_cache, random_softmax
from tests.kernels.gpu.selectors import cache_on
from winnow_kernels.attend.dense import prefill

pytestmark = [
    pytest.mark.skipif(not WINDOWS_ON_CUDA, reason="windows are served on CUDA with the oldest release only"),
    # Of rows and splits that nobody reads, in kernels that NumPy interprets.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 1, 32, 0.2
WINDOW, LONGEST = 40, 200
# On a GPU its kernels multiply in TF32.
TOLERANCE = 1e-2


class Backend:
    """The backend, with a KV cache that two requests share."""

    def __init__(self, device: torch.device) -> None:
        self.cache = cache_on(device, random_cache(2 * LONGEST, KV_HEADS, HEAD_DIM, seed=0))
        order = torch.randperm(2 * LONGEST, generator=torch.Generator().manual_seed(0))
        self.table = order.view(2, LONGEST).int().to(device)
        self.dense: Any = triton_backend.TritonAttnBackend(self._runner(device))

    def _runner(self, device: torch.device) -> Any:
        model = SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            num_attention_heads=HEADS,
            get_num_kv_heads=lambda _: KV_HEADS,
            v_head_dim=HEAD_DIM,
            swa_v_head_dim=HEAD_DIM,
            context_len=LONGEST,
            is_encoder_decoder=False,
        )
        arguments = SimpleNamespace(
            speculative_num_draft_tokens=None,
            speculative_num_steps=None,
            speculative_eagle_topk=None,
            triton_attention_num_kv_splits=8,
            triton_attention_split_tile_size=None,
            chunked_prefill_size=-1,
            enable_deterministic_inference=False,
        )
        return SimpleNamespace(
            req_to_token_pool=SimpleNamespace(size=2, req_to_token=self.table),
            token_to_kv_pool=SimpleNamespace(
                get_key_buffer=lambda _: self.cache.keys, get_value_buffer=lambda _: self.cache.values
            ),
            token_to_kv_pool_allocator=SimpleNamespace(),
            sliding_window_size=WINDOW,
            page_size=16,
            server_args=arguments,
            model_config=model,
            device=str(device),
            gpu_id=0,
            is_draft_worker=False,
        )

    def attend(self, starts: Sequence[int], ends: Sequence[int], mode: ForwardMode) -> tuple[Tensor, Tensor]:
        """Attend from the tokens of each request from ``starts`` to ``ends``; return also what is correct."""
        device = self.table.device
        news = [end - start for start, end in zip(starts, ends, strict=True)]
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=2,
            req_pool_indices=torch.arange(2, device=device),
            seq_lens=torch.tensor(ends, device=device),
            seq_lens_sum=sum(ends),
            extend_prefix_lens=torch.tensor(starts, device=device),
            extend_prefix_lens_cpu=list(starts),
            extend_seq_lens=torch.tensor(news, device=device),
            extend_seq_lens_cpu=news,
            spec_info=None,
            out_cache_loc=None,
        )
        queries = torch.randn(sum(news), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(device)
        slots = [row[start:end].long() for row, start, end in zip(self.table, starts, ends, strict=True)]
        new = torch.cat(slots)
        self.dense.init_forward_metadata(batch)
        attend = self.dense.forward_decode if mode.is_decode() else self.dense.forward_extend
        keys, values = self.cache.keys[new], self.cache.values[new]
        softmax = self.cache.softmax
        own = layer(softmax.cap or 0.0)
        output = attend(queries.flatten(1), keys, values, own, batch, save_kv_cache=False, sinks=softmax.sink_logits)
        correct = [
            prefill(own, row[:end].long(), self.cache, SCALE, WINDOW)
            for own, row, end in zip(queries.split(news), self.table, ends, strict=True)
        ]
        return output, torch.cat(correct).flatten(1)


def layer(cap: float) -> RadixAttention:
    """A layer of Gemma 3, whose scores may have a cap; 0 for none."""
    return RadixAttention(
        HEADS,
        HEAD_DIM,
        SCALE,
        KV_HEADS,
        layer_id=0,
        logit_cap=cap,
        sliding_window_size=WINDOW,
        attn_type=AttentionType.DECODER_BIDIRECTIONAL,
    )


@pytest.fixture
def backend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Of a server with neither graphs nor chunks."""
    alone = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1)
    monkeypatch.setattr(triton_backend, "get_parallel", lambda: alone)
    monkeypatch.setattr(triton_backend, "cuda_graph_fully_disabled", lambda: True)
    for kind in ("hybrid_gdn_config", "kimi_linear_config", "linear_attn_model_spec"):
        monkeypatch.setattr(triton_backend, kind, lambda _: None)
    return Backend(device)


PASSES = [
    ([WINDOW - 1, 129], [WINDOW, 130], ForwardMode.DECODE),
    ([WINDOW, WINDOW + 1], [WINDOW + 1, WINDOW + 2], ForwardMode.DECODE),
    ([70, 0], [130, 90], ForwardMode.EXTEND),
    ([WINDOW, WINDOW + 1], [WINDOW + 3, 199], ForwardMode.EXTEND),
]


@pytest.mark.parametrize(("starts", "ends", "mode"), PASSES)
def test_windows_are_those_of_the_model(
    starts: Sequence[int], ends: Sequence[int], mode: ForwardMode, backend: Backend
) -> None:
    mend_windows(backend.dense, TRITON)
    output, correct = backend.attend(starts, ends, mode)
    torch.testing.assert_close(output, correct, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("softmax", SOFTMAXES[1:])
@pytest.mark.parametrize(("starts", "ends", "mode"), PASSES[1:3])
def test_caps_and_sinks_are_those_of_the_model(
    starts: Sequence[int], ends: Sequence[int], mode: ForwardMode, softmax: str, backend: Backend
) -> None:
    mend_windows(backend.dense, TRITON)
    _, plain = backend.attend(starts, ends, mode)
    own = replace(backend.cache, softmax=random_softmax(softmax, HEADS))
    backend.cache = cache_on(backend.cache.keys.device, own)
    output, correct = backend.attend(starts, ends, mode)
    torch.testing.assert_close(output, correct, atol=TOLERANCE, rtol=TOLERANCE)
    assert not torch.allclose(output, plain, atol=5 * TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("number", [0, 2])
def test_it_needs_to_be_mended(number: int, backend: Backend) -> None:
    """Whoever sees this fail may drop ``mend_windows``: SGLang sees in decode, or in prefill, what the model says."""
    output, correct = backend.attend(*PASSES[number])
    assert not torch.allclose(output, correct, atol=TOLERANCE, rtol=TOLERANCE)


def test_another_backend_is_left_alone() -> None:
    dense: Any = SimpleNamespace(sliding_window_size=WINDOW)
    mend_windows(dense, "fa3")
    assert vars(dense) == {"sliding_window_size": WINDOW}
