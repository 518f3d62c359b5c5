"""SGLang's attention backend ``winnow`` on CUDA: dense batches as SGLang computes them, all others in one pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_winnow.audit_share import audits_on
from sglang_winnow.borrowed_slots import borrowed
from sglang_winnow.dense_backend import dense_backend, mend_windows
from sglang_winnow.device.check import CheckBackend
from sglang_winnow.device.construction import build_decode, enabled_kinds, profiled_layers
from sglang_winnow.device.dense import DensePlans
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.device.prefill import DevicePrefill, compile_defaults
from sglang_winnow.device.variants import DENSE, variant_for, variants_of
from sglang_winnow.explaining import explained_rows, note_dense_steps
from sglang_winnow.forward_pass import context_of, scaled_output, scaled_queries, write_keys_and_values
from sglang_winnow.graph_sets import graph_sets
from sglang_winnow.key_bits import index_settings
from sglang_winnow.metrics import METRICS, SUPERSET_STEPS
from sglang_winnow.prefill_plan import PrefillPlan
from sglang_winnow.ranks import attention_ranks
from sglang_winnow.refusals import attention_layers, refuse_what_is_not_served
from sglang_winnow.request_state import RequestState, RequestTable
from sglang_winnow.served_policies import served_policies
from sglang_winnow.server_information import linear_layers
from sglang_winnow.sglang_versions.arguments import resolved, verifies_drafts
from sglang_winnow.sglang_versions.backend_defaults import take_from_dense
from sglang_winnow.softmaxes import layer_cache, sink_logits_of
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillWorkspace

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from winnow_kernels.cache import LayerCache
    from winnow_kernels.decode.explanation import ExplainedRow

logger = logging.getLogger(__name__)


class WinnowDeviceBackend(AttentionBackend):
    """Attention by the policy of each request, on CUDA.

    SGLang's fastest dense backend for the device computes prefill that is dense, decode while no policy acts, and
    layers with a sliding window.

    Attributes:
        variants: what decode steps launch, by label; a CUDA graph each.
        check: attention of the passes that check drafts; None on a server that does not.
        label: of the batch that SGLang runs or is about to run.
        capturing: label of the variant whose graph is being captured.
        compared: the rows of the last pass whose next token is to be compared with dense attention's.
    """

    def __init__(self, runner: ModelRunner) -> None:
        refuse_what_is_not_served(runner)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.device = torch.device(runner.device)
        dense = dense_backend(runner)
        self._dense: AttentionBackend = ATTENTION_BACKENDS[dense](runner)
        take_from_dense(self, self._dense)
        self._dense_plans = DensePlans(self._dense)
        layers = attention_layers(runner)
        self._layers = ModelLayers.of(layers)
        if self._layers.windows:
            mend_windows(self._dense, dense)
        full = [layer for layer in layers if self._layers.place(layer.layer_id) is not None]
        self._query_heads = full[0].tp_q_head_num
        self._dtype: torch.dtype = runner.dtype
        sinks = sink_logits_of(runner.model)
        by_number = {
            layer.layer_id: layer_cache(self.token_to_kv_pool, layer, sinks.get(layer.layer_id)) for layer in layers
        }
        self._every_cache = list(by_number.values())
        self._caches = [by_number[layer.layer_id] for layer in full]
        self.indexes = Indexes(self._caches, runner.page_size, self.device, index_settings())
        table = self.req_to_token_pool.req_to_token
        ranks = attention_ranks()
        self.statistics = Statistics(table.shape[0], self.device, ranks)
        linear = linear_layers(runner.model_config)
        windows = len(self._layers.windows)
        self.requests = RequestTable(self.statistics, windows, self._layers.placed, len(linear))
        verifies = verifies_drafts(resolved(runner.server_args))
        kinds = enabled_kinds(verifies=verifies)
        self._decode = build_decode(runner, self._caches, full[0], self.indexes, self.statistics, kinds, ranks)
        self.check = self._checks(by_number, full[0].scaling) if verifies else None
        sets = graph_sets(served_policies(verifies=verifies))
        profiled = [place for layer in profiled_layers(runner) if (place := self._layers.place(layer)) is not None]
        audits = audits_on(self.device.type)
        self.variants = variants_of(kinds, sets, len(full), profiled, audits=audits)
        logger.info(
            "Winnow has decode graphs of %d kinds of batches: %s.", len(self.variants), ", ".join(self.variants)
        )
        self.label = DENSE
        self.capturing: str | None = None
        self.compared: list[int] = []
        self._attends_densely = False
        self._states: list[RequestState] = []
        self._slots: list[int] = []
        self._lengths: list[int] = []
        self._explained: list[ExplainedRow] = []
        self._prefill: DevicePrefill | None = None
        self._workspace = QuokaPrefillWorkspace.empty(
            self._caches[0].kv_heads, runner.model_config.context_len, self.device
        )
        if self.device.type == "cuda":
            compile_defaults(self._caches[0], self._query_heads, runner.page_size, self._workspace, self._dtype)

    def __getattr__(self, name: str) -> Any:
        """Return what SGLang asks of its own backends alone."""
        return getattr(self.__dict__["_dense"], name)

    @property
    def forward_metadata(self) -> Any:
        """What the dense backend has planned."""
        return getattr(self._dense, "forward_metadata", None)

    @forward_metadata.setter
    def forward_metadata(self, metadata: Any) -> None:
        self._dense.forward_metadata = metadata

    def shared_read_ends(self, mode: Any) -> Any:
        """Return until when a pass reads what the scheduler may change; asked from SGLang 0.5.18 on.

        A decode step copies its rows of the page table before a graph is replayed: later only the dense backend reads.
        """
        return self._dense.shared_read_ends(mode) if mode.is_decode() else super().shared_read_ends(mode)

    def note(self, requests: Sequence[Req], batch: ForwardBatch, _decoding: int) -> None:
        """Note the requests of a batch, before its forward pass and in the order of the passes."""
        self.requests.begin(requests)
        self._states = [request.winnow_state for request in requests]
        # Not those of the requests. A server that verifies looks at the tokens of a pass with grammars after it has
        # planned the next one: who has ended is in that one, too, and has given its slot back.
        self._slots = [state.slot for state in self._states]
        self._explained = []
        self.compared = []
        if batch.forward_mode.is_decode():
            self._lengths = batch.seq_lens_cpu.tolist()
            self._explained = explained_rows(self._states, self._lengths)
            needed = self._decode.needed(self._states, self._lengths)
            self.label = variant_for(needed, self.variants)
            if self.variants[self.label] != needed:
                METRICS.add(SUPERSET_STEPS, graph=self.label)

    @property
    def runs_without_graph(self) -> bool:
        """Whether no graph may serve the pass that runs next: it is explained, or compares next tokens."""
        return bool(self._explained) or self._attends_densely

    @contextmanager
    def attending_densely(self, slots: Tensor) -> Iterator[None]:
        """Let the decode passes within attend to everything, count nothing, and leave the KV cache as it was.

        Args:
            slots: int64 [requests]; those that the passes write.
        """
        self._attends_densely = True
        try:
            with borrowed(slots, self._every_cache):
                yield
        finally:
            self._attends_densely = False

    def can_decode_ahead(self, states: Sequence[RequestState], length_bounds: Sequence[int]) -> bool:
        """Return whether a decode pass could be launched that has contexts of up to so many tokens."""
        return self._decode.is_prepared(states, length_bounds)

    def compile(self, rows: int) -> None:
        """Compile the kernels of decode steps of ``rows`` rows, before graphs are captured of them."""
        self._decode.compile(self.variants.values(), rows, self._query_heads, self._dtype)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a forward pass that no CUDA graph serves."""
        self._prefill = None
        mode = forward_batch.forward_mode
        if mode.is_idle() or self._attends_densely:
            self._dense_plans.plan(forward_batch)
            return
        self.indexes.generations.written(forward_batch.out_cache_loc)
        if mode.is_decode():
            self._prepare(forward_batch, self.label)
            if self._has_dense_layers:
                self._dense_plans.plan(forward_batch)
            self._decode.begin()
            self._note_dense_steps()
            return
        dense_batch: ForwardBatch | None = forward_batch
        if len(self._states) == forward_batch.batch_size:
            self._prefill = self._plan_prefill(forward_batch)
            if not self._layers.windows:
                dense_batch = self._prefill.dense_batch
        if dense_batch is not None:
            self._dense_plans.plan(dense_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make what graphs need."""
        self._dense_plans.begin_graphs(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a row of padding."""
        return 1

    def on_after_cuda_graph_warmup(self) -> None:
        """Do what SGLang's own backend does between warming up and capturing."""
        self._dense.on_after_cuda_graph_warmup()

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare a decode step that a graph serves, or is captured for."""
        self._prepare(forward_batch, self.capturing if in_capture and self.capturing else self.label, in_capture)
        if self._has_dense_layers:
            self._dense_plans.plan_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Begin a decode step, captured."""
        self.indexes.generations.written(forward_batch.out_cache_loc)
        if self._has_dense_layers:
            self._dense.init_forward_metadata_in_graph(forward_batch)
        self._decode.begin()

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Attend with one query a request. Returns [requests, query heads × head dim]."""
        if self._attends_densely:
            return self._dense.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **options)
        place = self._layers.place(layer.layer_id)
        if self._is_dense or place is None:
            output = self._dense.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **options)
        else:
            if save_kv_cache:
                write_keys_and_values(self.token_to_kv_pool, layer, forward_batch, k, v)
            cache = self._caches[place]
            queries = scaled_queries(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), layer, cache)
            output = torch.empty_like(queries)
            self._decode.attend(place, queries, output)
            output = scaled_output(output, layer, cache).flatten(1)
        if self._explained and place is not None:
            queries = scaled_queries(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), layer, self._caches[place])
            self._explain(place, layer.layer_id, queries)
        if layer.layer_id == self._layers.last:
            self._decode.finish()
        return output

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Attend with the new tokens of each request, one after another. Returns [tokens, query heads × head dim]."""
        prefill, place = self._prefill, self._layers.place(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if prefill is None or prefill.is_dense or place is None:
            if prefill is not None:
                assert prefill.batch is not None
                self._dense_plans.ensure(prefill.batch)
            output = self._dense.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)
        else:
            cache, rows = self._caches[place], prefill.dense_tokens
            # Taken before they are divided by the layer's scales, in place: dense backends may read them as they were.
            own = None if rows is None else (queries[rows].flatten(1), k[rows], v[rows])
            if save_kv_cache:
                write_keys_and_values(self.token_to_kv_pool, layer, forward_batch, k, v)
            output = torch.empty_like(queries)
            prefill.attend(place, scaled_queries(queries, layer, cache), layer.scaling, output)
            output = scaled_output(output, layer, cache)
            if own is not None:
                assert prefill.dense_batch is not None
                self._dense_plans.ensure(prefill.dense_batch)
                part = self._dense.forward_extend(*own, layer, prefill.dense_batch, save_kv_cache=False, **options)
                output[rows] = part.view(-1, *queries.shape[1:])
            output = output.flatten(1)
        if prefill is not None:
            if place is not None:
                prefill.plan.note(place, scaled_queries(queries, layer, self._caches[place]), layer.scaling)
            if layer.layer_id == self._layers.last:
                prefill.finish()
        return output

    @property
    def _is_dense(self) -> bool:
        return self._decode.variant.is_dense

    @property
    def _has_dense_layers(self) -> bool:
        """Whether the dense backend computes some layers of the decode step, or all."""
        return self._is_dense or bool(self._layers.windows)

    def _prepare(self, forward_batch: ForwardBatch, label: str, in_capture: bool = False) -> None:
        known = not in_capture and 0 < len(self._states) <= len(forward_batch.req_pool_indices)
        self._decode.prepare(
            self.variants[label],
            self._states if known else (),
            self._slots if known else (),
            self._lengths if known else (),
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
        )
        if known:
            audited = (row.row for row in self._decode.audited)
            self.compared = [row for row in audited if self._states[row].policy.audits_next_token]

    def _explain(self, place: int, number: int, queries: Tensor) -> None:
        for explained in self._explained:
            if number in explained.layers:
                self._decode.explain(place, number, queries, explained, self._slots[explained.row])

    def _note_dense_steps(self) -> None:
        for explained in self._explained:
            state, length = self._states[explained.row], self._lengths[explained.row]
            if self._decode.runs_dense(state, self._slots[explained.row], length):
                note_dense_steps([state], [length])

    def _checks(self, caches: Mapping[int, LayerCache], scale: float) -> CheckBackend:
        return CheckBackend(
            self._layers,
            self._caches,
            {number: caches[number] for number in self._layers.windows},
            scale,
            self._query_heads,
            self.token_to_kv_pool,
            self.req_to_token_pool.req_to_token,
            self._decode,
            self.indexes.generations,
            self.statistics,
        )

    def _plan_prefill(self, forward_batch: ForwardBatch) -> DevicePrefill:
        table = self.req_to_token_pool.req_to_token
        plan = PrefillPlan(
            context_of(forward_batch, table, self._caches[0].slots),
            forward_batch.req_pool_indices,
            self._states,
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            self.indexes,
            self.statistics,
            with_norms=False,
        )
        page_size = self.indexes.page_size
        return DevicePrefill(plan, forward_batch, table, page_size, self._caches, self._workspace, self._dtype)
