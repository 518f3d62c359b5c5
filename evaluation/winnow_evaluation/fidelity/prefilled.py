"""Prompts that a model has read: their KV cache, with room for what follows each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from sglang_winnow.prefill_plan import PrefillPlan
from sglang_winnow.request_policy import kept_by
from sglang_winnow.request_state import RequestState
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.clusters import SPAN, ClusterIndex
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.pages import PageIndex
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import AttentionPolicy

if TYPE_CHECKING:
    from sglang_winnow.device.prefill import DevicePrefill

PAGE_SIZE: Final = 16
_READS: Final = {
    "attended": Field.PREFILL_ATTENDED,
    "context": Field.PREFILL_CONTEXT,
    "read_bytes": Field.PREFILL_READ_BYTES,
    "context_bytes": Field.PREFILL_CONTEXT_BYTES,
}


class PrefilledBatch:
    """Prompts whose keys and values are in a KV cache. Each prompt's tokens lie in a row, with room behind them.

    Attributes:
        model: that read them.
        lengths: tokens of each prompt.
        caches: of each layer.
        slots: int64 [prompts, capacity]; where each prompt's tokens, and then those that follow, lie.
        last: [prompts, scored, hidden size]; what the model says at each prompt's last tokens, before its last step.
        scale: of attention scores.
        indexes: over the caches.
    """

    def __init__(
        self,
        model: OfflineModel,
        prompts: Sequence[Sequence[int]],
        room: int,
        *,
        policy: AttentionPolicy | None = None,
        scored: int = 1,
        window: int = 0,
        span: int = SPAN,
        chunk: int | None = None,
        by_kernels: bool | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Prefill the prompts, one after another.

        Args:
            model: what reads them.
            prompts: tokens of each, at least ``scored``.
            room: most tokens that follow a prompt.
            policy: whose prefill it is; dense attention's without one.
            scored: how many of each prompt's last tokens are kept in ``last``.
            window: how many of each prompt's last queries are kept: the longest observation window of the policies.
            span: of Tactic's clusters.
            chunk: tokens prefilled at once; all of a prompt without it.
            cache_dtype: of keys and values in the cache; the model's if not given.
            by_kernels: whether a sparse prefill is the GPU's kernels' and not the reference's; on CUDA if not given.
        """
        self.model = model
        self.lengths = [len(prompt) for prompt in prompts]
        capacity = -(-(max(self.lengths) + room) // PAGE_SIZE) * PAGE_SIZE
        self.slots = torch.arange(len(prompts) * capacity, device=model.device).view(len(prompts), capacity)
        dtype = cache_dtype or model.cache_dtype
        self.caches = [self._empty_cache(dtype, layer) for layer in range(model.layers)]
        self.indexes = Indexes(self.caches, PAGE_SIZE, model.device)
        self.indexes.made[ClusterIndex] = ClusterIndex(self.caches, self.indexes.generations, span)
        self.scale = 0.0
        self._codes: dict[int, KeyCodes] = {}
        self._policy = policy or AttentionPolicy()
        self._statistics = Statistics(len(prompts), model.device)
        self._by_kernels = model.device.type == "cuda" if by_kernels is None else by_kernels
        self._last_queries: list[list[Tensor]] = [[] for _ in prompts]
        self.last = torch.stack(
            [self._prefill(row, prompt, scored, window, chunk or len(prompt)) for row, prompt in enumerate(prompts)]
        )

    @property
    def prompts(self) -> int:
        return len(self.lengths)

    @property
    def reads(self) -> dict[str, int]:
        """What the prefill of all prompts has read, by the names of ``Meter``."""
        sums = self._statistics.rows.sum(0).tolist()
        return {name: int(sums[field]) for name, field in _READS.items()}

    def context(self, prompts: Tensor, lengths: Tensor) -> Context:
        """Return contexts of ``lengths``, int64 [rows], tokens of ``prompts``, int64 [rows]: several may share one."""
        slots = self.slots[prompts, : int(lengths.max())]
        return Context.of(slots, lengths, self.slots.numel())

    def vectors(self, layer: int, prompts: range, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in some prompts' first ``length`` slots: [prompts, KV heads, length, head dim].

        They are float32: exact attention multiplies in it, as the policies do.
        """
        cache = self.caches[layer]
        keys, values = (
            pool.unflatten(0, self.slots.shape)[prompts.start : prompts.stop, :length].transpose(1, 2).float()
            for pool in (cache.keys, cache.values)
        )
        return keys, values

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write what follows the prompts: [prompts, tokens, KV heads, head dim] to ``slots``, int64 [prompts, tokens].

        Page indexes that there are get the entries of these pages anew. Of a page that is not full yet the entry means
        nothing; no step reads it.
        """
        cache = self.caches[layer]
        _store(cache, slots, keys, values)
        pages = (slots // PAGE_SIZE).unique()
        for index in self.indexes.made.values():
            if isinstance(index, PageIndex) and not cache.windowed:
                index.build(layer, cache, pages)

    def use_codes(self, bits: int) -> KeyCodes:
        """Return the codes of the keys with ``bits`` bits a channel: from now on the index of the batch."""
        if bits not in self._codes:
            self._codes[bits] = KeyCodes(self.caches, self.indexes.generations, in_triton=False, bits=bits)
        self.indexes.made[KeyCodes] = self._codes[bits]
        return self._codes[bits]

    def begin(self, slots: Tensor) -> None:
        """Note that a pass is about to write ``slots``, int64 [prompts, tokens]."""
        self.indexes.generations.written(slots.flatten())

    def forget(self) -> None:
        """Void what indexes hold of pages that an answer was written to: the next answer overwrites them."""
        starts = [
            slots[length // PAGE_SIZE * PAGE_SIZE :: PAGE_SIZE]
            for slots, length in zip(self.slots, self.lengths, strict=True)
        ]
        self.indexes.generations.written(torch.cat(starts))

    def state(self, prompt: int, policy: AttentionPolicy) -> RequestState:
        """Return the state of a request of one prompt that has been prefilled."""
        state = RequestState(policy, self.lengths[prompt])
        self._keep(state, prompt, self.model.full_layers)
        return state

    def state_on_device(self, prompt: int, policy: AttentionPolicy) -> RequestState:
        """Return the same for ``DeviceDecode``: it knows the layers with full attention by their places among them."""
        layers = self.model.full_layers
        state = RequestState(policy, self.lengths[prompt])
        state.decode = policy.decode.at_places(layers)
        self._keep(state, prompt, range(len(layers)))
        return state

    def _keep(self, state: RequestState, prompt: int, names: Sequence[int]) -> None:
        """Note what a policy keeps of a prompt, in the layers with full attention, under these names."""
        state.kept = kept_by(state, names)
        if state.kept is not None:
            for name, layer in zip(names, self.model.full_layers, strict=True):
                queries = self._last_queries[prompt][layer]
                state.kept.record(name, queries, state.prompt_length - len(queries))

    def _empty_cache(self, dtype: torch.dtype, layer: int) -> LayerCache:
        shape = (self.slots.numel(), self.model.kv_heads, self.model.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=self.model.device) for _ in range(2))
        windowed = self.model.windows[layer] is not None
        return LayerCache(keys, values, windowed=windowed, softmax=self.model.softmaxes[layer])

    def _prefill(self, row: int, prompt: Sequence[int], scored: int, window: int, chunk: int) -> Tensor:
        tokens = torch.tensor([prompt], device=self.model.device)
        positions = torch.arange(len(prompt), device=self.model.device)[None]
        # Only its prefill is looked at here: what a decode policy needs of the prompt, ``state`` keeps.
        state = RequestState(AttentionPolicy(prefill=self._policy.prefill), len(prompt))
        kept: list[Tensor] = []
        self._last_queries[row] = [torch.empty(0)] * self.model.layers
        self.begin(self.slots[row : row + 1, : len(prompt)])
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            kept.append(self._chunk(row, state, tokens[:, start:end], positions[:, start:end], window)[0, -scored:])
        return torch.cat(kept)[-scored:]

    def _chunk(self, row: int, state: RequestState, tokens: Tensor, positions: Tensor, window: int) -> Tensor:
        start, end = int(positions[0, 0]), int(positions[0, -1]) + 1
        slots = self.slots[row, start:end]
        context = self.context(torch.tensor([row]), torch.tensor([end], device=self.model.device))
        own_row = torch.tensor([row], device=self.model.device)
        plan = PrefillPlan(context, own_row, [state], [start], [end - start], self.indexes, self._statistics)
        kernels = self._kernels_of(plan)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            cache = self.caches[layer]
            _store(cache, slots, keys[0], values[0])
            if window:
                before = self._last_queries[row][layer]
                known = queries[0, -window:] if not len(before) else torch.cat((before, queries[0]))[-window:]
                self._last_queries[row][layer] = known.clone()
            self.scale = scale
            sliding = self.model.windows[layer]
            if kernels is None or sliding is not None:
                return plan.attend(layer, queries[0], cache, scale, sliding)[None]
            own = queries[0].contiguous()
            output = torch.empty_like(own)
            kernels.attend(self.model.full_layers.index(layer), own, scale, output)
            return output[None]

        hidden = self.model.hidden(tokens, positions, attend)
        (kernels or plan).finish()
        return hidden

    def _kernels_of(self, plan: PrefillPlan) -> DevicePrefill | None:
        """Return what attends by the GPU's kernels; None where nothing is to, or attention is dense."""
        if not self._by_kernels or plan.is_dense:
            return None
        # Triton looks for a GPU's driver when it is imported.
        from sglang_winnow.device.prefill import DevicePrefill  # noqa: PLC0415
        from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillWorkspace  # noqa: PLC0415

        workspace = QuokaPrefillWorkspace.empty(self.model.kv_heads, self.slots.shape[1], self.model.device)
        caches = [self.caches[layer] for layer in self.model.full_layers]
        kernels = DevicePrefill(plan, None, self.slots.int(), PAGE_SIZE, caches, workspace)
        return None if kernels.is_dense else kernels


def _store(cache: LayerCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    cache.keys[slots], cache.values[slots] = keys.to(cache.keys.dtype), values.to(cache.values.dtype)
