"""What SGLang's ``AttentionBackend`` answers by itself, of a backend that has another one for dense batches.

An attribute of the base class hides the dense backend's, which ``__getattr__`` would have found. Each release has more
of them: each is here, or the backend has its own.
"""

from __future__ import annotations

from typing import Final

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

OF_DENSE: Final = ("data_type", "extend_dummy_seqs_capped_by_req_pool", "kv_cache_dtype")
"""Fixed when a backend is made, and the dense one's: it computes dummy prefill, and writes keys and values."""

OF_BASE: Final = frozenset(
    {
        # ``forward`` leads to the methods that the backend has; no batch mixes phases, and none has an indexer.
        "forward",
        "forward_mixed",
        "get_indexer_metadata",
        # Winnow reads lengths on the host, and launches Triton kernels.
        "needs_cpu_seq_lens",
        "support_triton",
        # Written by the model runner.
        "decode_attention_backend_str",
        "prefill_attention_backend_str",
        # Prefill is planned anew for each pass; what graphs capture of it has no attention.
        "init_forward_metadata_for_breakable_cuda_graph_capture",
        "prefill_cuda_graph_default_max_seq_len",
        "prefill_cuda_graph_max_batch_size",
        "prepare_forward_metadata_for_breakable_cuda_graph_replay",
        "prepare_full_cuda_graph_chunked_prefix",
        "supports_full_cuda_graph_chunked_prefix",
        "supports_prefill_cuda_graph_max_context_size",
        "use_captured_forward_metadata_for_breakable_cuda_graph",
        # Until a prefill has ended, the scheduler keeps what it reads.
        "_snapshot_prefill_shared_reads",
        "prepare_prefill_shared_read_snapshot",
        "resolve_prefill_shared_read_ends",
        # Winnow writes keys and values by itself, and needs them in the cache before it attends.
        "get_fused_kv_write_buffers",
        # Of what is refused at start: speculative decoding, data-parallel attention, pools that translate slots, models
        # of diffusion, DeepSeek's.
        "attn_backend_list",
        "dllm_attention",
        "draft_extend_metadata_captured_in_graph",
        "folds_encoder_swa_replay",
        "get_verify_buffers_to_fill_after_draft",
        "glue_draft_metadata",
        "glue_target_verify_metadata",
        "kv_index_translator",
        "late_layer_num_tokens",
        "prefer_eager_mixed_prefill_under_dp_attention",
        "skips_prefill_metadata_on_idle_dp_rank",
        "supports_draft_extend_metadata_staging",
        "supports_ragged_verify_graph",
        "update_verify_buffers_to_fill_after_draft",
        "validate_elastic_cuda_graph_recapture",
        "verify_mask",
    }
)
"""What the base class answers is right."""


def take_from_dense(backend: AttentionBackend, dense: AttentionBackend) -> None:
    """Have ``backend`` answer as ``dense`` does, where the base class of both would answer instead."""
    for name in OF_DENSE:
        if hasattr(AttentionBackend, name):
            setattr(backend, name, getattr(dense, name))
