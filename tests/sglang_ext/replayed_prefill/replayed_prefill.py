"""An SGLang plugin for tests: on a CPU, prefill passes take the way of CUDA graphs that are replayed.

SGLang's own ``PrefillCudaGraphRunner`` is made and asked as on CUDA: it captures each size, pads a batch to one of them
and hands it to the model, and attention goes through the function that interrupts a graph. What attention has read is
overwritten afterwards, as the graph's next piece may do. Only capture and replay themselves are left out: each layer is
computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

REPLAYED: Final = "A prefill pass is padded as graphs are"
SIZES: Final = (16, 48, 96, 200, 400, 700, 1500, 3000)

logger = logging.getLogger(__name__)


def register() -> None:
    """Have SGLang make graphs for prefill; it calls this in each of its processes."""
    target = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph"
    HookRegistry.register(target, _capture, HookType.AROUND)


def _capture(capture: Callable[..., Any], *, model_runner: Any, **others: Any) -> Any:
    # Winnow lets no graph be captured on a CPU.
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as graphs  # noqa: PLC0415

    prefill = _graph_config(model_runner).prefill
    prefill.backend, prefill.bs = graphs.Backend.BREAKABLE, list(SIZES)
    graphs.resolve_prefill_backend = _replay_class(graphs.BreakableCudaGraphBackend)
    graphs.graph_capture = _no_stream
    graphs.get_or_create_global_graph_capture_stream = lambda: None
    _overwrite_what_attention_has_read()
    return capture(model_runner=model_runner, **others)


def _graph_config(model_runner: Any) -> Any:
    """Return what SGLang decides by; from 0.5.19 on that is no longer what the server's arguments say."""
    from sglang_winnow.sglang_versions.releases import ARGUMENTS_DECLARED, runs  # noqa: PLC0415

    if not runs(ARGUMENTS_DECLARED):
        return model_runner.server_args.cuda_graph_config
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415

    return get_exec().graph.cuda_graph_config


@contextmanager
def _no_stream(**_: object) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(stream=None)


def _replay_class(of_sglang: Any) -> type:
    """Return a kind of graphs for SGLang's runner: those of its own kind, which are computed instead of replayed."""

    class Computed(of_sglang):  # type: ignore[misc]
        def __init__(self, runner: Any) -> None:
            self._runner = runner
            self._sizes: set[Any] = set()

        @contextmanager
        def capture_session(self, _stream: None) -> Iterator[None]:
            with self.replay_session():
                yield

        def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], **_: object) -> None:
            forward_fn()
            self._sizes.add(shape_key)

        def replay(self, shape_key: Any, batch: Any, **_: object) -> Any:
            assert shape_key in self._sizes
            logger.warning("%s, to %d tokens.", REPLAYED, len(batch.input_ids))
            model = self._runner.layer_model
            # The runner has put its own in the place of the instance's.
            return type(model).forward(model, batch.input_ids, batch.positions, batch)

    return Computed


def _overwrite_what_attention_has_read() -> None:
    """Overwrite it after each call of the function that interrupts graphs; SGLang 0.5.23 made a method of it."""
    from sglang.srt.layers import radix_attention  # noqa: PLC0415

    layer = radix_attention.RadixAttention
    if hasattr(layer, "_eager_attention"):
        layer._eager_attention = _overwriting(layer._eager_attention.run_eager, inputs=slice(1, 4))
    else:
        assert hasattr(radix_attention, "breakable_unified_attention_with_output")
        radix_attention.breakable_unified_attention_with_output = _overwriting(_undecorated(), inputs=slice(3))


def _overwriting(attention: Callable[..., None], inputs: slice) -> Callable[..., None]:
    def attend(*arguments: Any, **named: Any) -> None:
        attention(*arguments, **named)
        for tensor in arguments[inputs]:
            tensor.fill_(float("nan"))

    return attend


def _undecorated() -> Callable[..., None]:
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
