"""Kascade against its oracle, layer by layer: masks bit for bit, outputs to rounding; what is kept between layers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.kascade import TABLE
from sparseprefill.plugins.kascade.records import Chosen, Kept
from sparseprefill.plugins.kascade.stages import Kascade
from sparseprefill.plugins.kascade.table import AnchorTable
from torch import Tensor

import sparseprefill as sp
from helpers.layers import Layers, calls, run
from oracles import kascade as oracle
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.testing import check_method

IDENTITY = ModelIdentity(name="m", architecture="A", layers=4, heads=4, kv_heads=2, head_dim=8, digest="d")
TABLES: list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = [
    ((0,), {}),
    ((0,), {1: (1, 0), 2: (0, 0)}),
    ((0, 2), {1: (1, 1)}),
    ((0, 1), {2: (1, 0)}),
]


def tensors(seed: int, heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 1, layers: int = 3) -> Layers:
    """float64 q, k, v of each layer; keys of some positions are strong."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = []
    for _ in range(layers):
        k = random(batch, heads[1], kv_len, 8) * (1 + random(batch, heads[1], kv_len, 1).abs())
        made.append((random(batch, heads[0], q_len, 8) * 1.5, k, random(batch, heads[1], kv_len, 6)))
    return made


CALLS = calls([(2, 2), (4, 2), (6, 2)], 110, 70, tensors)
PARAMETERS = st.builds(
    oracle.Parameters,
    topk=st.sampled_from([0.0, 1.0]) | st.floats(0.02, 0.95),
    least=st.integers(1, 20),
    tile=st.integers(2, 32),
    sampled=st.none() | st.integers(1, 40),
    dense_layers=st.integers(0, 2),
)


def build(anchors: tuple[int, ...], maps: dict[int, tuple[int, ...]], p: oracle.Parameters, **more: Any) -> sp.Pipeline:
    made: sp.Pipeline = sp.build("kascade", anchors=AnchorTable(anchors=anchors, maps=maps), **vars(p), **more)
    return made


def chosen_of(result: sp.Result) -> Chosen:
    return next(note for note in result.plan.notes.values() if isinstance(note, Chosen))


@settings(deadline=None)
@given(made=CALLS, p=PARAMETERS, table=st.sampled_from(TABLES))
def test_equals_the_oracle(made: tuple[Layers, dict[str, Any]], p: oracle.Parameters, table: Any) -> None:
    layers, options = made
    expected = oracle.kascade(layers, table[0], p, table[1], **options)
    found = run(layers, build(table[0], table[1], p), **options)
    for layer, (truth, result) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(truth.mask, result.mask.to_dense())
        torch.testing.assert_close(truth.out, result.out, rtol=1e-12, atol=1e-12)
        assert chosen_of(result).layer == (None if layer < p.dense_layers else truth.of)
        assert chosen_of(result).note == ""


@pytest.mark.parametrize("tile", [128, 256])
def test_query_tiles_of_128_may_share_their_columns(tile: int) -> None:
    """A tile of two query tiles of the mask; the sums of a slab at a time."""
    layers = tensors(3, (2, 1), 700, 700, layers=2)
    p = oracle.Parameters(topk=0.1, least=32, tile=tile, sampled=3)
    expected = oracle.kascade(layers, (0,), p)
    found = run(layers, build((0,), {}, p))
    assert found[1].mask.tile_q == 128
    assert found[1].mask.group == tile // 128
    assert all(torch.equal(a.mask, b.mask.to_dense()) for a, b in zip(expected, found, strict=True))


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.plugins.kascade import sums

    layers = tensors(5, (4, 2), 300, 320, layers=1)
    p = oracle.Parameters(topk=0.2, least=8, tile=16, dense_layers=0)
    whole = run(layers, build((0,), {}, p))[0].mask.to_dense()
    monkeypatch.setattr(sums, "SLAB", 2 * 8 * 320 * 3)
    assert torch.equal(whole, run(layers, build((0,), {}, p))[0].mask.to_dense())


