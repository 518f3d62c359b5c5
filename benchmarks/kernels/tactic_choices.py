"""What Tactic takes of a context, beside what would do: tokens per query head, unions per KV head, and their mass.

Clusters and selection are those of winnow_kernels. Counts are of tokens in context, those in no cluster included;
ratios are ratios of sums. Beside Tactic:
  optimal          the fewest tokens that hold p: the largest weights first;
  cluster optimal  whole clusters by the mass they hold, after the unclustered tokens (Tactic, Table 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.task_prompts import Prompt
from winnow_kernels.attend.dense import prefill
from winnow_kernels.attend.reference import group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.clusters import ClusterIndex
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep

PAGE_SIZE = 16
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
MAX_STEPS = 32
"""Answer tokens of a prompt that are asked, at most."""


@dataclass
class Captured:
    """One prompt's attention inputs.

    Attributes:
        prompt_length: tokens in the prompt.
        queries: for each layer [steps, query heads, head dim], of the tokens that the answer's first steps decode.
        caches: for each layer all keys; a token's slot is its position.
        scale: of the scores.
    """

    prompt_length: int
    queries: list[Tensor] = field(default_factory=list)
    caches: list[LayerCache] = field(default_factory=list)
    scale: float = 0.0

    @property
    def steps(self) -> int:
        return self.queries[0].shape[0]

    def context(self) -> Context:
        """The context of each step: one row for each answer token, that token included."""
        lengths = self.prompt_length + 1 + torch.arange(self.steps, device=self.queries[0].device)
        slots = torch.arange(int(lengths.max()), device=lengths.device).expand(self.steps, -1)
        return Context(slots.masked_fill(slots >= lengths[:, None], self.caches[0].slots), lengths)


@dataclass
class Sums:
    """Sums over layers, heads, steps and prompts. Tokens of KV heads are those of the union over the group."""

    heads: float = 0
    tokens: dict[str, float] = field(default_factory=dict)
    union: dict[str, float] = field(default_factory=dict)

    def add(self, masks: dict[str, Tensor]) -> None:
        """Add a layer: ``masks`` are bool [steps, KV heads, group, context]."""
        self.heads += masks["tactic"][..., 0].numel()
        for name, mask in masks.items():
            self.tokens[name] = self.tokens.get(name, 0.0) + float(mask.sum())
            self.union[name] = self.union.get(name, 0.0) + float(mask.any(2).sum())


def capture(model: OfflineModel, prompt: Prompt) -> Captured:
    """Run the model over a prompt and its answer."""
    captured = Captured(len(prompt.tokens))
    tokens = torch.tensor([[*prompt.tokens, *prompt.answer[:MAX_STEPS]]], device=model.device)
    positions = torch.arange(tokens.shape[1], device=model.device)
    padding = (0, 0, 0, 0, 0, -tokens.shape[1] % PAGE_SIZE)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        del layer
        cache = LayerCache(*(torch.nn.functional.pad(vectors[0], padding) for vectors in (keys, values)))
        captured.queries.append(queries[0, captured.prompt_length :].clone())
        captured.caches.append(cache)
        captured.scale = scale
        return prefill(queries[0], positions, cache, scale)[None]

    with torch.inference_mode():
        model.hidden(tokens, positions[None], attend)
    return captured


def leading(weights: Tensor, before: Tensor, p: float) -> Tensor:
    """Return which of the weights in order, [..., n], are needed for ``p`` when ``before``, [...], is there already."""
    reached_before = before[..., None] + weights.cumsum(-1) - weights
    return reached_before < p


class PromptTables:
    """One prompt under one span size."""

    def __init__(self, captured: Captured, span: int) -> None:
        self.captured = captured
        self.context = captured.context()
        device = self.context.device
        generations = PageGenerations(captured.caches[0].slots, PAGE_SIZE, device)
        self.index = ClusterIndex(captured.caches, generations, span)
        clustered = captured.prompt_length // span * span
        self.index.ensure(self.context, 0, clustered)
        self.clustered = torch.full((captured.steps,), clustered, device=device)

    def add(self, p: float, sums: Sums) -> None:
        """Add the prompt to the sums."""
        step = self._step(p)
        for layer, cache in enumerate(self.captured.caches):
            taken = step.taken(layer, self.captured.queries[layer], cache)
            sums.add(self._masks(step, taken, layer, self._weights(layer, cache), p))

    def _step(self, p: float) -> TacticStep:
        parameters = [Tactic(p=p, full_layers=0, sinks=0)] * self.captured.steps
        return TacticStep(self.context, self.captured.scale, None, self.index, parameters, self.clustered)

    @property
    def _clustered(self) -> int:
        return int(self.clustered[0])

    def _weights(self, layer: int, cache: LayerCache) -> Tensor:
        """True attention weights, float64 [steps, KV heads, group, context]."""
        grouped = group(self.captured.queries[layer], cache.kv_heads)
        keys = cache.keys[: self.context.longest].float().transpose(0, 1)
        scores = (grouped @ keys.mT).double() * self.captured.scale
        return scores.masked_fill(~self.context.inside[:, None, None], -torch.inf).softmax(-1)

    def _masks(self, step: TacticStep, taken: Tensor, layer: int, weights: Tensor, p: float) -> dict[str, Tensor]:
        """Which tokens each way of choosing takes, bool [steps, KV heads, group, context]; Tactic takes ``taken``."""
        places = torch.arange(weights.shape[-1], device=weights.device)
        kept = (places >= self.clustered[:, None]) & self.context.inside
        kept = kept[:, None, None].expand(weights.shape)
        before = (weights * kept).sum(-1)

        by_weight = weights.sort(dim=-1, descending=True)
        best = leading(by_weight.values, torch.zeros_like(before), p)

        numbers = self._cluster_of(step, layer)[:, :, None].expand(*weights.shape[:3], -1)
        in_span = weights[..., : numbers.shape[-1]]
        mass = weights.new_zeros(taken.shape).scatter_add_(-1, numbers, in_span)
        by_mass = mass.sort(dim=-1, descending=True)
        needed = leading(by_mass.values, before, p)
        whole = torch.zeros_like(needed).scatter_(-1, by_mass.indices, needed)

        def and_kept(clusters: Tensor) -> Tensor:
            tokens = torch.zeros_like(kept)
            tokens[..., : numbers.shape[-1]] = clusters.gather(-1, numbers)
            return kept | tokens

        return {
            "optimal": torch.zeros_like(kept).scatter(-1, by_weight.indices, best),
            "cluster_optimal": and_kept(whole),
            "tactic": and_kept(taken),
        }

    def _cluster_of(self, step: TacticStep, layer: int) -> Tensor:
        """The cluster of each clustered position, int64 [steps, KV heads, clustered]."""
        sizes = self.index.read(layer, step.spans).sizes.transpose(0, 1).long()[0]
        total = self._clustered
        numbers = torch.arange(sizes.shape[-1], device=sizes.device)
        of_head = torch.stack([numbers.repeat_interleave(head, output_size=total) for head in sizes])
        ends = sizes.cumsum(-1)
        ranks = torch.arange(total, device=sizes.device) - (ends - sizes).gather(-1, of_head)
        shape = (self.captured.steps, *of_head.shape)
        positions = self.index.members(layer, step.spans, of_head.expand(shape), ranks.expand(shape))
        return torch.zeros_like(positions).scatter_(-1, positions, of_head.expand(shape))
