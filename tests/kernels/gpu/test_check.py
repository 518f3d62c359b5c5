"""Dense attention from several new tokens of each row, on the device, against the torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, compile_launches
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.selectors import cache_on
from winnow_kernels.attend.dense import prefill
from winnow_kernels.attend.gpu_check import CheckPartial, attend_new
from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import LayerCache
from winnow_kernels.softmax import PLAIN, Softmax

# The interpreter multiplies matrices of bfloat16 as if they were integers.
HALF_PRECISION = torch.float16 if INTERPRETED else torch.bfloat16
LONGEST, EXAMPLES = (700, 5) if INTERPRETED else (20_000, 100)
# Head dim, query heads of a KV head, new tokens.
SHAPES = [(64, 3, 5), (128, 4, 2), (128, 4, 5), (128, 4, 17), (128, 8, 9), (256, 4, 5)]


def outputs(
    lengths: Sequence[int],
    new_tokens: int,
    device: torch.device,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int | None = None,
    softmax: Softmax = PLAIN,
    own_tokens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """What the kernel yields and what is correct, [rows, new tokens, query heads, head dim].

    A row's tokens but for its ``own_tokens``, the first ones, fill it up.
    """
    pool = (sum(-(-length // page_size) for length in lengths) + 1) * page_size
    context = scattered_context(lengths, pool, page_size, seed)
    cache = replace(random_cache(pool, kv_heads, head_dim, seed, dtype), softmax=softmax)
    heads = kv_heads * group
    # As in a model, queries are part of a wider tensor.
    wide = random_queries(len(lengths) * new_tokens, heads + 2, head_dim, seed).to(dtype)
    batch = DecodeBatch.empty(len(lengths), max(lengths) + 100, page_size, device)
    for row, length in enumerate(lengths):
        pages = context.slots[row, :length:page_size] // page_size
        batch.page_table[row, : len(pages)] = pages
    batch.lengths.copy_(context.lengths)
    correct = torch.zeros(len(lengths), new_tokens, heads, head_dim, dtype=dtype)
    for row, length in enumerate(lengths):
        seeing = min(length, new_tokens)
        own = wide[row * new_tokens : (row + 1) * new_tokens, :heads][new_tokens - seeing :]
        correct[row, new_tokens - seeing :] = prefill(own, context.slots[row, :length], cache, 0.1, window)
        if own_tokens is not None:
            correct[row, own_tokens[row] :] = 0
    on_device = cache_on(device, cache)
    output = torch.full((len(lengths) * new_tokens, heads, head_dim), torch.nan, dtype=dtype, device=device)
    partial = CheckPartial.empty(len(output), heads, on_device)
    counts = None if own_tokens is None else torch.tensor(own_tokens, dtype=torch.int32, device=device)
    attend_new(wide.to(device)[:, :heads], on_device, batch, 0.1, partial, output, window=window, own_tokens=counts)
    return output.cpu().view_as(correct), correct


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size", "new_tokens"),
    [(2, 4, 64, 16, 5), (1, 7, 96, 32, 2), (2, 3, 128, 64, 17), (1, 16, 256, 16, 9), (3, 1, 64, 32, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF_PRECISION])
def test_equals_the_reference(
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    new_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    shape = (kv_heads, group, head_dim, page_size)
    actual, correct = outputs([310, 64 + new_tokens, 20, 190], new_tokens, device, *shape, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, correct, atol=tolerance, rtol=tolerance)


def test_a_row_of_padding_sees_nothing_before_its_first_token(device: torch.device) -> None:
    actual, correct = outputs([1, 3, 70], 5, device)
    torch.testing.assert_close(actual, correct, atol=1e-5, rtol=1e-5)
    assert actual[0, :4].eq(0).all()
    assert actual[1, :2].eq(0).all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("group", "new_tokens", "own_tokens"),
    [(4, 5, [1, 5, 4, 2]), (3, 17, [1, 17, 5, 6]), (16, 9, [1, 9, 2, 3]), (1, 17, [16, 17, 1, 2])],
)
def test_tokens_that_fill_a_row_up_attend_to_nothing(
    group: int, new_tokens: int, own_tokens: list[int], window: int | None, device: torch.device
) -> None:
    """Also where all tokens of a row need several blocks, and its own tokens one."""
    lengths = [310, 64 + new_tokens, 200, 190]
    actual, correct = outputs(lengths, new_tokens, device, group=group, window=window, own_tokens=own_tokens)
    torch.testing.assert_close(actual, correct, atol=1e-5, rtol=1e-5)
    assert all(actual[row, own:].eq(0).all() for row, own in enumerate(own_tokens))


def test_long_contexts_have_longer_splits(device: torch.device) -> None:
    actual, correct = outputs([17_000, 5000], 3, device, kv_heads=1)
    torch.testing.assert_close(actual, correct, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "new_tokens"), [(0, 1), (0, 3), (63, 5), (64, 2), (100, 17), (511, 5), (5000, 3)])
def test_a_window_is_that_of_the_reference(window: int, new_tokens: int, device: torch.device) -> None:
    actual, correct = outputs([700, 64 + new_tokens, 20, 1], new_tokens, device, window=window)
    torch.testing.assert_close(actual, correct, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", SOFTMAXES[1:])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("group", "head_dim"), [(3, 96), (8, 64)])
def test_caps_and_sinks(group: int, head_dim: int, window: int | None, kind: str, device: torch.device) -> None:
    # Of the dtype in which SGLang keeps them.
    softmax = random_softmax(kind, 2 * group)
    if softmax.sink_logits is not None:
        softmax = replace(softmax, sink_logits=softmax.sink_logits.to(HALF_PRECISION))
    lengths = [310, 69, 2, 190]
    actual, correct = outputs(lengths, 5, device, group=group, head_dim=head_dim, window=window, softmax=softmax)
    torch.testing.assert_close(actual, correct, atol=1e-5, rtol=1e-5)
    assert actual[2, :3].eq(0).all()
    _, plain = outputs(lengths, 5, device, group=group, head_dim=head_dim, window=window)
    assert not torch.allclose(actual, plain, atol=1e-2)


def test_nothing_before_a_window_is_read(device: torch.device) -> None:
    """Contexts beyond what splits would have to share: only the tiles of the window are."""
    actual, correct = outputs([17_000, 5000], 3, device, kv_heads=1, window=900)
    torch.testing.assert_close(actual, correct, atol=1e-5, rtol=1e-5)


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=3),
    new_tokens=st.integers(1, 17),
    page_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(0, LONGEST),
    own_tokens=st.none() | st.lists(st.integers(1, 17), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES)
def test_any_lengths(
    lengths: list[int],
    new_tokens: int,
    page_size: int,
    window: int | None,
    own_tokens: list[int] | None,
    seed: int,
    device: torch.device,
) -> None:
    own = own_tokens and [min(tokens, new_tokens) for tokens in own_tokens[: len(lengths)]]
    actual, correct = outputs(
        lengths, new_tokens, device, page_size=page_size, seed=seed, window=window, own_tokens=own
    )
    torch.testing.assert_close(actual, correct, atol=2e-5, rtol=2e-5)


def test_the_same_batch_gets_the_same_bits(device: torch.device) -> None:
    first, second = (outputs([600, 90, 1], 4, device, dtype=HALF_PRECISION)[0] for _ in range(2))
    assert torch.equal(first, second)


def _launch() -> None:
    """Attend at each of ``SHAPES``, of bfloat16, with 8 KV heads, on a device like a H100."""
    batch = DecodeBatch.empty(2, 32_768, 64, torch.device("cpu"))
    for head_dim, group, new_tokens in SHAPES:
        cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=torch.bfloat16))
        queries = torch.empty(2 * new_tokens, 8 * group, head_dim, dtype=torch.bfloat16)
        partial = CheckPartial.empty(len(queries), 8 * group, cache)
        own = torch.ones(2, dtype=torch.int32)
        attend_new(queries, cache, batch, 0.1, partial, torch.empty_like(queries), own_tokens=own)


def _launch_with_window() -> None:
    """Attend within a window of 1,024 tokens, of heads like Gemma 3's."""
    batch = DecodeBatch.empty(2, 32_768, 16, torch.device("cpu"))
    cache = LayerCache(*torch.empty(2, 64, 1, 256, dtype=torch.bfloat16))
    queries = torch.empty(10, 4, 256, dtype=torch.bfloat16)
    partial = CheckPartial.empty(len(queries), 4, cache)
    attend_new(queries, cache, batch, 0.1, partial, torch.empty_like(queries), window=1023)


def test_a_window_compiles() -> None:
    attending, merging = compile_launches(_launch_with_window)
    assert attending.shared_bytes <= SHARED_LIMIT // 2
    assert attending.local_bytes <= SPARE_BYTES
    assert merging.local_bytes == 0


def test_fits_a_multiprocessor() -> None:
    compiled = iter(compile_launches(_launch))
    for _, group, new_tokens in SHAPES:
        attending, merging = next(compiled), next(compiled)
        assert attending.shared_bytes <= SHARED_LIMIT // 2
        # Twice the registers would fit a block of 128 queries, but with as many warps it takes longer.
        assert attending.local_bytes <= (512 if group * new_tokens > 64 else SPARE_BYTES)
        assert merging.local_bytes == 0
