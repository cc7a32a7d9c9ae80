"""Kascade's kernels against plain PyTorch: sums by key, and the keys of the largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.kascade import kernels as gpu
from sparseprefill.plugins.kascade import sums
from sparseprefill.plugins.kascade.budget import Budget, Layout, Rows
from torch import Tensor

from helpers.examples import few_of
from kernels.caches import STORED, copied, in_fp8, paged, untouched
from kernels.device import CUDA, DEVICE
from sparseprefill import AttentionCall, kernels
from sparseprefill.mask.lists import IndexLists
from sparseprefill.testing import tensors

FIELDS: list[dict[str, Any]] = [
    {},
    {"q_offset": 33},
    {"softcap": 3.0},
    {"starts": (0, 60)},
    {"lengths": (190, 7)},
    {"starts": (3, 0), "lengths": (60, 100)},
]


def call_of(seed: int, heads: tuple[int, int], q_len: int, width: int, dtype: torch.dtype, **fields: Any) -> Any:
    """Two batch rows of 200 keys."""
    batch = 2
    fields = {
        name: torch.tensor(x, dtype=torch.int32, device=DEVICE) if isinstance(x, tuple) else x
        for name, x in fields.items()
    }
    sizes: dict[str, Any] = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "q_len": q_len, "kv_len": 200}
    q, k, v = tensors("stripes", head_dim=width, seed=seed, **sizes)
    return AttentionCall(*(x.to(DEVICE, dtype) for x in (q, k, v)), **fields)


def before(call: AttentionCall, tile: int) -> tuple[Tensor, Tensor, int]:
    """Tiles, their first positions, and the last of these that any batch row can have."""
    tiles = call.geometry.tiles(tile)
    return tiles, tiles * tile, (call.geometry.q_offset // tile + tiles.shape[1] - 1) * tile


@settings(max_examples=60 if CUDA else 12)
@given(
    seed=st.integers(0, 99),
    heads=st.sampled_from([(2, 2), (4, 1), (6, 2), (8, 1)]),
    q_len=st.sampled_from([1, 90, 167]),
    width=st.sampled_from([64, 80]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    fields=st.sampled_from(FIELDS),
    tile=st.sampled_from([16, 24, 64]),
    sampled=st.sampled_from([1, 3, 16, 64]),
)
def test_sums_by_key(
    seed: int, heads: tuple[int, int], q_len: int, width: int, dtype: torch.dtype, fields: dict[str, Any], tile: int,
    sampled: int,
) -> None:  # fmt: skip
    """64 rows of 8 heads are more pairs than a program holds, which adds them up in parts."""
    call = call_of(seed, heads, q_len, width, dtype, **fields)
    tiles, begin, until = before(call, tile)
    if until <= 0:
        return
    rows = Rows.of(call.geometry, tiles, tile, min(sampled, tile), torch.float32)
    expected = sums.column_sums(call, rows, until)
    actual = gpu.column_sums(call, rows, begin, until)
    seen = (torch.arange(until, device=DEVICE) < begin[..., None])[:, None].expand_as(expected)
    torch.testing.assert_close(expected[seen], actual[seen], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("page", few_of([16, 128], [16]))
@pytest.mark.parametrize("stored", [None, *STORED])
def test_sums_of_keys_in_pages(stored: str | None, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    for dtype in (torch.float32, torch.float16):
        call = call_of(3, (4, 2), 67, 64, dtype)
        one = evolve(call, q=call.q[:1], k=call.k[:1], v=call.v[:1])
        there = paged(one, page) if stored is None else in_fp8(one, page, "LBHNC", *STORED[stored])
        tiles, begin, until = before(one, 16)
        rows = Rows.of(one.geometry, tiles, 16, 5, torch.float32)
        actual = gpu.column_sums(there, rows, begin, until)
        assert untouched(there)
        expected = gpu.column_sums(copied(there), rows, begin, until)
        seen = (torch.arange(until, device=DEVICE) < begin[..., None])[:, None].expand_as(expected)
        assert torch.equal(expected[seen], actual[seen])


@settings(max_examples=60 if CUDA else 10)
@given(
    seed=st.integers(0, 999),
    size=st.sampled_from([5, 200, 4096, 9000]),
    kind=st.sampled_from(["random", "few", "zeros", "nan", "tiny"]),
    part=st.sampled_from([(0, 6), (2, 5)]),
)
def test_keys_of_the_largest_sums(seed: int, size: int, kind: str, part: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 2, part[1] - part[0], size, generator=generator) ** 4
    if kind == "few":  # many ties
        x = (x * 5).round() / 5
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "tiny":
        x = x * 1e-30
    elif kind == "nan":
        x[..., ::3] = torch.nan
    begin = torch.randint(0, size + 1, (2, 6), generator=generator)
    columns = (begin * torch.rand(2, 6, generator=generator)).long()
    counts = columns.to(torch.int32)[:, None].expand(-1, 2, -1).contiguous()
    offsets = torch.arange(24).view(2, 2, 6) * size

    def lists() -> IndexLists:
        return IndexLists(counts, offsets, torch.full((24 * size + 1,), -1, dtype=torch.int32))

    where = slice(*part)
    expected = lists()
    sums._top_columns(x, begin[:, where], expected, where)
    given = lists()
    actual = IndexLists(*(one.to(DEVICE) for one in (given.counts, given.offsets, given.indices)))
    gpu.top_columns(x.to(DEVICE), begin.to(DEVICE), actual, where)
    # The last entry of the plain way takes what is not kept.
    assert torch.equal(expected.indices[:-1], actual.indices[:-1].cpu())
    for b, h, i in ((0, 0, part[0]), (1, 1, part[1] - 1)):
        found = expected.row(b, h, i)
        score = torch.nan_to_num(x[b, h, i - part[0], : int(begin[b, i])], nan=0.0)
        assert int(columns[b, i]) == found.numel() == found.unique().numel()
        rest = torch.ones_like(score, dtype=torch.bool)
        rest[found.long()] = False
        assert found.numel() == 0 or not bool(rest.any()) or score[found.long()].min() >= score[rest].max()


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_choice_is_that_of_plain_pytorch(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    """The whole way, a few tiles at a time."""
    call = call_of(1, (4, 2), 167, 64, torch.float32, **fields)
    budget = Budget(0.3, 4, 16)
    monkeypatch.setattr(sums, "SLAB", 2 * 2 * 200 * 4 * 3)
    found = []
    for fast in (False, True):
        monkeypatch.setattr(kernels, "serve", lambda x, fast=fast: fast)
        found.append(sums.choose(call, budget, 8))
    expected, actual = (one.to_map(200) for one in found)
    real = Layout.of(call, budget).start < call.geometry.key_counts()[:, None]  # tiles of padding choose as they like
    differ = (expected ^ actual) & real[:, None, :, None]
    assert int(differ.sum()) <= 2  # of sums that differ by rounding
    assert int(expected.sum()) > 50