@settings(deadline=None)
@given(
    seed=st.integers(0, 999), cuts=st.lists(st.integers(1, 7), max_size=3, unique=True),
    sampled=st.sampled_from([None, 1, 5]),
)  # fmt: skip
def test_chunks_change_nothing(seed: int, cuts: list[int], sampled: int | None) -> None:
    """Cut at tiles."""
    layers = tensors(seed, (4, 2), 130, 130)
    p = oracle.Parameters(topk=0.3, least=4, tile=16, sampled=sampled)
    pipeline = build(*TABLES[2], p)
    whole = run(layers, pipeline)
    bounds = [0, *sorted(16 * cut for cut in cuts), 130]
    memory = sp.Memory()
    for first, behind in pairwise(bounds):
        part = [(q[:, :, first:behind], k[:, :, :behind], v[:, :, :behind]) for q, k, v in layers]
        for expected, found in zip(whole, run(part, pipeline, memory, q_offset=first), strict=True):
            rows = slice(first, behind)
            assert torch.equal(expected.mask.to_dense()[:, :, rows, :behind], found.mask.to_dense())
            torch.testing.assert_close(expected.out[:, :, rows], found.out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", [{"starts": [0, 3]}, {"lengths": [5, 2]}])
def test_tiles_beyond_the_last_key_choose_none(padding: dict[str, list[int]]) -> None:
    """Their share, rounded up, may be more keys than there are."""
    made = torch.randn(3, 2, 1, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows: dict[str, Any] = {name: torch.tensor(values, dtype=torch.int32) for name, values in padding.items()}
    call = sp.AttentionCall(*made, **rows)
    mask = sp.build("kascade", anchors=(0,), dense_layers=0, topk=0.1, least=8, tile=16).plan(call, sp.Memory()).mask
    assert mask.stripes is not None
    assert not mask.stripes.counts.any()
    assert torch.equal(mask.to_dense(), sp.SparseMask.full(call, 16).to_dense())


@pytest.mark.parametrize("workspace", [1, 150_000])
@pytest.mark.parametrize("table", TABLES)
def test_parts_by_heads_and_rows_change_nothing(table: Any, workspace: int) -> None:
    """A layer in parts keeps the choice of each; the heads of one follow heads of another."""
    layers = tensors(2, (4, 2), 4500, 4500, layers=3)
    layers = [(q.float(), k.float(), v.float()) for q, k, v in layers]
    p = oracle.Parameters(topk=0.1, least=64, tile=64, sampled=2)
    pipeline = build(table[0], table[1], p)
    whole = run(layers, pipeline)
    parts = run(layers, evolve(pipeline, workspace=workspace))
    assert all(result.parts is not None and result.parts.count >= 2 for result in parts[1:])
    for expected, found in zip(whole, parts, strict=True):
        torch.testing.assert_close(expected.out, found.out, rtol=1e-5, atol=1e-5)
        assert abs(expected.density - found.density) < 1e-3


def test_a_layer_without_its_anchor_chooses_for_itself_and_says_so() -> None:
    layers = tensors(4, (4, 2), 90, 90)
    p = oracle.Parameters(topk=0.2, least=4, tile=8, dense_layers=0)
    pipeline, memory = build((0,), {1: (1, 0)}, p), sp.Memory()
    alone = pipeline.run(sp.AttentionCall(*layers[1], layer=1), memory)
    assert chosen_of(alone).layer == 1
    assert chosen_of(alone).note == "layer 0, its anchor, has chosen nothing in this pass"
    assert torch.equal(oracle.kascade(layers[1:], (0,), p)[0].mask, alone.mask.to_dense())
    assert len(memory) == 0  # and nobody takes it from there
    run(layers, pipeline, memory)
    again = pipeline.run(sp.AttentionCall(*layers[1], layer=1), memory)  # the pass is over: layer 2 came already
    assert "has chosen nothing" in chosen_of(again).note
    other = pipeline.run(sp.AttentionCall(*(x[:, :, :80] for x in layers[2]), layer=2), memory)
    assert "has chosen nothing" in chosen_of(other).note  # another call


def test_heads_of_an_anchor_on_another_device_are_followed_by_number() -> None:
    """Under tensor parallelism each device holds some KV heads; what it does not hold it cannot take."""
    layers = tensors(4, (4, 2), 90, 90, layers=2)
    p = oracle.Parameters(topk=0.2, least=4, tile=8)
    pipeline, memory = build((0,), {1: (0, 0)}, p), sp.Memory()
    mine = [(q[:, 2:], k[:, 1:], v[:, 1:]) for q, k, v in layers]
    results = [pipeline.run(sp.AttentionCall(*qkv, layer=i, first_head=2), memory) for i, qkv in enumerate(mine)]
    expected = oracle.kascade(mine, (0,), p)
    assert all(torch.equal(a.mask, b.mask.to_dense()) for a, b in zip(expected, results, strict=True))
    assert chosen_of(results[1]).note.startswith("KV heads [0] of layer 0 are not on this device")


def test_a_choice_is_kept_for_one_pass_and_only_where_a_layer_follows() -> None:
    layers = tensors(7, (4, 2), 90, 90)
    p = oracle.Parameters(topk=0.2, least=4, tile=8)
    memory = sp.Memory()
    run(layers, build((0, 1, 2), {}, p), memory)
    table = AnchorTable(anchors=(0, 1, 3), model=IDENTITY)
    assert [layer for layer in range(4) if table.followed(layer)] == [1]
    kept: list[Kept] = list(memory._slots.values())
    assert [one.layer for one in kept] == [2]  # no table says how many layers there are, so the last one's is kept
    first = kept[0].found
    short = [(q[:, :, :60], k[:, :, :60], v[:, :, :60]) for q, k, v in layers]
    run(short, build((0, 1, 2), {}, p), memory)
    assert first is kept[0].found
    assert len(first) == 1


def test_threads_do_not_meet() -> None:
    from concurrent.futures import ThreadPoolExecutor

    p = oracle.Parameters(topk=0.2, least=4, tile=8)
    pipeline = build(*TABLES[1], p)
    requests = [tensors(seed, (4, 2), 96, 96) for seed in range(6)]
    expected = [[result.mask.to_dense() for result in run(layers, pipeline)] for layers in requests]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda layers: [result.mask.to_dense() for result in run(layers, pipeline)], requests))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_its_priority_is_the_mean_share_of_a_key() -> None:
    """Over all rows and keys of a tile it is the attention itself."""
    layers = tensors(9, (4, 2), 50, 64, layers=1)
    call = sp.AttentionCall(*layers[0])
    plan = sp.build("kascade", anchors=(0,), tile=16, sampled=None).plan(call, sp.Memory())
    assert plan.priority is not None
    q, k, _ = layers[0]
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    mass = logits.masked_fill(~call.geometry.visible()[:, None], -torch.inf).softmax(-1)
    by_group = mass.unflatten(1, (2, 2)).mean(2).repeat_interleave(2, 1)
    tiles = [range(0, 2), range(2, 18), range(18, 34), range(34, 50)]
    expected = torch.stack([by_group[:, :, list(rows)].mean(2) for rows in tiles], 2)
    position = torch.tensor([[14, 16, 32, 63]])
    for heads in (slice(0, 4), slice(1, 3), slice(3, 4)):
        torch.testing.assert_close(expected[:, heads], plan.priority.column_scores(call, position, heads))
    whole = expected.unflatten(3, (-1, 16)).mean(-1)
    torch.testing.assert_close(whole, plan.priority.tile_scores(call, 16, 16))


