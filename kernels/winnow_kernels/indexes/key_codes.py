"""Every key a second time, in few bits: enough to predict its score, for a thirteenth of a 16-bit cache's bytes.

A block of 16 neighbouring tokens shares its mean key, rounded to 4 bits a channel. What a key differs from it by,
rotated by one fixed orthogonal matrix, is rounded to ``bits`` bits a channel. A float16 factor a token makes the
estimated score unbiased: with the residual r and its code c it is |r|² ÷ ⟨r, c⟩ (Gao and Long, "RaBitQ: Quantizing
High-Dimensional Vectors with a Theoretical Error Bound for Approximate Nearest Neighbor Search", arXiv 2405.12497,
section 3.2). Rotated, a residual has no outlying channels, whatever the model, so that one step serves all channels.

Blocks of 16 are as good as blocks of 64 with a full mean (``benchmarks/NOTES.md``), and 16 tokens are a page: an entry
depends on nothing but its page, so requests that share a page share its entry.

What a block has lies in one piece: what a GPU reads of it are whole sectors, and one copy brings it. The mean's factor,
float16 like those of the tokens, needs no place of its own: its bits are the signs of theirs, which are never negative.

Queries are rotated, scaled and rounded to 8 bits. So a score is two products of small integers and two factors, the
same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Final, NamedTuple, Self

import torch
import triton
from torch import Tensor

from winnow_kernels.attend.dense import take
from winnow_kernels.cache import LayerCache, widened_dtype
from winnow_kernels.indexes.gpu_builds import Entries
from winnow_kernels.indexes.gpu_key_codes import Codes, entries_of
from winnow_kernels.indexes.pages import DevicePageIndex, PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import DEFAULT, KEY_BITS, IndexSettings

BLOCK: Final = 16
"""Tokens that share a mean: no more than the smallest page has."""
BITS: Final = KEY_BITS
"""Bits that a channel of a key can have."""
DEFAULT_BITS: Final = DEFAULT.key_bits
MEAN_BITS: Final = 4
# So many fill bytes at 3 bits, the lowest of which are packed apart.
_CHANNELS: Final = 8
# What a GPU reads at least.
_SECTOR_BYTES: Final = 32
QUERY_LEVELS: Final = 127
_FACTOR_BYTES: Final = torch.float16.itemsize
# The steps that lose least of a number that is normally distributed with a variance of 1.
_STEPS: Final = {2: 0.9957, 3: 0.5860, 4: 0.3352}
_LOG2_E: Final = 1.4426950408889634
_TINY: Final = torch.finfo(torch.float32).tiny
_CPU: Final = torch.device("cpu")
_MAX_FACTOR: Final = torch.finfo(torch.float16).max


@cache
def rotation(head_dim: int, device: torch.device = _CPU) -> Tensor:
    """Return what keys and queries are multiplied with: float32 [head dim, head dim], rows of length √head dim.

    A Hadamard matrix where Sylvester's construction has one, of which half precision holds every number; a cosine
    transform where not. Both with random signs.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (head_dim,), generator=generator).double() * 2 - 1
    if is_hadamard(head_dim):
        basis = torch.ones(1, 1, dtype=torch.float64)
        while len(basis) < head_dim:
            basis = torch.cat((torch.cat((basis, basis), 1), torch.cat((basis, -basis), 1)))
    else:
        row, column = torch.arange(head_dim).double()[:, None], torch.arange(head_dim).double()
        basis = torch.cos(math.pi / head_dim * (column + 0.5) * row) * math.sqrt(2)
        basis[0] = 1
    return (basis * signs).float().to(device)


def is_hadamard(head_dim: int) -> bool:
    """Return whether the rotation consists of 1 and −1."""
    return head_dim & (head_dim - 1) == 0


