"""What the kernels of ``selection`` take, and what they hand on to each other from launch to launch."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, ReportedShares
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.cluster_tables import LayerClusters, Tables
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.kernel_arguments import Constant, Number, Pointer, Rows, Vectors
from winnow_kernels.policies.tactic.reference import COMPARED, SHARE_STEPS

TAIL_SPLITS: Final = 2
"""Programs among which the tokens in no cluster are dealt out, of a row and KV head."""
SCORED: Final = COMPARED
"""Clusters of a row that are scored together: those of a span."""
WINDOW: Final = 1024
"""Neighbouring steps whose tokens are counted apart from each other: a power of two."""
SLICE: Final = 128
"""Clusters of a row that are listed together for a KV head."""
RUN: Final = 64
"""Listed clusters of a row and KV head that are put in order among themselves, and then among the others."""
KEPT_BLOCK: Final = CLUSTER_SIZE
"""Tokens in no cluster that are put in order together."""

_LOG2_E: Final = 1.4426950408889634


class TacticBatch(NamedTuple):
    """The parameters of a batch's rows.

    Attributes:
        entries: int32 [rows, spans]; index entries of the row's usable spans, first that in which its sinks end.
            Beyond them any.
        clustered: int32 [rows]; where what these spans cover ends, less than the row's length; without spans, 0 up to
            ``sinks``. What comes behind it is always attended to.
        sinks: int32 [rows]; first tokens that are in no cluster and always attended to.
        p: float64 [rows]; share of the attention mass, 0 for a row of another kind.
        caps: int32 [rows]; cap on the union of each KV head, 0 for none.
        by_priority: int32 [rows]; not 0 where tokens must come in order, as early termination needs them.
    """

    entries: Tensor
    clustered: Tensor
    sinks: Tensor
    p: Tensor
    caps: Tensor
    by_priority: Tensor

    @classmethod
    def empty(cls, rows: int, spans: int, device: torch.device) -> TacticBatch:
        """Return the parameters of ``rows`` rows of other kinds, with room for ``spans`` spans each."""
        clustered, sinks, caps, by_priority = torch.zeros(4, rows, dtype=torch.int32, device=device)
        entries = torch.zeros(rows, spans, dtype=torch.int32, device=device)
        return cls(entries, clustered, sinks, torch.zeros(rows, dtype=torch.float64, device=device), caps, by_priority)


class Entries(NamedTuple):
    """``TacticBatch.entries``."""

    pointer: Pointer
    row_stride: Number


class Contexts(NamedTuple):
    """A batch's rows: where their contexts lie, what is asked of each, and the clusters of their keys.

    It holds tuples alone: beside anything else Triton's compiler would lose the constants that are in them.
    """

    rows: Rows
    asked: TacticBatch
    entries: Entries
    tables: Tables

    @classmethod
    def of(cls, batch: DecodeBatch, asked: TacticBatch, clusters: LayerClusters) -> Contexts:
        """Return those of ``batch``."""
        return cls(Rows.of(batch), asked, Entries(asked.entries, asked.entries.stride(0)), Tables.of(clusters))


class Attention(NamedTuple):
    """A layer's queries and keys.

    Scores, to base 2, are their products times ``scale_log2``; they vary over keys by the keys' spread times the
    queries' squares, as the spread's directions weigh them, times ``scale_of_squares``. ``cap_log2`` then bounds them;
    None for no cap.
    """

    queries: Vectors
    keys: Vectors
    scale_log2: Number
    scale_of_squares: Number
    cap_log2: Number | None

    @classmethod
    def of(cls, queries: Tensor, cache: LayerCache, scale: float) -> Attention:
        """Return those of ``queries``, strided by row and head, over ``cache``."""
        return cls(
            Vectors.of(queries),
            Vectors.of(cache.keys),
            scale * _LOG2_E,
            scale**2 / cache.head_dim,
            cache.softmax.cap_log2,
        )


class Scored(NamedTuple):
    """The clusters of each row, by number.

    Attributes:
        steps: int16 [rows, query heads, clusters]; predicted scores, in eighths of an octave.
        highest: int32 [rows, query heads, clusters / SCORED]; the highest step of each tile's clusters.
        tokens: int32 [rows, query heads, WINDOW]; how many tokens clusters of a step have, at the step modulo WINDOW.
            All 0 between selections.
        clusters: how many a row can have.
    """

    steps: Pointer
    highest: Pointer
    tokens: Pointer
    clusters: Constant


class Kept(NamedTuple):
    """The tokens in no cluster, by blocks of KEPT_BLOCK tokens from the newest back.

    Attributes:
        tails: float32 [rows, query heads, TAIL_SPLITS, 2]; of all of them: the largest score, and the sum of the
            weights relative to it.
        weights: float32 [rows, query heads, blocks]; of each block the logarithm (base 2) of the mean weight. This and
            what follows only where the order matters.
        placed: int32 [rows, KV heads, 2]; how many tokens in no cluster are put in order, 0 where the order does
            not matter, and how many tokens of clusters are.
        steps: int32 [rows, KV heads, blocks]; the step of the share that a token of a block has on average.
        sums: int32 [rows, KV heads, SHARE_STEPS]; tokens of blocks in a step or an earlier one.
        targets: int32 [rows, KV heads, blocks]; how many tokens come before a block, those of clusters included.
        blocks: how many a row can have.
    """

    tails: Pointer
    weights: Pointer
    placed: Pointer
    steps: Pointer
    sums: Pointer
    targets: Pointer
    blocks: Number


class Cuts(NamedTuple):
    """What each query head takes.

    Attributes:
        cuts: int32 [rows, query heads]; the lowest step of the clusters that it takes.
        totals: float64 [rows, query heads]; logarithm (base 2) of the mass of all tokens.
        lost: float32 [rows, query heads]; share of the mass that a cap cuts off.
    """

    cuts: Pointer
    totals: Pointer
    lost: Pointer


class Outside(NamedTuple):
    """What is not selected, and what is sampled of it.

    Attributes:
        shares: float32 [rows, query heads, clusters / SLICE, 3]; of each slice the predicted share of the mass of its
            clusters, what the sampled tokens weigh, and what they were predicted to weigh, as shares of the mass.
    """

    shares: Pointer


class Listed(NamedTuple):
    """Clusters of which something is taken. Those of a slice lie, by number, at the front of its part of a row.

    Attributes:
        totals: int32 [rows, KV heads, clusters / SLICE]; of each slice of a row's clusters how many are listed, and how
            many tokens are taken: ``counted`` sums.
        numbers: int32 [rows, KV heads, clusters].
        firsts: int32, same shape; where in a head's offsets their members begin.
        starts: int32, same shape; how many tokens the clusters before them in the slice bring.
        needed: int32, same shape; how many members they have.
        steps: int32, same shape; in which step of the order they are. Only where the order matters.
    """

    totals: Pointer
    numbers: Pointer
    firsts: Pointer
    starts: Pointer
    needed: Pointer
    steps: Pointer


class Ordered(NamedTuple):
    """The order of the listed clusters, where it matters.

    Attributes:
        placed: int32 [rows, KV heads]; how many clusters are listed, 0 where the order does not matter.
        steps: int32 [rows, KV heads, clusters]; of these, without gaps between slices, their step, and SHARE_STEPS
            times where they lie in the lists.
        sums: int32 [rows, KV heads, clusters / RUN, SHARE_STEPS]; how many tokens are taken of the clusters of
            each run that are in a step or an earlier one.
        places: int32 [rows, KV heads, clusters], as in the lists; how many tokens come before (at first: of the run).
        targets: int32, same shape; as ``places``, with the tokens in no cluster that come before.
    """

    placed: Pointer
    steps: Pointer
    sums: Pointer
    places: Pointer
    targets: Pointer


class TacticStatistics(NamedTuple):
    """What is believed of a layer's selections, and what is known of those of the layers so far in a step.

    Attributes:
        reported: beliefs of this layer; ``attend`` adds up shares. ``TacticStep.estimated_share`` is their mean over
            query heads.
        capped: int32 [rows]; not 0 where a cap has cut a selection. Whoever begins a step sets it to 0.
    """

    reported: ReportedShares
    capped: Tensor

    @classmethod
    def empty(cls, rows: int, query_heads: int, device: torch.device) -> TacticStatistics:
        return cls(ReportedShares.empty(rows, query_heads, device), torch.zeros(rows, dtype=torch.int32, device=device))


class TacticWorkspace(NamedTuple):
    """What is handed on from launch to launch, for one layer at a time.

    For a row of 128K tokens with 32 query and 8 KV heads 4.4 MiB: 2 bytes a cluster and query head, 36 a cluster and KV
    head, 4 KiB a query head, and a third of all for the tokens in no cluster.
    """

    scored: Scored
    kept: Kept
    cuts: Cuts
    outside: Outside
    listed: Listed
    ordered: Ordered

    @classmethod
    def empty(
        cls, rows: int, query_heads: int, kv_heads: int, spans: int, span: int, device: torch.device
    ) -> TacticWorkspace:
        """Return space for ``rows`` rows with at most ``spans`` spans of ``span`` tokens each."""
        clusters = block_of(spans * span // CLUSTER_SIZE)
        # A context may end within the span behind the last.
        blocks = (spans + 1) * span // KEPT_BLOCK

        def of_heads(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, query_heads, *shape, dtype=dtype, device=device)

        def of_kv(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, kv_heads, *shape, dtype=dtype, device=device)

        def floats(*shape: int) -> Tensor:
            return of_heads(*shape, dtype=torch.float32)

        return cls(
            Scored(
                of_heads(clusters, dtype=torch.int16),
                of_heads(clusters // SCORED),
                of_heads(WINDOW),
                tl.constexpr(clusters),
            ),
            Kept(
                floats(TAIL_SPLITS, 2),
                floats(blocks),
                of_kv(2),
                of_kv(blocks),
                of_kv(SHARE_STEPS),
                of_kv(blocks),
                blocks,
            ),
            Cuts(of_heads(), of_heads(dtype=torch.float64), floats()),
            Outside(floats(clusters // SLICE, 3)),
            Listed(of_kv(clusters // SLICE), *(of_kv(clusters) for _ in range(5))),
            Ordered(of_kv(), of_kv(clusters), of_kv(clusters // RUN, SHARE_STEPS), of_kv(clusters), of_kv(clusters)),
        )

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(field.nbytes for part in self for field in part if isinstance(field, Tensor))


def block_of(clusters: int) -> int:
    """Return how many clusters a program that looks at all of a row holds: a power of two."""
    return max(128, triton.next_power_of_2(clusters))
