"""The kernel that pools keys, against plain PyTorch, from tensors and from the pages of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.caches import LAYOUTS, STORED, copied, in_fp8, paged, untouched
from kernels.device import CUDA, DEVICE, DTYPES
from sparseprefill import AttentionCall, kernels
from sparseprefill.kernels.statistics.key_means import key_means
from sparseprefill.parts.split import Part
from sparseprefill.statistics.pooled import key_tile_mean
from sparseprefill.testing import calls, tensors

TILES = (16, 64, 100, 128)


def make(size: tuple[int, int], dtype: torch.dtype = torch.float16, width: int = 64, **fields: Any) -> AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": size[0], "kv_len": size[1]}
    return AttentionCall(*tensors("random", head_dim=width, dtype=dtype, device=DEVICE, **sizes), **fields)


def reference(call: AttentionCall, tile: int) -> torch.Tensor:
    """By plain PyTorch in float64, which no kernel serves."""
    wide = {name: getattr(call, name).double() for name in ("q", "k", "v")}
    return key_tile_mean(evolve(call, **wide), tile).float()


@settings(max_examples=100 if CUDA else 15)
@given(
    call=calls(max_batch=3, max_heads=4, head_dims=(16, 80), max_len=200, dtypes=DTYPES, device=DEVICE),
    tile=st.sampled_from(TILES),
)
def test_means_are_those_of_plain_pytorch(call: AttentionCall, tile: int) -> None:
    torch.testing.assert_close(reference(call, tile), key_means(call, tile), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page", [16, 48, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_give_what_their_copy_gives(layout: str, page: int) -> None:
    for lengths in ((1, 1), (1, 127), (20, 128), (129, 129), (33, 251)):
        call = paged(make(lengths), page, layout)
        found = key_means(call, 64)
        assert untouched(call)
        assert torch.equal(key_means(copied(call), 64), found)


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("stored", STORED)
def test_an_fp8_cache_is_converted_as_it_is_read(stored: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    for number, size in enumerate([(1, 1), (1, 127), (20, 129), (33, 251)]):
        for dtype in DTYPES if CUDA else [DTYPES[number % 2]]:
            call = in_fp8(make(size, dtype), page, sorted(LAYOUTS)[number % 2], *STORED[stored])
            found = key_means(call, 64)
            assert untouched(call)
            assert torch.equal(key_means(copied(call), 64), found)


def test_a_cache_that_is_wider_than_a_copy_is_copied() -> None:
    call = in_fp8(make((33, 99), torch.float16), 16, "LBNHC", torch.float32, None)
    assert call.pages is not None
    found = key_means(call, 64)
    assert call.pages.gathered == {"k"}
    assert torch.equal(key_means(copied(call), 64), found)


def test_a_part_reads_its_own_heads_and_keys() -> None:
    call = paged(make((100, 251)), 16)
    part = Part((2, 4), (10, 70)).of(call)
    found = key_means(part, 64)
    assert untouched(call)
    torch.testing.assert_close(reference(copied(part), 64), found, rtol=1e-5, atol=1e-5)


def test_keys_that_nobody_sees_count_for_nothing() -> None:
    call = make((100, 251), q_offset=20)
    call.k[:, :, 120:] = torch.nan
    found = key_means(call, 64)
    assert not bool(found.isnan().any())
    assert bool((found[:, :, 2:] == 0).all())
    assert bool((found[:, :, :2] != 0).all())
