"""Masks in other kernels' formats: the same pairs, the same output, full blocks told from partial ones."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from helpers.build import int32, make, random_mask
from helpers.lookups import strict
from sparseprefill import AttentionCall, Plan, ReferenceExecutor, SparseMask, StrideRescue
from sparseprefill.mask import export
from sparseprefill.mask.export import Fa4Lists
from sparseprefill.mask.lists import IndexLists
from sparseprefill.testing import calls, masks, tensors
from sparseprefill.testing.truth import difference

flex = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CALLS = calls(max_len=131, max_heads=4, max_batch=2, head_dims=(8, 16), features=False)
BLOCKS = st.sampled_from([(16, 16), (128, 128), (8, 24), (48, 16), (1, 7)])
DATA = st.data()


@st.composite
def windowed(draw: st.DrawFn) -> AttentionCall:
    call = draw(CALLS)
    return evolve(call, window=draw(st.one_of(st.none(), st.integers(1, call.kv_len + 1)), label="window"))


def blocks_of(keep: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which blocks of bool ``[B, H, Nq, Nkv]`` hold some pair but not all, and which hold every pair."""
    short = [(-n) % part for n, part in zip(keep.shape[2:], size, strict=True)]
    parts = functional.pad(keep, (0, short[1], 0, short[0])).unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0]))
    some, every = parts.any(5).any(3), parts.all(5).all(3)
    return some & ~every, every


