"""Laws of SparseMask: union, dense form, density, one head, lists."""

from __future__ import annotations

import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from sparseprefill.call import AttentionCall
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.testing import allowed_pairs, calls, masks

CALLS = calls(max_len=80, max_heads=4, head_dims=(1,))
DATA = st.data()


def same(a: SparseMask, b: SparseMask) -> None:
    assert torch.equal(a.to_dense(), b.to_dense())


def pairs(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Position on its row's grid of every query ``[B, Nq]`` and key ``[B, Nkv]``, from the fields alone."""
    batch, q_len, kv_len = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    offset = kv_len - q_len if call.q_offset is None else call.q_offset
    start = torch.zeros(batch, dtype=torch.int64) if call.starts is None else call.starts.long()
    key = torch.arange(kv_len) - start[:, None]
    return torch.arange(q_len) + offset - start[:, None], key


@given(call=CALLS, data=DATA)
def test_union_is_the_or_of_the_dense_forms(call: AttentionCall, data: st.DataObject) -> None:
    a, b = data.draw(masks(call)), data.draw(masks(call))
    assert torch.equal(a.to_dense() | b.to_dense(), (a | b).to_dense())
    same(a | b, b | a)
    (a | b).check()


@given(call=CALLS, data=DATA)
def test_union_is_idempotent_and_has_a_neutral(call: AttentionCall, data: st.DataObject) -> None:
    a = data.draw(masks(call, diagonal=False))
    same(a, a | a)
    same(a, a | SparseMask.empty(call, 8))
    same(a, SparseMask.empty(call, 8) | a)
    same(SparseMask.full(call, 16), a | SparseMask.full(call, 24))


@given(call=CALLS, data=DATA)
def test_union_is_associative(call: AttentionCall, data: st.DataObject) -> None:
    a, b, c = (data.draw(masks(call)) for _ in range(3))
    same((a | b) | c, a | (b | c))


@given(call=CALLS, data=DATA)
def test_dense_form_is_allowed_and_keeps_the_diagonal(call: AttentionCall, data: st.DataObject) -> None:
    keep, allowed = data.draw(masks(call)).to_dense(), allowed_pairs(call)[:, None]
    assert bool((allowed | ~keep).all())
    assert bool((keep.any(-1) == allowed.any(-1)).all())


@given(call=CALLS, data=DATA)
def test_density_counts_the_dense_form(call: AttentionCall, data: st.DataObject) -> None:
    mask = data.draw(masks(call, diagonal=False))
    allowed = int(allowed_pairs(call).sum()) * call.q.shape[1]
    assert (int(mask.to_dense().sum()) / allowed if allowed else 0.0) == mask.density
    stripes = evolve(mask, tiles=None).to_dense()
    assert (int(stripes.sum()) / allowed if allowed else 0.0) == mask.stripe_density


@given(call=CALLS, data=DATA)
def test_one_head_is_that_slice(call: AttentionCall, data: st.DataObject) -> None:
    mask = data.draw(masks(call))
    batch, head = data.draw(st.integers(0, call.q.shape[0] - 1)), data.draw(st.integers(0, call.q.shape[1] - 1))
    expected = mask.to_dense()[batch, head]
    assert torch.equal(expected, mask.head(batch, head).to_dense()[0, 0])


@given(call=CALLS, data=DATA, seed=st.integers(0, 999), share=st.sampled_from([0.0, 0.2, 0.8, 1.0]))
def test_tiles_against_pair_by_pair(call: AttentionCall, data: st.DataObject, seed: int, share: float) -> None:
    tile_q, tile_k = (data.draw(st.sampled_from([1, 5, 8, 64])) for _ in range(2))
    g = call.geometry
    shape = (g.batch, g.heads, g.tile_rows(tile_q), g.tile_columns(tile_k))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    query, key = pairs(call)
    row = query // tile_q - (query[:, :1] // tile_q)
    column = (key // tile_k).clamp(min=0)
    expected = torch.stack([keep[b][:, row[b]][:, :, column[b]] for b in range(g.batch)])
    expected = expected & allowed_pairs(call)[:, None]
    mask = SparseMask.from_tiles(call, keep, (tile_q, tile_k), diagonal=False)
    assert torch.equal(expected, mask.to_dense())
    mask.check()


@given(call=CALLS, data=DATA, seed=st.integers(0, 999), share=st.sampled_from([0.0, 0.1, 0.6, 1.0]))
def test_stripes_against_pair_by_pair(call: AttentionCall, data: st.DataObject, seed: int, share: float) -> None:
    tile, group = data.draw(st.sampled_from([1, 6, 16])), data.draw(st.integers(1, 4))
    width = data.draw(st.sampled_from([size for size in (1, 2, 3, 16) if tile % size == 0]))
    g = call.geometry
    shape = (g.batch, g.heads, g.tile_rows(tile * group), -(-g.kv_len // width))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    query, key = pairs(call)
    row = query // (tile * group) - (query[:, :1] // (tile * group))
    expected = torch.stack([keep[b][:, row[b]][:, :, key[b].clamp(min=0) // width] for b in range(g.batch)])
    expected = expected & allowed_pairs(call)[:, None]
    mask = SparseMask.from_stripes(call, keep, group, tile, width=width, diagonal=False)
    assert torch.equal(expected, mask.to_dense())
    assert torch.equal(keep, mask.stripe_map(width))
    mask.check()
    for finer in (size for size in range(1, width + 1) if width % size == 0):
        other = mask.with_stripe_width(finer)
        other.check()
        same(mask, other)
        assert torch.equal(mask.stripe_map(finer), other.stripe_map(finer))


@given(call=CALLS, data=DATA)
def test_of_two_widths_the_finer_one_is_that_of_the_union(call: AttentionCall, data: st.DataObject) -> None:
    a, b = (data.draw(masks(call, kinds=("stripes", "both"), tiles=(16, 64))) for _ in range(2))
    assert min(a.stripe_width, b.stripe_width) == (a | b).stripe_width
    assert min(a.stripe_width, b.stripe_width) == (a - b).stripe_width
    for part in {1, 16} - {a.stripe_width}:
        if a.stripe_width % part == 0:
            same(a, a.with_stripe_width(part) | a)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9)),
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_lists_round_trip(shape: tuple[int, ...], seed: int, share: float) -> None:
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    lists = IndexLists.from_map(keep)
    assert torch.equal(keep, lists.to_map(shape[-1]))
    assert torch.equal(keep.sum(-1, dtype=torch.int32), lists.counts)
    for b, h, r in torch.cartesian_prod(*(torch.arange(n) for n in shape[:3])).tolist():
        assert torch.nonzero(keep[b, h, r])[:, 0].tolist() == lists.row(b, h, r).tolist()


@given(
    cuts=st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4).map(sorted), min_size=1, max_size=4),
    heads=st.integers(1, 3),
)
def test_ranges_against_python(cuts: list[list[int]], heads: int) -> None:
    bounds = torch.tensor([cuts])
    lists = IndexLists.from_ranges(bounds[..., 0::2], bounds[..., 1::2], heads, 20)
    for row, (a, b, c, d) in enumerate(cuts):
        assert [*range(a, b), *range(c, d)] == lists.row(0, heads - 1, row).tolist()
