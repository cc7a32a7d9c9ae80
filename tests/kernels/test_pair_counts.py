"""Pairs counted by the kernel, against the dense form of the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.device import CUDA, DEVICE
from sparseprefill import AttentionCall, SparseMask
from sparseprefill.kernels.lists import pair_counts as module
from sparseprefill.kernels.lists.pair_counts import pair_counts
from sparseprefill.testing import calls, masks, tensors

SOME = settings(max_examples=100 if CUDA else 12)


def counted(mask: SparseMask) -> None:
    lists = [None if x is None else (x.counts, x.offsets, x.indices) for x in (mask.tiles, mask.stripes)]
    sizes = (mask.tile_q, mask.tile_k, mask.group, mask.stripe_width)
    found = pair_counts(mask.geometry, sizes, *lists, disjoint=mask.disjoint).sum(-1)
    assert torch.equal(mask.to_dense().sum((2, 3)), found)


@SOME
@given(data=st.data())
def test_every_kind_of_mask(data: st.DataObject) -> None:
    sizes: dict[str, Any] = {} if CUDA else {"max_batch": 2, "max_heads": 4}
    mask = data.draw(masks(data.draw(calls(head_dims=(8,), device=DEVICE, **sizes))))
    counted(mask)
    counted(evolve(mask, tiles=None))


@pytest.mark.parametrize("length", [1, 127, 601] if CUDA else [1, 31, 151])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 530 if CUDA else 133])
def test_lists_longer_than_a_step(
    length: int, padded: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More entries in a list than a program takes at once, which is less in the interpreter."""
    if not CUDA:
        monkeypatch.setattr(module, "BLOCK", 128)
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "q_len": length, "kv_len": length, "head_dim": 8}
    rows: dict[str, Any] = {"starts": [0, length // 3], "lengths": [length, length // 2 + 1]} if padded else {}
    fields: dict[str, Any] = {name: torch.tensor(one, dtype=torch.int32, device=DEVICE) for name, one in rows.items()}
    call = AttentionCall(*tensors("random", batch=2, device=DEVICE, **shape), window=window, **fields)
    g, source = call.geometry, torch.Generator().manual_seed(length)

    def some(rows: int, share: float) -> torch.Tensor:
        return (torch.rand(2, 2, rows, length, generator=source) < share).to(DEVICE)

    tiles = SparseMask.from_tiles(call, some(g.tile_rows(64), 0.95), (64, 1))
    stripes = SparseMask.from_stripes(call, some(g.tile_rows(128), 0.95), 2, (64, 1), diagonal=False)
    for mask in (tiles, stripes, SparseMask(g, 64, 1, tiles.tiles, 2, stripes.stripes)):
        counted(mask)


@pytest.mark.parametrize("window", [None, 6, 9])
def test_rows_that_begin_anywhere_in_a_tile(window: int | None) -> None:
    """Where the keys that every row sees end in mid-tile, and where at its edge."""
    for offset in range(9):
        sizes: dict[str, Any] = {"heads": 1, "kv_heads": 1, "q_len": 3, "kv_len": 24, "head_dim": 8}
        made = tensors("random", batch=1, device=DEVICE, **sizes)
        call = AttentionCall(*made, q_offset=offset, window=window)
        keep = torch.ones(1, 1, call.geometry.tile_rows(8), 24, dtype=torch.bool, device=DEVICE)
        keep[..., 2::3] = False
        stripes = SparseMask.from_stripes(call, keep, 1, 8, diagonal=False)
        tiles = SparseMask.from_tiles(call, keep[..., :3], 8, diagonal=False)
        for mask in (stripes, tiles, SparseMask(call.geometry, 8, 8, tiles.tiles, 1, stripes.stripes)):
            counted(mask)