@pytest.mark.parametrize("parameters", [{"sampled": None}, {"tile": 32, "topk": 0.4}], ids=str)
def test_contracts_hold(parameters: dict[str, Any]) -> None:
    small = dict(sp.default_registry().get("kascade").small)
    report = check_method("kascade", parameters={**small, **parameters})
    assert {"repeated == plain"} == set(report.skipped), "it keeps memory"


def test_contracts_hold_with_a_layer_that_follows() -> None:
    """All laws with a call of layer 1 alone, and parts of layers 0 and 1."""
    calls = [
        sp.AttentionCall(*(x.float() for x in tensors(seed, (4, 2), 97, 97, layers=1)[0]), layer=layer)
        for seed, layer in ((0, 0), (1, 1))
    ]
    small = {**sp.default_registry().get("kascade").small, "anchors": AnchorTable(anchors=(0,), maps={1: (1, 0)})}
    check_method("kascade", calls=calls, parameters=small)


def test_a_table_of_another_model_is_refused() -> None:
    layers = tensors(0, (4, 2), 20, 20, layers=1)
    pipeline = sp.build("kascade", anchors=AnchorTable(anchors=(0,), model=IDENTITY))
    pipeline.run(sp.AttentionCall(*layers[0], layer=3))
    with pytest.raises(sp.UnsupportedCallError, match=r"for another model: model\.layers is 4"):
        pipeline.run(sp.AttentionCall(*layers[0], layer=4))
    with pytest.raises(sp.ParameterError, match=r"for another model: model\.layers is 4"):
        pipeline.check_model(evolve(IDENTITY, layers=5))
    pipeline.check_model(evolve(IDENTITY, name="other"))


