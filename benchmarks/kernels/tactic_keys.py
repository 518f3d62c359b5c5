"""Keys and queries whose attention is as sparse as Tactic found it in Llama-3.1-8B (Zhu et al., Table 3, 32K tokens).

    python -m benchmarks.kernels.tactic_keys --length 32768 --kv-heads 2

Random Gaussian keys have no clusters and diffuse attention, which no policy can do anything with. Here each KV head
knows 1,024 topics, each a direction of its own. A block of 1,024 tokens is about 64 of them, drawn anew for each block,
some more often than others; a token's key is its topic's direction and noise. So keys lie in clusters, a topic comes
back in several places of the context, and the longer the context, the more tokens each topic has.

A query scores 32 topics: the first 12 and the last 4, where the others score 0 on average, falling steeply first
(score = 12 - 8 (rank / 31)^0.42). It is the shortest vector that does so; what it scores the other topics comes from 32
directions not being orthogonal to 1,024 others. The query heads of a group have ``shared`` of their 32 topics in
common, at the same ranks, and the others each for itself. That sets how different they are: with 29 the union is more
than twice what one head reads. The noise moves scores by 0.72: whole clusters cost up to twice what the best tokens do.

At last all queries are multiplied by one number, such that a query head needs 212 tokens in 32K for a share of 0.7, on
average: Table 3's "Optimal", in proportion to the context (Table 9: from 16K to 96K the share of tokens hardly moves).
The other shares follow; the command prints how well. Which ``p`` makes a KV head read a given share of its context
(3, 5, 12 %), ``p_for_union`` finds out with the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.kernels.tactic_choices import PAGE_SIZE, SHARES, Captured, PromptTables, Sums
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.clusters import SPAN
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep

OPTIMAL = {0.5: 71, 0.6: 122, 0.7: 212, 0.8: 394, 0.9: 895}
"""Table 3: the fewest tokens of 32K that hold each share of the attention mass, per query head."""
TABLE_LENGTH = 32_768
SHARED = 29
UNIONS = (0.03, 0.05, 0.12)

_TOPICS = 1024
_BLOCK = 1024
_TOPICS_OF_BLOCK = 64
_RELEVANT = 32
_HIGHEST, _LOWEST, _STEEPNESS = 12.0, 4.0, 0.42
_NOISE = 0.72
_CALIBRATED_SHARE = 0.7
_ROUNDS = 20


@dataclass(frozen=True)
class TacticKeys:
    """One layer's keys of a context, and queries that look for different things in it.

    Attributes:
        keys: [tokens, KV heads, head dim].
        queries: [queries, query heads, head dim]; of the same dtype.
        scale: of the scores: head dim^-½.
    """

    keys: Tensor
    queries: Tensor
    scale: float


def make_keys(
    tokens: int,
    queries: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    *,
    shared: int = SHARED,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> TacticKeys:
    """Make the keys of ``tokens`` tokens and some queries; the same on the same device for the same ``seed``.

    Args:
        tokens: in the context; any number, 128K and more.
        queries: decode steps that look at it.
        kv_heads: KV heads, each with topics of its own.
        group: query heads of a KV head.
        head_dim: at least 64.
        shared: topics out of 32 that all query heads of a group look for; the fewer, the larger their union.
        seed: of everything that is drawn.
        device: where it is made.
        dtype: of keys and queries.

    Raises:
        ValueError: ``head_dim`` or ``shared`` is out of bounds.
    """
    if head_dim < 2 * _RELEVANT:
        raise ValueError(f"head_dim: must be at least {2 * _RELEVANT}; it is {head_dim}")
    if not 0 <= shared <= _RELEVANT:
        raise ValueError(f"shared: must lie between 0 and {_RELEVANT}; it is {shared}")
    generator = torch.Generator(device).manual_seed(seed)
    directions = torch.randn(kv_heads, _TOPICS, head_dim, generator=generator, device=device)
    directions = torch.nn.functional.normalize(directions, dim=-1)
    looking = _make_queries(directions, queries, group, shared, generator)
    keys = directions.gather(1, _topics_of(tokens, kv_heads, generator)[..., None].expand(-1, -1, head_dim))
    noise = _NOISE / looking.norm(dim=-1).mean()
    keys += noise * torch.randn(keys.shape, generator=generator, device=device)
    looking *= _temperature(keys, looking)
    keys *= head_dim**0.5
    return TacticKeys(
        keys.transpose(0, 1).to(dtype).contiguous(), looking.transpose(0, 1).flatten(1, 2).to(dtype), head_dim**-0.5
    )


def p_for_union(made: TacticKeys, union: float, span: int = SPAN, tolerance: float = 0.02) -> float:
    """Return the ``p`` for which a KV head reads the share ``union`` of its context, on average over queries.

    Args:
        made: what ``make_keys`` returned.
        union: above the share of the tokens in no cluster, at most 0.5.
        span: of the index.
        tolerance: relative; what is left of it after 20 halvings is as near as ``p`` comes.
    """
    tables = PromptTables(_captured(made), span)
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        p = (low + high) / 2
        reached = union_of(tables, p)
        if abs(reached - union) <= tolerance * union:
            break
        low, high = (p, high) if reached < union else (low, p)
    return p


def union_of(tables: PromptTables, p: float) -> float:
    """Return the share of the context that a KV head reads with ``p``, as the reference selects."""
    captured = tables.captured
    parameters = [Tactic(p=p, full_layers=0, sinks=0)] * captured.steps
    step = TacticStep(tables.context, captured.scale, None, tables.index, parameters, tables.clustered)
    queries = captured.queries[0]
    selection = step.select(0, queries, captured.caches[0], Meter(captured.steps, queries.device))
    return float(selection.counts.sum() / (tables.context.lengths.sum() * selection.counts.shape[1]))


def tables_of(made: TacticKeys, span: int = SPAN) -> PromptTables:
    """Return the tables of Tactic over ``made``."""
    return PromptTables(_captured(made), span)


def table_of(tables: PromptTables, p: float) -> dict[str, dict[str, float]]:
    """Return tokens per query head, and of the union per KV head, of each way of choosing, for a share of ``p``."""
    sums = Sums()
    tables.add(p, sums)
    kv_heads = tables.captured.caches[0].kv_heads * tables.captured.steps
    return {
        "head": {name: count / sums.heads for name, count in sums.tokens.items()},
        "union": {name: count / kv_heads for name, count in sums.union.items()},
    }


def _topics_of(tokens: int, kv_heads: int, generator: torch.Generator) -> Tensor:
    """Draw the topic of each token, int64 [KV heads, tokens]."""
    device, blocks = generator.device, -(-tokens // _BLOCK)
    shape = (kv_heads * blocks, _TOPICS)
    topics = torch.rand(shape, generator=generator, device=device).topk(_TOPICS_OF_BLOCK, dim=-1).indices
    popularity = 0.1 + torch.rand(topics.shape, generator=generator, device=device)
    drawn = torch.multinomial(popularity, _BLOCK, replacement=True, generator=generator)
    return topics.gather(1, drawn).view(kv_heads, -1)[:, :tokens]


def _make_queries(directions: Tensor, queries: int, group: int, shared: int, generator: torch.Generator) -> Tensor:
    """Return the queries, [KV heads, queries, group, head dim], that score their topics as wanted."""
    kv_heads, topics, _ = directions.shape
    device = directions.device
    of_group = torch.rand(kv_heads, queries, 1, topics, generator=generator, device=device)
    of_head = torch.rand(kv_heads, queries, group, topics, generator=generator, device=device)
    common = of_group.topk(shared, dim=-1).indices.expand(-1, -1, group, -1)
    own = of_head.scatter(-1, common, -1.0).topk(_RELEVANT - shared, dim=-1).indices
    relevant = torch.cat([common, own], -1)
    # Ranks are dealt out once for a group: what its heads share they score alike.
    ranks = torch.rand(kv_heads, queries, 1, _RELEVANT, generator=generator, device=device).argsort(-1)
    wanted = _HIGHEST - (_HIGHEST - _LOWEST) * (ranks / (_RELEVANT - 1)) ** _STEEPNESS
    heads = torch.arange(kv_heads, device=device)[:, None, None, None]
    of_relevant = directions[heads, relevant]
    weights = torch.linalg.solve(of_relevant @ of_relevant.mT, wanted.expand(relevant.shape)[..., None])
    found: Tensor = (of_relevant * weights).sum(-2)
    return found


def _temperature(keys: Tensor, queries: Tensor) -> float:
    """Return by how much to multiply the queries so that they need as many tokens as Table 3 says."""
    kv_heads, tokens, _ = keys.shape
    scores = torch.cat(
        [(queries[head].flatten(0, 1) @ keys[head].mT).sort(dim=-1, descending=True).values for head in range(kv_heads)]
    )
    target = OPTIMAL[_CALIBRATED_SHARE] * tokens / TABLE_LENGTH
    low, high = 0.25, 4.0
    for _ in range(_ROUNDS):
        factor = float((low * high) ** 0.5)
        held = (factor * scores).softmax(-1).cumsum(-1)
        needed = float((held < _CALIBRATED_SHARE).sum(-1).double().mean()) + 1
        low, high = (factor, high) if needed > target else (low, factor)
    return factor


def _captured(made: TacticKeys) -> Captured:
    """Return ``made`` as the inputs of an attention layer whose last tokens are decoded, one for each query."""
    steps = made.queries.shape[0]
    keys = torch.nn.functional.pad(made.keys, (0, 0, 0, 0, 0, -made.keys.shape[0] % PAGE_SIZE))
    cache = LayerCache(keys, torch.zeros_like(keys))
    return Captured(made.keys.shape[0] - steps, [made.queries], [cache], made.scale)


def main(
    length: Annotated[int, typer.Option(help="Tokens of context.")] = TABLE_LENGTH,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 1,
    group: Annotated[int, typer.Option(help="Query heads of a KV head.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Elements of a key.")] = 128,
    queries: Annotated[int, typer.Option(help="Decode steps.")] = 8,
    shared: Annotated[int, typer.Option(help="Topics of 32 that the heads of a group share.")] = SHARED,
    seed: Annotated[int, typer.Option(help="Same seed, same keys.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Print what the generator reaches of Tactic's Table 3."""
    made = make_keys(
        length + queries,
        queries,
        kv_heads,
        group,
        head_dim,
        shared=shared,
        seed=seed,
        device=device,
        dtype=torch.float32,
    )
    tables = tables_of(made)
    typer.echo(
        "   p  Table 3 optimal  ratio  cluster optimal  ratio  tactic | union: tactic  % of context  ratio to head"
    )
    for p in SHARES:
        table = table_of(tables, p)
        head, union = table["head"], table["union"]
        asked, optimal, whole_clusters = OPTIMAL[p] * length / TABLE_LENGTH, head["optimal"], head["cluster_optimal"]
        typer.echo(
            f"{p:4.2f}  {asked:7.0f}  {optimal:7.0f}  {optimal / asked:5.2f}"
            f"  {whole_clusters:15.0f}  {whole_clusters / optimal:5.2f}  {head['tactic']:6.0f}"
            f" | {union['tactic']:13.0f}  {100 * union['tactic'] / length:12.1f}"
            f"  {union['tactic'] / head['tactic']:13.2f}"
        )
    for share in UNIONS:
        typer.echo(f"union of {100 * share:.0f} %: p = {p_for_union(made, share):.3f}")


if __name__ == "__main__":
    typer.run(main)
