"""The kernels on maps and lists against plain PyTorch: rules, grids of all kinds, padding, windows; and back."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.device import CUDA, DEVICE
from sparseprefill.kernels.lists.maps import decode, emptied, encode, encode_map, encode_ranges, resolve
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.tile_map import Random, Stride, TileMap

WORDS = st.integers(0, 2**32 - 1)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    batch, kv_len = draw(st.integers(1, 2)), draw(st.sampled_from([1, 127, 128, 129, 211]))
    q_len = draw(st.integers(1, kv_len))
    options: dict[str, Any] = {}
    for name, most in (("starts", kv_len - 1), ("lengths", kv_len)):
        if draw(st.booleans()):
            values = [draw(st.integers(0, most)) for _ in range(batch)]
            options[name] = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    offset = draw(st.integers(0, kv_len - q_len))
    window = draw(st.none() | st.integers(1, kv_len))
    return Geometry(batch, 4, q_len, kv_len, offset, torch.device(DEVICE), window=window, **options)


@st.composite
def tile_maps(draw: st.DrawFn) -> TileMap:
    geometry = draw(geometries())
    rules: dict[str, Any] = {
        "tile_q": draw(st.sampled_from([8, 16, 32])),
        "tile_k": draw(st.sampled_from([8, 16, 24, 64])),
        "band": draw(st.none() | st.integers(0, 3)),
        "sink": draw(st.integers(0, 2)),
        "stride": draw(st.none() | st.builds(Stride, st.integers(1, 9), WORDS)),
        "random": draw(st.none() | st.builds(Random, st.integers(1, 2**32), WORDS)),
        "first_head": draw(st.integers(0, 40)),
        "per_row": draw(st.integers(1, 2)),
        "per_column": draw(st.integers(1, 3)),
    }
    kind = draw(st.sampled_from(["none", "one", "each"]))
    if kind != "none":
        ranges = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 27)), min_size=2, max_size=2))
        each = torch.tensor(ranges[: geometry.batch], dtype=torch.int32, device=DEVICE)
        rules["dense"] = ranges[0] if kind == "one" else each
    heads = draw(st.sampled_from([None, 1, 2, 4]))
    if heads is not None:
        rows, columns = geometry.tile_rows(rules["tile_q"] * rules["per_row"]), rules["tile_k"] * rules["per_column"]
        source = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        keep = torch.rand(geometry.batch, heads, rows, geometry.tile_columns(columns), generator=source) < 0.3
        rules["keep"] = keep.to(DEVICE)
    return TileMap(geometry=geometry, **rules)


def sound(lists: IndexLists) -> None:
    """Ascending lists within their storage; no two overlap unless they are the same."""
    entry, index = lists.padded(int(lists.counts.max()))
    assert bool(((index[..., 1:] > index[..., :-1]) | ~entry[..., 1:]).all())
    begin, count = lists.offsets.flatten(), lists.counts.flatten().long()
    used = torch.stack([begin, begin + count], 1)[count > 0].unique(dim=0)
    assert bool((used[1:, 0] >= used[:-1, 1]).all())
    assert used.numel() == 0 or int(used.max()) <= lists.indices.numel()


@settings(max_examples=25 if CUDA else 12)
@given(tiles=tile_maps())
def test_maps_and_lists_are_those_of_plain_pytorch(tiles: TileMap) -> None:
    expected = tiles.plain()
    for unite in (1, 2, 4):
        assert torch.equal(tiles.plain(unite), resolve(*tiles.kernel_arguments(), unite))
    lists = IndexLists(*encode(*tiles.kernel_arguments()))
    sound(lists)
    assert torch.equal(expected, decode((lists.counts, lists.offsets, lists.indices), expected.shape[-1]))


@pytest.mark.parametrize("columns", [1, 31, 256, 300])
def test_lists_of_maps_with_any_strides(columns: int) -> None:
    keep = torch.rand(2, 6, 5, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.4
    for view in (keep, keep.transpose(1, 2), keep[:, :1].expand(-1, 3, -1, -1), keep[..., :1, :].expand(-1, -1, 4, -1)):
        lists = IndexLists(*encode_map(view))
        sound(lists)
        assert torch.equal(view, decode((lists.counts, lists.offsets, lists.indices), columns))
        assert torch.equal(view.sum(-1, dtype=torch.int32), lists.counts)


def test_heads_that_are_views_of_one_are_listed_once() -> None:
    keep = torch.ones(1, 1, 4, 9, dtype=torch.bool, device=DEVICE).expand(-1, 8, -1, -1)
    assert 4 * 9 == encode_map(keep)[2].numel()
    geometry = Geometry(1, 8, 128, 128, 0, torch.device(DEVICE))
    tiles = TileMap(geometry=geometry, tile_q=16, tile_k=16, band=1)
    assert 36 == encode(*tiles.kernel_arguments())[2].numel()


@given(seed=st.integers(0, 99), parts=st.integers(1, 3))
def test_lists_of_ranges(seed: int, parts: int) -> None:
    source = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, 300, (2, 3, 2 * parts), generator=source).sort(-1).values
    bounds[:, 0, 1] = bounds[:, 0, 0] - 1  # an empty one
    first, last = bounds[..., 0::2], bounds[..., 1::2]
    expected = IndexLists.from_ranges(first, last, 2, 300)
    lists = IndexLists(*encode_ranges(first.to(DEVICE), last.to(DEVICE), 2, 300))
    assert torch.equal(expected.to_map(300), decode((lists.counts, lists.offsets, lists.indices), 300).cpu())
    assert torch.equal(expected.counts, lists.counts.cpu())


def test_entries_that_are_out_of_bounds_are_not_marked() -> None:
    counts, offsets = torch.tensor([[[3, 1]]], dtype=torch.int32), torch.tensor([[[0, 3]]])
    indices = torch.tensor([-1, 1, 5, 4], dtype=torch.int32)
    found = decode((counts.to(DEVICE), offsets.to(DEVICE), indices.to(DEVICE)), 5)
    assert [[False, True, False, False, False], [False] * 4 + [True]] == found[0, 0].tolist()


@pytest.mark.gpu
def test_a_call_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a map with rules: one kernel; its map: one; nothing waits for the device."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # by kernels of its own
    geometry = Geometry(1, 32, 32768, 32768, 0, torch.device(DEVICE))
    keep = torch.rand(1, 32, 256, 256, device=DEVICE) < 0.1
    tiles = TileMap(geometry=geometry, tile_q=128, tile_k=128, keep=keep, band=8, sink=1, stride=Stride(16, 7))
    given_tiles = tiles.kernel_arguments()
    _ = encode(*given_tiles), resolve(*given_tiles)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        _ = encode(*given_tiles), resolve(*given_tiles)
        torch.cuda.synchronize()
    ran = {event.key: event.count for event in seen.key_averages() if event.device_type.name == "CUDA"}
    assert {"encode_kernel": 1, "resolve_kernel": 1} == ran
    assert CUDA


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 64), (2, 4, 700)])
def test_lists_of_some_rows_are_emptied(shape: tuple[int, int, int]) -> None:
    counts = torch.randint(1, 9, (shape[0], 1, shape[2]), dtype=torch.int32, device=DEVICE).expand(shape)
    without = torch.rand(shape[0], 2 * shape[2], device=DEVICE)[:, ::2] < 0.5
    assert torch.equal(emptied(counts, without), counts.masked_fill(without[:, None], 0))
