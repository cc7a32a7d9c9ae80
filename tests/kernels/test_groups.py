"""The order of tiles of kernels over groups of tokens."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.device import CUDA, DEVICE, DTYPES
from kernels.groups import make, small_settings
from sparseprefill.kernels.family.chips import row
from sparseprefill.kernels.groups import GroupTiles, group_settings, paged_settings, program_tile, tile_of
from sparseprefill.kernels.settings import Settings
from sparseprefill.statistics.grid import supported


@triton.jit
def tiles_kernel(out_ptr, tiles, skipped, base, heads, kv_group, RATIO: tl.constexpr):
    pid = tl.program_id(0)
    b, h, hk, row, column = program_tile(pid, tiles, skipped, base, heads, kv_group, 16, 16 * RATIO)
    out = out_ptr + pid * 5
    tl.store(out, b)
    tl.store(out + 1, h)
    tl.store(out + 2, hk)
    tl.store(out + 3, row)
    tl.store(out + 4, column)


@triton.jit
def tile_of_kernel(out_ptr, number_ptr, skipped, RATIO: tl.constexpr):
    row, column = tile_of(tl.load(number_ptr + tl.program_id(0)), skipped, RATIO)
    tl.store(out_ptr + 2 * tl.program_id(0), row)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, column)


@pytest.mark.parametrize(
    ("ratio", "base", "skipped", "count"), [(1, 0, 0, 4), (2, 0, 3, 3), (2, 5, 0, 2), (4, 7, 2, 1)]
)
def test_every_causal_tile_has_one_program(ratio: int, base: int, skipped: int, count: int) -> None:
    rows = range(skipped, skipped + count)
    reach = {row: (base + row) // ratio + 1 for row in rows}
    tiles = sum(reach.values())
    out = torch.zeros(2 * 2 * tiles, 5, dtype=torch.int32, device=DEVICE)
    tiles_kernel[(len(out),)](out, tiles, skipped, base, 2, 1, RATIO=ratio)
    expected = [(b, h, h, row, c) for b in range(2) for h in range(2) for row in rows for c in range(reach[row])]
    assert sorted(expected) == sorted(tuple(row) for row in out.tolist())


@pytest.mark.skipif(CUDA, reason="the interpreter's doing")
def test_the_interpreter_does_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every test of a kernel takes three times as long: see `helpers.interpreter`."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    swaps: list[object] = []
    swap = interpreter._patch_lang_tensor

    def swapped(*args: Any) -> Any:
        swaps.append(args)
        return swap(*args)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", swapped)
    asserted: list[object] = []
    monkeypatch.setattr(TritonSemantic, "device_assert", lambda *args: asserted.append(args))
    out = torch.zeros(4, 2, dtype=torch.int32)
    for _ in range(2):
        tile_of_kernel[(4,)](out, torch.arange(4, dtype=torch.int32), 0, RATIO=1)
    assert [[0, 0], [1, 0], [1, 1], [2, 0]] == out.tolist()
    assert 2 == len(swaps)
    assert not asserted


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("row", [1, 2, 511, 2047, 4095])
def test_tiles_of_long_calls_are_found(ratio: int, row: int) -> None:
    """The closed form goes through a float32 root; whole numbers correct it."""
    before = sum(r // ratio + 1 for r in range(row))
    last = row // ratio
    numbers = torch.tensor([before - 1, before, before + last, before + last + 1], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    tile_of_kernel[(4,)](out, numbers, 0, RATIO=ratio)
    assert [[row - 1, (row - 1) // ratio], [row, 0], [row, last], [row + 1, 0]] == out.tolist()


@pytest.mark.parametrize(
    ("q_len", "before", "expected"),
    [
        (128, 0, [True]),
        (128, 64, [True]),
        (127, 0, [True, False]),
        (8, 1, [False]),
        (129, 2, [False, True, False]),
        (200, 4, [True]),
    ],
)
def test_only_whole_groups_are_loaded_by_descriptors(
    q_len: int, before: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_settings(monkeypatch, (16, 16), tma=True)
    tiles = GroupTiles.of(make(torch.float32, (1, 1), q_len, before, 0), 16, 4)
    parts = list(tiles.parts(range(tiles.count)))
    assert expected == [part.flags["TMA"] for part in parts]
    assert list(range(tiles.count)) == [row for part in parts for row in part.rows]


def test_padded_rows_go_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    small_settings(monkeypatch, (16, 16), tma=True)
    tiles = GroupTiles.of(make(DTYPES[-1], (1, 1), 64, 0, 0, starts=[0, 8]), 16, 4)
    assert not any(part.flags["TMA"] for part in tiles.parts(range(tiles.count)))


def test_calls_that_the_kernels_cannot_serve() -> None:
    call = make(torch.float32, (1, 1), 64, 0, 0)
    assert supported(call, 256, 64)
    assert supported(call, 48, 6)
    assert not supported(call, 48, 16)
    assert not supported(call, 256, 1)
    assert not supported(make(torch.float64, (1, 1), 64, 0, 0), 256, 64)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_settings_suit_the_grid(capability: tuple[int, int], itemsize: int) -> None:
    suits(capability, itemsize, group_settings(row(capability), itemsize))
    for size in (16, 64):
        suits(capability, itemsize, paged_settings(row(capability), itemsize, size))


def suits(capability: tuple[int, int], itemsize: int, chosen: Settings) -> None:
    assert chosen.block_n % chosen.block_m == 0
    assert chosen.block_m >= 64
    assert chosen.tma == row(capability).large
    shared = (chosen.block_m + chosen.block_n) * chosen.block_k * itemsize * chosen.stages
    assert shared <= (227 if row(capability).large else 99) << 10