class BlockLayout(NamedTuple):
    """Where in a block's piece, in bytes, what it has begins; codes are first.

    Attributes:
        means: the mean's codes.
        factors: of the tokens.
        end: of what it has.
        size: of the piece.
    """

    means: int
    factors: int
    end: int
    size: int

    @classmethod
    def of(cls, head_dim: int, bits: int) -> Self:
        """Return that of a head's blocks."""
        means = BLOCK * head_dim * bits // 8
        factors = means + head_dim * MEAN_BITS // 8
        end = factors + BLOCK * _FACTOR_BYTES
        return cls(means, factors, end, -(-end // _SECTOR_BYTES) * _SECTOR_BYTES)


def bytes_of_key(head_dim: int, bits: int) -> float:
    """Return the bytes of one key of one head, with its part of what its block has."""
    return BlockLayout.of(head_dim, bits).size / BLOCK


@dataclass(frozen=True, eq=False)
class RoundedQueries:
    """Queries as they score codes.

    Attributes:
        levels: int8 [..., head dim], −127 … 127, rotated.
        steps: float32 [...]; what one level is worth, in units of a score's logarithm to base 2.
    """

    levels: Tensor
    steps: Tensor

    @classmethod
    def of(cls, queries: Tensor, scale: float) -> RoundedQueries:
        """Round ``queries``, [..., head dim], whose scores are multiplied by ``scale``."""
        rotated = queries.float() @ rotation(queries.shape[-1], queries.device).T
        steps = rotated.abs().amax(-1) / QUERY_LEVELS
        levels = (rotated / steps.clamp_min(_TINY)[..., None] + 0.5).floor()
        return cls(levels.to(torch.int8), steps * (scale * _LOG2_E / queries.shape[-1]))


def rounded(vectors: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round vectors to ``bits`` bits a channel.

    Args:
        vectors: float32 [..., head dim], rotated.
        bits: of a channel.

    Returns:
        Their values, odd numbers between −2^bits and 2^bits, float32 [..., head dim]; and float32 [..., 1], the factors
        |v|² ÷ ⟨v, values⟩, with which a product with them is that with the vector, on average; 0 for a vector of zeros.
    """
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    steps = norms * (_STEPS[bits] / math.sqrt(vectors.shape[-1]))
    half = 2 ** (bits - 1)
    codes = (vectors / steps.clamp_min(_TINY)).floor().clamp(-half, half - 1)
    values = codes * 2 + 1
    return values, norms.square() / (vectors * values).sum(-1, keepdim=True).clamp_min(_TINY)


@cache
def length_of_factor(bits: int) -> float:
    """Return how long a vector is, nearly, over its code's factor: E[x · code of x], x normally distributed."""
    densities = [math.exp(-((_STEPS[bits] * step) ** 2) / 2) for step in range(1, 2 ** (bits - 1))]
    return 2 * (1 + 2 * math.fsum(densities)) / math.sqrt(2 * math.pi)


def _narrow(factors: Tensor) -> Tensor:
    return factors.clamp_max(_MAX_FACTOR).half()


def packed(values: Tensor, bits: int) -> Tensor:
    """Return odd numbers between −2^bits and 2^bits, [..., n], as uint8 [..., n × bits ÷ 8]; the first lie lowest.

    Three bits are packed as the two higher ones of all numbers, and then the lowest.
    """
    codes = (values.to(torch.int32) + (2**bits - 1)) // 2
    if bits == 3:
        return torch.cat((_packed(codes // 2, 2), _packed(codes % 2, 1)), dim=-1)
    return _packed(codes, bits)


def _packed(codes: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (codes.unflatten(-1, (-1, 8 // bits)) << shifts).sum(-1).to(torch.uint8)


def products(levels: Tensor, packs: Tensor, bits: int) -> Tensor:
    """Return the products of queries with packed numbers, in integers up to the end: exact, and the same everywhere.

    Args:
        levels: int8 [..., KV heads, group, n].
        packs: uint8 [..., KV heads, tokens, n × bits ÷ 8], of odd numbers (``packed``).
        bits: of each.

    Returns:
        float32 [..., KV heads, group, tokens].
    """
    sums = levels.sum(-1, keepdim=True, dtype=torch.int32)
    return _integer_products(levels, _codes(packs, bits)).mul_(2).sub_(sums * (2**bits - 1)).float()


def _integer_products(rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows · columnsᵀ of int8 [..., m, k] and [..., n, k], the columns' from 0 to 15: int32 [..., m, n]."""
    if rows.device.type != "cpu":
        # Sums below 2^24 are exact in float32.
        return (rows.float() @ columns.float().mT).int()
    # What has rows on the left stays exact where a CPU adds up products of bytes in 16 bits.
    of_heads = zip(rows.flatten(0, -3), columns.flatten(0, -3), strict=True)
    return torch.stack([torch._int_mm(own, of_head.T) for own, of_head in of_heads]).unflatten(0, rows.shape[:-2])  # noqa: SLF001


def _codes(packs: Tensor, bits: int) -> Tensor:
    """Return what lies in bytes, numbers from 0 on: int8 [..., n]."""
    if bits == 3:
        higher = packs.shape[-1] * 2 // 3
        return _codes(packs[..., :higher], 2).mul_(2).add_(_codes(packs[..., higher:], 1))
    words = _words_of_bytes(bits, packs.device)
    # One number for each byte is several times as fast as so many.
    of_bytes = words.index_select(0, packs.flatten().int())
    return of_bytes.view(torch.int8).view(*packs.shape[:-1], packs.shape[-1] * 8 // bits)


@cache
def _words_of_bytes(bits: int, device: torch.device) -> Tensor:
    """Return what lies in every byte, 8 ÷ ``bits`` numbers of 8 bits, as one integer: int16, int32 or int64 [256]."""
    numbers = (torch.arange(256)[:, None] >> torch.arange(0, 8, bits)) & (2**bits - 1)
    return numbers.to(torch.int8).view({1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]).flatten().to(device)


def signed_by(factors: Tensor, of_means: Tensor) -> Tensor:
    """Return factors of tokens whose signs are the bits of those of their blocks' means, the first one's the lowest.

    Args:
        factors: float16 [..., 16], not negative.
        of_means: float16 [...], not negative.
    """
    bits = of_means.view(torch.int16)[..., None] >> torch.arange(BLOCK, device=factors.device) & 1
    return torch.where(bits > 0, -factors, factors)


def factors_of_means(signed: Tensor) -> Tensor:
    """Return what ``signed_by`` has written as the signs of float16 [..., 16]: float32 [...]."""
    bits = signed.signbit().to(torch.int16) << torch.arange(BLOCK, dtype=torch.int16, device=signed.device)
    return bits.sum(-1, dtype=torch.int16).view(torch.float16).float()


class _Misfit(NamedTuple):
    """A ``size`` that there are no codes for, of the ``field`` that must be a multiple of ``unit``."""

    field: str
    size: int
    unit: int
    told: str


def _misfit(head_dim: int, page_size: int) -> _Misfit | None:
    sizes = (
        _Misfit("page_size", page_size, BLOCK, f"pages of {page_size} tokens"),
        _Misfit("head_dim", head_dim, _CHANNELS, f"heads of {head_dim} numbers"),
    )
    return next((own for own in sizes if own.size % own.unit), None)


class KeyCodes(DevicePageIndex):
    """Codes of the keys of complete pages.

    Attributes:
        bits: of a channel of a key.
        layout: of a block's piece.
        pieces: uint8 [layers, blocks of the pool, KV heads, bytes]; what follows are parts of it.
        codes: uint8 [layers, blocks of the pool, KV heads, 16, head dim × bits ÷ 8].
        factors: float16 [layers, blocks, KV heads, 16], ``signed_by`` those of the means.
        means: uint8 [layers, blocks, KV heads, head dim ÷ 2].
    """

    name: ClassVar[str] = "key codes"

    def __init__(
        self,
        caches: Sequence[LayerCache],
        generations: PageGenerations,
        in_triton: bool | None = None,
        bits: int = DEFAULT_BITS,
    ) -> None:
        """Allocate codes of ``bits`` bits a channel; other arguments as in ``DevicePageIndex``.

        Raises:
            ValueError: there are no codes of so many bits, or for such heads or pages.
        """
        super().__init__(caches, generations, in_triton)
        shape, device = self.shape, self.built.device
        if bits not in BITS:
            raise ValueError(f"bits: must be one of {BITS}; it is {bits}")
        if (misfit := _misfit(shape.head_dim, generations.page_size)) is not None:
            raise ValueError(f"{misfit.field}: must be a multiple of {misfit.unit}; it is {misfit.size}")
        self.bits = bits
        blocks = (shape.layers, len(generations.counts) * generations.page_size // BLOCK, shape.kv_heads)
        self.layout = BlockLayout.of(shape.head_dim, bits)
        means, factors, end, size = self.layout
        self.pieces = torch.zeros(*blocks, size, dtype=torch.uint8, device=device)
        self.codes = self.pieces[..., :means].unflatten(-1, (BLOCK, -1))
        self.means = self.pieces[..., means : means + shape.head_dim * MEAN_BITS // 8]
        self.factors = self.pieces[..., factors:end].view(torch.float16)

    @classmethod
    def for_server(cls, caches: Sequence[LayerCache], generations: PageGenerations, settings: IndexSettings) -> Self:
        """Return the index of a server."""
        return cls(caches, generations, bits=settings.key_bits)

    @classmethod
    def bytes_per_slot(cls, shape: PoolShape, page_size: int, settings: IndexSettings = DEFAULT) -> float:
        """Return what the index adds to a slot of the pool."""
        return shape.heads * bytes_of_key(shape.head_dim, settings.key_bits) + cls.BYTES_PER_PAGE / page_size

    @classmethod
    def unfit(cls, head_dim: int, page_size: int) -> str | None:
        """Return what of a server the index cannot be made for; None if it can."""
        misfit = _misfit(head_dim, page_size)
        return None if misfit is None else misfit.told

    def build(self, layer: int, cache: LayerCache, pages: Tensor) -> None:
        turn = rotation(self.shape.head_dim, pages.device)
        keys = self.page_keys(cache, pages).float().unflatten(1, (-1, BLOCK)).flatten(0, 1).transpose(1, 2) @ turn.T
        blocks = self.blocks_of(pages)
        values, factors = rounded(keys.mean(2), MEAN_BITS)
        self.means[layer][blocks] = packed(values, MEAN_BITS)
        of_means = _narrow(factors)
        # What rounding the mean loses is the residuals' to keep.
        values, factors = rounded(keys - (values * of_means.float())[:, :, None], self.bits)
        self.codes[layer][blocks] = packed(values, self.bits)
        self.factors[layer][blocks] = signed_by(_narrow(factors)[..., 0], of_means[..., 0])

    def blocks_of(self, pages: Tensor) -> Tensor:
        """Return the blocks of ``pages``, int64 [..., n], in their order."""
        of_page = self.generations.page_size // BLOCK
        return (pages[..., None] * of_page + torch.arange(of_page, device=pages.device)).flatten(-2)

    def scores(self, layer: int, queries: RoundedQueries, blocks: slice | Tensor) -> Tensor:
        """Return what the tokens of ``blocks`` are predicted to score, to base 2.

        Args:
            layer: the layer's number.
            queries: [..., KV heads, group, head dim].
            blocks: int64 [..., n]; or, of one request, a span of n (``dense.span_of``).

        Returns:
            float32 [..., KV heads, group, n × 16].
        """
        means = products(queries.levels, take(self.means[layer], blocks).transpose(-3, -2), MEAN_BITS)
        factors = take(self.factors[layer], blocks)
        means *= factors_of_means(factors).mT[..., None, :]
        codes = take(self.codes[layer], blocks).transpose(-4, -3)
        scores = products(queries.levels, codes.flatten(-3, -2), self.bits).unflatten(-1, (-1, BLOCK))
        scores *= factors.transpose(-3, -2).float().abs_()[..., None, :, :]
        scores += means[..., None]
        return scores.flatten(-2).mul_(queries.steps[..., None])

    def norms(self, layer: int, blocks: slice | Tensor) -> Tensor:
        """Return how long the keys of ``blocks`` are, nearly: within an eighth, as a rule.

        A key is its block's mean and a residual, as if at right angles. Of a rotated vector its code keeps the same
        part whatever its direction, nearly, so that its factor tells its length.

        Args:
            layer: the layer's number.
            blocks: int64 [n], or a span of n (``dense.span_of``).

        Returns:
            float32 [KV heads, n × 16].
        """
        factors = take(self.factors[layer], blocks)
        residuals = factors.float() * length_of_factor(self.bits)
        means = factors_of_means(factors) * length_of_factor(MEAN_BITS)
        squares = residuals.square() + means.square()[..., None]
        return squares.transpose(0, 1).flatten(1).sqrt()

    @cached_property
    def entries(self) -> Entries:
        width = math.sqrt(self.shape.head_dim)
        steps = (_STEPS[MEAN_BITS] / width, _STEPS[self.bits] / width)
        return entries_of(self.pools, self.arguments(), self.turn, steps, self.generations.page_size)

    @cached_property
    def turn(self) -> Tensor:
        """What kernels multiply keys and queries with: the rotation, in the keys' dtype if that holds it exactly.

        If that is narrow, it is in bfloat16.
        """
        head_dim, keys = self.shape.head_dim, self.caches[0].keys
        # The interpreter multiplies no half precision.
        is_held = is_hadamard(head_dim) and keys.is_cuda
        return rotation(head_dim).to(keys.device, widened_dtype(keys.dtype) if is_held else torch.float32)

    def arguments(self, layer: int | None = None) -> Codes:
        """Return what kernels take: the codes of all layers, or of one."""
        codes, factors, means = (
            tensor if layer is None else tensor[layer] for tensor in (self.codes, self.factors, self.means)
        )
        bits, head_dim, kv_heads, block_bytes = (
            triton.language.constexpr(size)
            for size in (self.bits, self.shape.head_dim, self.shape.kv_heads, self.layout.size)
        )
        return Codes(codes, factors, means, self.pieces.shape[1], bits, head_dim, kv_heads, block_bytes)
