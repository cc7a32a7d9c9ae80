"""The kernel that copies pages, against indexing: layouts, page sizes, head sizes, lengths, scales."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.vllm.pages import pages_of

from kernels.device import CUDA, DEVICE, DTYPES
from sparseprefill.kernels.gather import gather_pages
from sparseprefill.pages import Pages

HEADS_FIRST, TOKENS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3)


def pages(length: int, page: int, size: int, dtype: torch.dtype, order: tuple[int, ...], fp8: bool = False) -> Pages:
    """A cache of random numbers, larger than the request needs, and a table that jumps about in it."""
    count, heads = -(-length // page), 3
    shape = [(2 * count + 1, heads, page, 2 * size)[i] for i in order]
    cache = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn if fp8 else dtype).permute(order)
    table = torch.randperm(2 * count + 1, device=DEVICE)[:count].to(torch.int32)
    if not fp8:
        return pages_of(cache, size, table, length, dtype=dtype)
    scales = (torch.tensor(0.5, device=DEVICE), torch.tensor(3.0, device=DEVICE))
    stored = cache.view(torch.uint8)
    return pages_of(stored, size, table, length, dtype=dtype, fp8=torch.float8_e4m3fn, scales=scales)


def expected(given: Pages, dtype: torch.dtype) -> list[torch.Tensor]:
    """Token by token."""
    token = torch.arange(given.length, device=DEVICE)
    page, slot = given.table[token // given.page].long(), token % given.page
    one = torch.ones((), device=DEVICE)
    scales = (one if given.k_scale is None else given.k_scale, one if given.v_scale is None else given.v_scale)
    taken = [
        x[page, slot] if x.dtype.itemsize > 1 else x.view(torch.uint8)[page, slot].view(x.dtype)
        for x in (given.k, given.v)
    ]
    return [(x.float() * scale).to(dtype).transpose(0, 1)[None] for x, scale in zip(taken, scales, strict=True)]


@pytest.mark.parametrize("order", [HEADS_FIRST, TOKENS_FIRST])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "page", "size"), [(1, 16, 64), (130, 1, 64), (127, 16, 80), (128, 128, 64), (129, 32, 96), (211, 48, 64)]
)
def test_pages_are_copied_bit_for_bit(
    length: int, page: int, size: int, dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    given = pages(length, page, size, dtype, order)
    both, none = (given.k, given.v), (None, None)
    apart = [gather_pages((x,), given.table, length, (None,), dtype)[0] for x in both]
    for found in (apart, gather_pages(both, given.table, length, none, dtype)):
        for wanted, read in zip(expected(given, dtype), found, strict=True):
            assert torch.equal(wanted, read)
            assert read.is_contiguous()


def test_values_of_another_size_are_copied_beside_keys() -> None:
    given = pages(77, 16, 64, torch.float16, TOKENS_FIRST)
    for part in (slice(0, 40), slice(24, 64)):
        narrow = evolve(given, v=given.v[..., part])
        for wanted, read in zip(expected(narrow, torch.float16), narrow.copy(), strict=True):
            assert torch.equal(wanted, read)


def test_scales_are_factors() -> None:
    given = pages(77, 16, 64, torch.float16, TOKENS_FIRST)
    scales = (torch.tensor(0.5, device=DEVICE), torch.tensor(3.0, device=DEVICE))
    wanted = expected(given, torch.float32)
    both = gather_pages((given.k, given.v), given.table, 77, scales, torch.float32)
    for one, x, scale, read in zip(wanted, (given.k, given.v), scales, both, strict=True):
        assert torch.equal(one * scale, gather_pages((x,), given.table, 77, (scale,), torch.float32)[0])
        assert torch.equal(one * scale, read)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [HEADS_FIRST, TOKENS_FIRST])
def test_an_fp8_cache(order: tuple[int, ...]) -> None:
    assert CUDA
    given = pages(1000, 16, 128, torch.bfloat16, order, fp8=True)
    again = evolve(given)
    for found in ((given.keys(), given.values()), again.copy()):
        for wanted, read in zip(expected(given, torch.bfloat16), found, strict=True):
            assert torch.equal(wanted, read)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    given = pages(4096, 16, 128, torch.bfloat16, HEADS_FIRST)
    large = torch.empty(1 << 20, 3, 16, 256, dtype=torch.bfloat16, device=DEVICE)  # 24 GiB
    table = (1 << 20) - 1 - torch.arange(256, device=DEVICE, dtype=torch.int32)
    large[table.long()] = given.k.transpose(1, 2).repeat(1, 1, 1, 2)[:256]
    far = pages_of(large, 128, table, 4096, dtype=torch.bfloat16)
    for wanted, read in zip(expected(far, torch.bfloat16), (far.keys(), far.values()), strict=True):
        assert torch.equal(wanted, read)