def decoded(counts: Tensor, indices: Tensor, heads: int) -> Tensor:
    """Lists as a map, by plain loops; of one head those of all."""
    keep = torch.zeros(indices.shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        mine = indices[tuple(at)][: counts[tuple(at)]].tolist()
        assert sorted(set(mine)) == mine
        keep[tuple(at)][mine] = True
    return keep.expand(-1, heads, -1, -1)


@given(call=windowed(), data=DATA)
def test_flex_attention_gives_our_output(call: AttentionCall, data: st.DataObject) -> None:
    """Without the half second in which PyTorch traces each call; the next test but one leaves that in."""
    mask = data.draw(masks(call, diagonal=data.draw(st.booleans())))
    block = mask.to_flex(data.draw(BLOCKS, label="block"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        out = flex.flex_attention(call.q, call.k, call.v, block_mask=block, scale=call.softmax_scale, enable_gqa=True)
    assert difference(ReferenceExecutor().execute(call, Plan(mask)).out, out, torch.float32) is None


@given(call=windowed(), data=DATA)
def test_flex_blocks_are_full_partial_or_left_out(call: AttentionCall, data: st.DataObject) -> None:
    mask = data.draw(masks(call, diagonal=data.draw(st.booleans())))
    size = data.draw(BLOCKS, label="block")
    with pytest.MonkeyPatch.context() as patch:
        strict(patch)
        made, keep, heads = mask.to_flex(size), mask.to_dense(), call.q.shape[1]
    assert size == made.BLOCK_SIZE
    assert (call.q.shape[2], call.kv_len) == made.seq_lengths
    partial, full = blocks_of(keep, size)
    assert torch.equal(partial, decoded(made.kv_num_blocks, made.kv_indices, heads))
    assert made.full_kv_num_blocks is not None
    assert made.full_kv_indices is not None
    assert torch.equal(full, decoded(made.full_kv_num_blocks, made.full_kv_indices, heads))
    pairs = flex.create_mask(made.mask_mod, call.q.shape[0], heads, call.q.shape[2], call.kv_len, device="cpu")
    assert torch.equal(keep, pairs)


@pytest.mark.parametrize("starts", [(0, 0), (0, 3), (8, 0), (16, 5)])
@pytest.mark.parametrize("block", [(4, 4), (5, 3), (8, 8), (24, 16)])
@pytest.mark.parametrize(("rows", "tile", "group"), [(12, 8, 2), (5, 4, 1), (1, 4, 1)])
def test_tiles_that_end_with_the_keys(
    rows: int, tile: int, group: int, starts: tuple[int, int], block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's tiles begin at its start, so that one may begin where the keys end, or before they begin; with few
    query rows some cells hold none, and lie in no group of stripes."""
    strict(monkeypatch)
    call = make(rows, 16, batch=2, starts=int32(*starts))
    mask = random_mask(call, "both", (tile, tile), group, seed=0)
    block_mask = mask.to_flex(block)
    partial, full = blocks_of(mask.to_dense(), block)
    assert block_mask.full_kv_num_blocks is not None
    assert block_mask.full_kv_indices is not None
    assert torch.equal(partial, decoded(block_mask.kv_num_blocks, block_mask.kv_indices, 2))
    assert torch.equal(full, decoded(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, 2))


def test_cells_are_few() -> None:
    """Of 2 rows of 70 tokens: 4 blocks and at most 6 tiles of 13, and no more than one of them in vain."""
    cells = export._Cells.of(torch.tensor([0, -9]), 70, 20, 13, torch.device("cpu"))
    assert (2, 4 + 6) == tuple(cells.first.shape)


def test_a_group_without_wide_columns_may_begin_anywhere() -> None:
    """Columns of 4 tokens; the lists of the second group are behind all indices."""
    call = make(16)
    lists = IndexLists.from_map(torch.tensor([[True, True, False, False], [False] * 4]).expand(1, 2, 2, 4))
    mask = SparseMask(call.geometry, 8, 8, None, 1, lists, stripe_width=4)
    offsets = lists.offsets.clone()
    offsets[:, :, 1] = 99
    beyond = evolve(mask, stripes=evolve(lists, offsets=offsets))
    beyond.check()
    expected, found = mask.to_flex(4), beyond.to_flex(4)
    assert torch.equal(expected.to_dense(), found.to_dense())
    assert expected.full_kv_num_blocks is not None
    assert found.full_kv_num_blocks is not None
    assert torch.equal(expected.full_kv_num_blocks, found.full_kv_num_blocks)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 257, 383])
@pytest.mark.parametrize("kind", ["full", "tiles", "stripes"])
def test_flex_attention_at_the_edges_of_a_tile(length: int, kind: str) -> None:
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=length, kv_len=length, head_dim=16)
    call = AttentionCall(q, k, v)
    mask = made(call, kind)
    out = flex.flex_attention(q, k, v, block_mask=mask.to_flex(), enable_gqa=True)
    assert difference(ReferenceExecutor().execute(call, Plan(mask)).out, out, torch.float32) is None


def made(call: AttentionCall, kind: str, tile: int = 128) -> SparseMask:
    g = call.geometry
    source = torch.Generator().manual_seed(g.kv_len)
    if kind == "full":
        return SparseMask.full(call, tile)
    columns = g.tile_columns(tile) if kind == "tiles" else g.kv_len
    keep = (torch.rand(g.batch, g.heads, g.tile_rows(tile), columns, generator=source) < 0.4).to(g.device)
    return (SparseMask.from_tiles if kind == "tiles" else SparseMask.from_stripes)(call, keep, tile=tile)


def simple(length: int = 300, **fields: Any) -> AttentionCall:
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=length, kv_len=length, head_dim=16)
    return AttentionCall(q, k, v, **fields)


def test_heads_with_the_same_lists_share_them() -> None:
    call = simple()
    everyone = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    for mask in (SparseMask.full(call), SparseMask.from_tiles(call, everyone), SparseMask.from_rules(call, sink=1)):
        assert mask.to_flex().shape == (1, 1, 300, 300)
        assert mask.to_fa4().mask_block_idx.shape == (1, 1, 3, 3)
    apart = StrideRescue(2).refine(call, Plan(SparseMask.empty(call)), None).mask  # type: ignore[arg-type]
    assert apart.to_flex().shape == (1, 4, 300, 300)
    columns = SparseMask.from_stripes(call, torch.ones(1, 1, 1, 300, dtype=torch.bool))
    assert columns.to_flex().shape[1] in (1, 4)
    assert torch.equal(columns.to_dense(), flex.create_mask(columns.to_flex().mask_mod, 1, 4, 300, 300, device="cpu"))


def test_stripes_that_fill_a_block_make_it_full() -> None:
    call = simple()
    keep = torch.zeros(1, 1, 1, 300, dtype=torch.bool)
    keep[..., 16:32] = True
    block_mask = SparseMask.from_stripes(call, keep, tile=16, diagonal=False).to_flex(16)
    assert block_mask.full_kv_num_blocks is not None
    block = block_mask.full_kv_num_blocks[0, 0, :4].tolist(), block_mask.kv_num_blocks[0, 0, :4].tolist()
    assert ([0, 0, 1, 1], [0, 1, 0, 0]) == block


@st.composite
def carried(draw: st.DrawFn) -> AttentionCall:
    """Calls whose blocks FlashAttention-4 can hold: no left padding."""
    call = draw(calls(max_len=131, max_heads=4, max_batch=2, head_dims=(8,), features=False, padding=("none", "right")))
    return evolve(call, window=draw(st.one_of(st.none(), st.integers(1, call.kv_len + 1)), label="window"))


def divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


@given(call=carried(), data=DATA)
def test_fa4_lists_hold_the_same_pairs(call: AttentionCall, data: st.DataObject) -> None:
    mask = data.draw(masks(call, kinds=("tiles", "full"), diagonal=data.draw(st.booleans())))
    g = call.geometry
    fits = [n for n in divisors(mask.tile_q) if g.q_offset % n == 0]
    size = (data.draw(st.sampled_from(fits)), data.draw(st.sampled_from(divisors(mask.tile_k))))
    lists = mask.to_fa4(size)
    keep = paired(lists, call)
    real = g.real_queries()[:, None, :, None]
    assert torch.equal(mask.to_dense(), keep & real)
    if g.lengths is None:  # no block is partial without need: rows beyond the last query need no mask
        beyond = functional.pad(keep, (0, 0, 0, -g.q_len % size[0]), value=True)
        full = blocks_of(beyond, size)[1] & (blocks_of(keep, size)[0] | blocks_of(keep, size)[1])
        assert torch.equal(full, decoded(lists.full_block_cnt, lists.full_block_idx, g.heads))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_few_heads_at_a_time_give_the_same(batch: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """heads: of the lists; one list may stand for all heads."""
    call = AttentionCall(*tensors("random", batch=batch, heads=4, kv_heads=2, q_len=58, kv_len=90, head_dim=8))
    keep = torch.rand(batch, heads, 8, 12, generator=torch.Generator().manual_seed(0)) < 0.4
    columns = torch.rand(batch, heads, 4, 90, generator=torch.Generator().manual_seed(1)) < 0.3
    tiles = SparseMask.from_tiles(call, keep, 8, diagonal=False)
    both = tiles | SparseMask.from_stripes(call, columns, 2, 8, diagonal=False)
    whole = tiles.to_fa4(), both.to_flex(8)
    monkeypatch.setattr(export, "ENTRIES", 1)
    parts = tiles.to_fa4(), both.to_flex(8)
    for name in ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"):
        assert torch.equal(getattr(whole[0], name), getattr(parts[0], name))
    assert torch.equal(whole[1].to_dense(), parts[1].to_dense())
    assert torch.equal(whole[1].kv_indices, parts[1].kv_indices)


def test_an_offset_that_a_smaller_block_divides_is_carried() -> None:
    call = evolve(simple(), q=simple().q[:, :, :236])
    assert call.geometry.q_offset == 64
    mask = made(call, "tiles")
    assert torch.equal(mask.to_dense(), paired(mask.to_fa4(64), call))


def paired(lists: Fa4Lists, call: AttentionCall) -> Tensor:
    """bool ``[B, H, Nq, Nkv]`` as FlashAttention-4 reads the lists, its mask_mod being causality and window."""
    g, (tile_q, tile_k) = call.geometry, lists.block_size
    assert {torch.int32} == {x.dtype for x in lists[:4]}
    partial = decoded(lists.mask_block_cnt, lists.mask_block_idx, g.heads)
    full = decoded(lists.full_block_cnt, lists.full_block_idx, g.heads)
    assert not (partial & full).any()
    partial, full = (
        x.repeat_interleave(tile_q, 2)[:, :, : g.q_len].repeat_interleave(tile_k, 3)[..., : g.kv_len]
        for x in (partial, full)
    )
    distance = torch.arange(g.q_len)[:, None] + g.q_offset - torch.arange(g.kv_len)
    allowed = (distance >= 0) if g.window is None else (distance >= 0) & (distance < g.window)
    return full | (partial & allowed)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles for a CPU with g++")
def test_compiled_flex_attention_reads_the_blocks() -> None:
    """The kernel that PyTorch makes for a CPU visits the blocks of the lists alone."""
    call = simple(385)
    mask = made(call, "tiles") | made(call, "stripes")
    compiled: Any = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)
    out = compiled(call.q, call.k, call.v, block_mask=mask.to_flex(), enable_gqa=True)
    assert difference(ReferenceExecutor().execute(call, Plan(mask)).out, out, torch.float32) is None


@pytest.fixture
def _no_syncs() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


GPU_CALLS = [(1000, 1000, {}), (1024, 1024, {"window": 300}), (513, 1200, {"starts": [0, 77], "lengths": [1200, 999]})]


def on_gpu(q_len: int, kv_len: int, fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> AttentionCall:
    q, k, v = tensors(
        "random", batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=128, device="cuda", dtype=dtype
    )
    rows: dict[str, Any] = {
        name: torch.tensor(value, dtype=torch.int32, device="cuda") if isinstance(value, list) else value
        for name, value in fields.items()
    }
    return AttentionCall(q, k, v, **rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "tiles", "stripes"])
@pytest.mark.parametrize(("q_len", "kv_len", "fields"), GPU_CALLS)
def test_compiled_flex_attention_on_a_gpu(q_len: int, kv_len: int, fields: dict[str, Any], kind: str) -> None:
    call = on_gpu(q_len, kv_len, fields)
    mask = made(call, kind)
    torch._dynamo.reset()  # each mask is a graph of its own, and a process may hold few
    compiled: Any = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)
    out = compiled(call.q, call.k, call.v, block_mask=mask.to_flex(), enable_gqa=True)
    assert difference(ReferenceExecutor().execute(call, Plan(mask)).out, out, torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "tiles"])
def test_flash_attention_4_reads_the_lists(kind: str) -> None:
    interface = pytest.importorskip("flash_attn.cute")
    from sparseprefill.plugins.libraries.causal import causal

    sparsity = pytest.importorskip("flash_attn.cute.block_sparsity")
    call = on_gpu(1000, 1000, {})
    mask = made(call, kind)
    lists = mask.to_fa4()._asdict()
    found = interface.flash_attn_func(
        *(x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v)),
        mask_mod=causal(),
        pack_gqa=False,
        block_sparse_tensors=sparsity.BlockSparseTensorsTorch(**lists),
    )
    out = (found[0] if isinstance(found, tuple) else found).transpose(1, 2)
    assert difference(ReferenceExecutor().execute(call, Plan(mask)).out, out, torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
@pytest.mark.usefixtures("_no_syncs")
@pytest.mark.parametrize("kind", ["full", "tiles"])
def test_lists_are_made_without_waiting_for_the_device(kind: str) -> None:
    call = on_gpu(1000, 1000, {})
    mask = made(call, kind)
    mask.to_fa4()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    mask.to_fa4()
