"""SharePrefill's kernels against plain PyTorch: choice of heads, tiles by choice, maps and renewal of pivots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.share_prefill import kernels
from sparseprefill.plugins.share_prefill import pivots as decide
from sparseprefill.plugins.share_prefill.heads import NEVER, LayerHeads, index
from sparseprefill.plugins.share_prefill.pivots import Choice, Pivots
from torch import Tensor

from helpers.build import among
from kernels.device import CUDA, DEVICE
from sparseprefill import AttentionCall
from sparseprefill.mask.geometry import Geometry
from sparseprefill.statistics.sampled import last_rows, seen_blocks

LAYER = 4
LABELS: list[tuple[tuple[int, ...], tuple[bool, ...]]] = [
    ((0,), (True,)),
    ((0, 0, 0, 0), (True, True, True, True)),
    ((-1, 1, 0, 1), (False, True, False, True)),
    ((2, -1, 2, 0, 1, 1), (False, False, True, True, True, True)),
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"window": 50},
    {"starts": (0, 60)},
    {"lengths": (190, 7)},
    {"starts": (3, 0), "lengths": (60, 100), "window": 31},
]


def geometry_of(heads: int, q_len: int, kv_len: int, fields: dict[str, Any]) -> Geometry:
    rows = {name: torch.tensor(x, dtype=torch.int32) if isinstance(x, tuple) else x for name, x in fields.items()}
    return Geometry(2, heads, q_len, kv_len, kv_len - q_len, torch.device("cpu"), **among(kv_len, rows))


def moved(x: Any) -> Any:
    """A frozen object with its tensors on the device."""
    tensors: dict[str, Any] = {k: v.to(DEVICE) for k, v in vars_of(x).items() if isinstance(v, Tensor)}
    if isinstance(x, Geometry):
        tensors["device"] = torch.device(DEVICE)
    return evolve(x, **tensors)


def vars_of(x: Any) -> dict[str, Any]:
    return {name: getattr(x, name) for name in ("starts", "lengths", "made", "last", "packed", "flags", "own") if
            hasattr(x, name)}  # fmt: skip


def pivots_of(generator: torch.Generator, geometry: Geometry, block: int, near: Tensor) -> Pivots:
    """Three clusters, of five: without a pivot, with one of this layer, one of an earlier layer; those for which a head
    of this layer, or of an earlier one, ran dense and was narrowed."""
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    kinds = torch.tensor([NEVER, LAYER, 1, NEVER - 1 - LAYER, NEVER - 2])
    made = torch.stack([kinds[torch.randperm(5, generator=generator)[:3]] for _ in range(2)])
    last = decide.shares(near[:, :1] + 0.1 * torch.rand(2, 3, columns, generator=generator))
    packed = torch.randint(256, (2, 3, rows, -(-columns // 8)), generator=generator, dtype=torch.uint8)
    return Pivots((), (0, 0), made.to(torch.int32), last, packed)


@settings(max_examples=100 if CUDA else 25)
@given(
    seed=st.integers(0, 9999),
    lengths=st.tuples(st.sampled_from([1, 16, 127, 128, 129, 251]), st.sampled_from([0, 77, 200])),
    labels=st.sampled_from(LABELS),
    fields=st.sampled_from(FIELDS),
    block=st.sampled_from([7, 16, 128]),
    has_pivots=st.booleans(),
    limits=st.sampled_from([(0.2, 0.3), (0.35, 1.01), (1.01, 0.6)]),
)
def test_choice_and_tiles(
    seed: int,
    lengths: tuple[int, int],
    labels: tuple[tuple[int, ...], tuple[bool, ...]],
    fields: dict[str, Any],
    block: int,
    has_pivots: bool,
    limits: tuple[float, float],
) -> None:
    heads = LayerHeads(*labels)
    count = len(heads.cluster)
    geometry = geometry_of(count, lengths[0], sum(lengths), fields)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(2, count, geometry.tile_columns(block), generator=generator) ** 3
    blocks[:, : count // 2, 1::2] = 0.0
    if seed % 7 == 0:
        blocks[0, 0, 0] = torch.nan
    pivots = pivots_of(generator, geometry, block, blocks.nan_to_num()) if has_pivots else None
    call = AttentionCall(torch.zeros(2, count, lengths[0], 8), *torch.zeros(2, 2, count, sum(lengths), 8))
    call = evolve(call, starts=geometry.starts, lengths=geometry.lengths, window=geometry.window)
    rows, real = last_rows(call, block)
    seen = seen_blocks(geometry, rows, real, block)
    own = decide.shares(blocks)
    expected = decide.choose(own, seen, heads, pivots, LAYER, *limits)

    there, known = moved(geometry), None if pivots is None else moved(pivots)
    codes = heads.codes(torch.device(DEVICE))
    before = known and (known.made, known.last)
    by_kernel, mass = kernels.choose(there, blocks.to(DEVICE), rows.shape[1], codes, before, LAYER, block, *limits)
    torch.testing.assert_close(expected.own, mass.cpu(), rtol=1e-5, atol=1e-7, equal_nan=True)
    assert torch.equal(expected.flags, by_kernel.cpu())

    flags = torch.zeros(3, 2, count, dtype=torch.bool)
    kinds = torch.randint(3 if has_pivots else 2, (2, count), generator=generator)
    flags[0], flags[1], flags[2] = kinds == 2, kinds == 1, kinds > 0
    choice = Choice(flags, own)
    slashes = torch.rand(2, count, geometry.tile_columns(block), generator=generator) < 0.2
    tiles = decide.pattern_tiles(geometry, slashes, block, choice, heads, pivots)
    packed = known and known.packed
    by_kernel = kernels.pattern_tiles(there, slashes.to(DEVICE), block, choice.flags.to(DEVICE), codes, packed)
    assert torch.equal(tiles, by_kernel.cpu())


@settings(max_examples=100 if CUDA else 15)
@given(
    seed=st.integers(0, 9999),
    kv_len=st.sampled_from([1, 16, 129, 700, 1250]),
    labels=st.sampled_from(LABELS),
    has_pivots=st.booleans(),
)
def test_renewed_pivots(
    seed: int, kv_len: int, labels: tuple[tuple[int, ...], tuple[bool, ...]], has_pivots: bool
) -> None:
    heads, block, device = LayerHeads(*labels), 16, torch.device(DEVICE)
    count = len(heads.cluster)
    geometry = geometry_of(count, kv_len, kv_len, {})
    generator = torch.Generator().manual_seed(seed)
    rows = geometry.tile_rows(block)
    own = torch.rand(2, count, rows, generator=generator)
    before = pivots_of(generator, geometry, block, own)
    # At most one head of a cluster runs dense, and only where it may.
    first = torch.tensor([heads.makes[h] and heads.cluster[h] not in heads.cluster[:h] for h in range(count)])
    dense = (torch.rand(2, count, generator=generator) < 0.7) & first
    whole = torch.rand(2, count, generator=generator) < 0.7
    codes, which = heads.codes(device), index(heads.open, device)
    tiles = torch.rand(2, len(heads.open), rows, rows, generator=generator) < 0.3
    call = AttentionCall(*torch.zeros(3, 2, 1, kv_len, 8), layer=LAYER)
    choice = Choice(torch.stack([dense, dense, dense]), own)
    new = decide.renewed(call, before if has_pivots else None, 3, heads, choice, whole, tiles)
    pivots = before.made.to(device), before.last.to(device), before.packed.to(device)
    known = pivots if has_pivots else None
    given = (x.to(device) for x in (dense, whole, own, tiles))
    found = kernels.updated(known, LAYER, 3, codes, which, *given)
    for name, x in zip(("made", "last", "packed"), found, strict=True):
        assert torch.equal(getattr(new, name) if name != "packed" else unspare(new, rows), unspare_x(x, name, rows)), (
            name
        )


def unspare(pivots: Pivots, columns: int) -> Tensor:
    return unspare_x(pivots.packed, "packed", columns)


def unspare_x(x: Tensor, name: str, columns: int) -> Tensor:
    """Packed patterns as flags, without the bits behind the last tile."""
    x = x.cpu()
    if name != "packed":
        return x
    return ((x[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(3)[..., :columns]


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"starts": (0, 300)}])
def test_layers_by_kernel_equal_those_in_plain_pytorch(fields: dict[str, Any]) -> None:
    """Three layers with one memory, float32, on the device and on the CPU."""
    import sparseprefill as sp

    pipeline = sp.build("share-prefill", clusters="single", gamma=0.6, tau=0.3, delta=0.6, block=16)
    here, there = sp.Memory(), sp.Memory()
    generator = torch.Generator().manual_seed(1)
    for layer in range(3):
        q, k, v = (torch.randn(2, h, 500, 64, generator=generator) for h in (4, 2, 2))
        rows: dict[str, Any] = {name: torch.tensor(x, dtype=torch.int32) for name, x in fields.items()}
        expected = pipeline.run(AttentionCall(q, k, v, layer=layer, **rows), here)
        call = AttentionCall(q.cuda(), k.cuda(), v.cuda(), layer=layer, **{name: x.cuda() for name, x in rows.items()})
        actual = pipeline.run(call, there)
        torch.testing.assert_close(expected.out, actual.out.cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_nothing_recompiles_when_only_the_length_changes() -> None:
    from sparseprefill.plugins.flexprefill import kernels as flex
    from sparseprefill.plugins.share_prefill import kernels as share

    import sparseprefill as sp
    from sparseprefill.kernels.statistics.softmax import tile_softmax_kernel

    launched = (
        share.choose_kernel, share.pattern_tiles_kernel, share.pivot_update_kernel,
        tile_softmax_kernel, flex.distance_kernel,
    )  # fmt: skip
    compiled = []
    for length in (4096, 4097, 5000, 6144, 40000, 1):
        memory = sp.Memory()
        for layer in range(3):
            q, k, v = (torch.randn(1, h, length, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
            call = AttentionCall(q, k, v, layer=layer)
            sp.build("share-prefill", clusters="single").run(call, memory)
            sp.build("flexprefill").run(call)
        compiled.append(sum(len(cache[0]) for kernel in launched for cache in kernel.device_caches.values()))
    assert len(set(compiled)) == 1, compiled
