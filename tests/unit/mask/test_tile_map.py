"""TileMap: rules and maps meet without lists being made; lists once; what does not fit is refused."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.mask import tile_map
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.tile_map import Random, Stride, TileMap

GEOMETRIES = st.sampled_from(
    [make(60, 70, heads=4).geometry, make(40, heads=4, batch=2, starts=int32(0, 13), window=30).geometry]
)
STATES = st.integers(0, 2**32 - 1)


@st.composite
def maps(draw: st.DrawFn, geometry: Geometry) -> TileMap:
    rules: dict[str, Any] = {
        "band": draw(st.none() | st.integers(0, 3)),
        "sink": draw(st.integers(0, 2)),
        "stride": draw(st.none() | st.builds(Stride, st.integers(1, 5), st.integers(0, 1))),
        "random": draw(st.none() | st.builds(Random, st.integers(1, 2**32), st.integers(0, 1))),
        "first_head": draw(st.integers(0, 1)),
    }
    heads = draw(st.sampled_from([None, 1, 2, 4]))
    if heads is not None:
        source = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        shape = (geometry.batch, heads, geometry.tile_rows(8), geometry.tile_columns(8))
        rules["keep"] = torch.rand(shape, generator=source) < 0.3
    return TileMap(geometry=geometry, tile_q=8, tile_k=8, **rules)


@given(data=st.data(), geometry=GEOMETRIES)
def test_union_is_the_or_of_the_maps(data: st.DataObject, geometry: Geometry) -> None:
    a, b, c = (data.draw(maps(geometry)) for _ in range(3))
    assert torch.equal(a.resolved | b.resolved, (a | b).resolved)
    assert torch.equal(((a | b) | c).resolved, (a | (b | c)).resolved)
    assert torch.equal(a.resolved, (a | a).resolved)
    assert torch.equal(a.resolved, a.lists.to_map(a.resolved.shape[-1]))


@given(data=st.data(), geometry=GEOMETRIES, group=st.sampled_from([1, 2, 4]))
def test_united_heads_have_what_any_of_them_has(data: st.DataObject, geometry: Geometry, group: int) -> None:
    tiles = data.draw(maps(geometry))
    expected = tiles.resolved.unflatten(1, (-1, group)).any(2).repeat_interleave(group, dim=1)
    assert torch.equal(expected, tiles.united(group).resolved)


def test_a_chain_of_refiners_makes_lists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(64, heads=4, kv_heads=2)
    made: list[int] = []
    one = IndexLists.from_map

    def counted(keep: torch.Tensor, **more: bool) -> IndexLists:
        made.append(1)
        return one(keep, **more)

    monkeypatch.setattr(IndexLists, "from_map", counted)
    plan = sp.Plan(sp.SparseMask.from_tiles(call, torch.zeros(8, 8, dtype=torch.bool), 8))
    for refiner in (sp.LocalBand(1), sp.Sink(1), sp.StrideRescue(4), sp.RandomRescue(0.1), sp.GqaUnion()):
        plan = refiner.refine(call, plan, sp.Memory())
    assert [] == made
    assert plan.mask.has_tiles
    lists = plan.mask.tiles
    assert lists is plan.mask.tiles
    assert [1] == made


def test_lists_of_rules_by_place_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(**rules: Any) -> IndexLists:
        tiles = TileMap(geometry=make(96, 100, heads=4).geometry, tile_q=8, tile_k=8, **rules)
        assert torch.equal(tiles.plain(), tiles.lists.to_map(13))
        return tiles.lists

    assert lists(band=0, sink=1, dense=(3, 5)).indices is lists(band=0, sink=1, dense=(3, 5)).indices
    assert lists(band=0, sink=1).indices is not lists(band=0, sink=1, dense=(3, 5)).indices
    for rules in ({"stride": Stride(2, 0)}, {"dense": int32(0, 2)[None]}, {"keep": torch.ones(1, 4, 13, 13) > 0}):
        assert lists(**rules).indices is not lists(**rules).indices
    monkeypatch.setattr(tile_map, "KEPT", 100)
    assert lists(band=0, sink=1).indices is not lists(band=0, sink=1).indices


def test_a_device_without_a_number_is_the_one_with_one() -> None:
    geometry = evolve(make(64).geometry, device=torch.device("cpu:0"))
    ranges = int32(0, 3).view(1, 2)
    assert torch.device("cpu") == ranges.device
    assert ranges is TileMap(geometry=geometry, tile_q=8, tile_k=8, dense=ranges).dense
    with pytest.raises(sp.MaskError, match="pass one range for each of 1 batch rows, on meta"):
        TileMap(geometry=evolve(geometry, device=torch.device("meta")), tile_q=8, tile_k=8, dense=ranges)
