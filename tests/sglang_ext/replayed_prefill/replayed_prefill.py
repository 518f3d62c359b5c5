"""An SGLang plugin for tests: on a CPU, prefill passes take the way of CUDA graphs that are replayed.

SGLang's own ``PrefillCudaGraphRunner`` pads each batch to a captured size and hands it to the model, and attention goes
through the function that interrupts a graph. What attention has read is overwritten afterwards, as the graph's next
piece may do. Only capture and replay themselves are left out: each layer is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, Final

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

IN_PLACE: Final = "prefill passes are padded as graphs are"
SIZES: Final = (16, 48, 96, 200, 400, 700, 1500, 3000)

logger = logging.getLogger(__name__)
_runners: dict[int, Any] = {}


def register() -> None:
    """Take the place of eager prefill; SGLang calls this in each of its processes."""
    target = "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend"
    HookRegistry.register(target, _execute, HookType.AROUND)


def _execute(_eager: Callable[..., Any], runner: Any, batch: Any, proxies: Any = None) -> Any:
    model_runner = runner.model_runner
    if id(model_runner) not in _runners:
        _runners[id(model_runner)] = _runner_of(model_runner)
        logger.warning(IN_PLACE)
    return _runners[id(model_runner)].execute(batch, **model_runner._extend_forward_kwargs(batch, proxies))


def _runner_of(model_runner: Any) -> Any:
    """Return the runner as it is behind capture."""
    from sglang.srt.layers import radix_attention  # noqa: PLC0415
    from sglang.srt.model_executor.model_runner_components import layer_setup  # noqa: PLC0415
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as graphs  # noqa: PLC0415

    attention = _attention()

    def attend(query: Any, key: Any, value: Any, output: Any, *arguments: Any, **named: Any) -> None:
        attention(query, key, value, output, *arguments, **named)
        for tensor in (query, key, value):
            tensor.fill_(float("nan"))

    radix_attention.breakable_unified_attention_with_output = attend
    runner: Any = object.__new__(graphs.PrefillCudaGraphRunner)
    runner.model_runner, runner.device = model_runner, model_runner.device
    runner.capture_num_tokens, runner.max_num_tokens = list(SIZES), max(SIZES)
    runner.max_bs = model_runner.req_to_token_pool.size
    runner.prefill_backend_name = "breakable"
    runner.capture_hidden_mode = graphs.CaptureHiddenMode.NULL
    runner.capture_return_pooled_hidden_states = False
    runner.mamba_track_enabled = runner.is_multimodal = False
    runner.buffer_registry = graphs.build_prefill_registry(
        device=torch.device("cpu"),
        max_bs=runner.max_bs,
        max_num_token=max(SIZES),
        cache_loc_dtype=torch.int64,
        share_pool=False,
    )
    runner._is_full_backend = runner.use_captured_attn_metadata = False
    runner.has_mha_companion_layers = False
    runner.attn_metadata_buffers = runner.static_draft_hidden_states = runner.quant_config = None
    runner._prefill_static_buffers = runner._full_cg_seq_lens_cpu = None
    runner._capture_req_slots = 1
    runner._next_token_logits_buffer = lambda _rows: None
    found = layer_setup.compute_attention_and_moe_layers(model_runner.model.model)
    runner.attention_layers, runner.moe_layers, runner.moe_fusions, runner.dsa_indexers, companions = found
    runner.mha_companion_layers = companions
    runner.layer_model, runner._input_embeds_arg_idx = model_runner.model.model, 3
    forward = runner.layer_model.forward
    runner.backend = object.__new__(graphs.BreakableCudaGraphBackend)
    runner.backend.replay = lambda _key, batch, **_: forward(batch.input_ids, batch.positions, batch)
    return runner


def _attention() -> Callable[..., None]:
    """Return the function that interrupts graphs, as it is before SGLang makes an operator of it, which CPUs lack."""
    from sglang.srt.layers import radix_attention  # noqa: PLC0415
    from sglang.srt.utils import custom_op  # noqa: PLC0415

    spec = spec_from_file_location("sglang_radix_attention_undecorated", radix_attention.__file__)
    assert spec is not None
    assert spec.loader is not None
    undecorated = module_from_spec(spec)
    register_custom_op = custom_op.register_custom_op
    custom_op.register_custom_op = lambda **_: lambda function: function
    try:
        spec.loader.exec_module(undecorated)
    finally:
        custom_op.register_custom_op = register_custom_op
    function: Callable[..., None] = undecorated.unified_attention_with_output
    return function