@pytest.mark.parametrize(
    ("heads", "first", "words"),
    [
        ((0,), 0, r"maps\[1\] is \[0\], the call has 2 KV heads: pass one number for each KV head"),
        ((1, 0, 1), 0, r"maps\[1\] is \[1, 0, 1\], the call has 2 KV heads"),
        ((1, 0), 4, r"maps\[1\] is \[1, 0\], the call has KV heads 2 to 3"),
    ],
)
def test_a_map_of_another_number_of_heads_is_refused(heads: tuple[int, ...], first: int, words: str) -> None:
    pipeline = sp.build("kascade", anchors=AnchorTable(anchors=(0,), maps={1: heads}))
    call = sp.AttentionCall(*tensors(0, (4, 2), 20, 20, layers=1)[0], layer=1, first_head=first)
    with pytest.raises(sp.UnsupportedCallError, match=words):
        pipeline.run(call)
    pipeline.run(evolve(call, layer=2))


@pytest.mark.parametrize("heads", [(0, 7), (2, 0), (1,), (-1, 0)])
def test_a_map_to_heads_that_no_model_has_is_refused(heads: tuple[int, ...]) -> None:
    with pytest.raises(sp.ParameterError, match=r"maps\[1\] is \[.*: pass a KV head of the anchor for each of its own"):
        AnchorTable(anchors=(0,), maps={1: heads})


def test_a_map_of_the_whole_model_serves_a_share_of_its_heads() -> None:
    pipeline = sp.build("kascade", anchors=AnchorTable(anchors=(0,), maps={1: (1, 0, 3, 2)}))
    call = sp.AttentionCall(*tensors(0, (4, 2), 20, 20, layers=1)[0], layer=1)
    assert () == pipeline.unsupported(call) == pipeline.unsupported(evolve(call, first_head=4))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = AnchorTable(anchors=(0, 2), maps={1: (1, 1), 3: (0, 1)}, model=IDENTITY, made={"tokens": 5})
    path = tmp_path / "anchors.json"
    path.write_text(table.to_json())
    assert table == TABLE.read(path)
    estimator = sp.build("kascade", anchors=str(path)).estimator
    assert isinstance(estimator, Kascade)
    assert table == estimator.anchors
    assert tuple(map(table.anchor_of, range(4))) == (0, 0, 2, 2)
    assert (table.heads(1, 0, 2), table.heads(2, 0, 2), table.heads(3, 1, 1)) == ((1, 1), (0, 1), (1,))
