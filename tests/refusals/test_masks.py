"""What masks refuse: constructors, verbs, lists, tile maps, exports to other kernels; and plans."""

from __future__ import annotations

import math
from functools import partial
from operator import or_, sub
from typing import Any

import torch
from attrs import evolve

from helpers.build import int32, make, nested, random_mask
from helpers.refusals import Refusal, mask_error, over, parameter_error, refused
from sparseprefill import AttentionCall, Carry, CpuExecutor, Plan, PriorityScores, ReferenceExecutor, SparseMask
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.tile_map import Random, Stride, TileMap
from sparseprefill.plan import SoftmaxState

CALL = make(10, 12)
FULL = SparseMask.full(CALL, 4)
RANGE = torch.zeros(1, 3, 1, dtype=torch.int64)


def bits(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


TILES, STRIPES, RANGES = SparseMask.from_tiles, SparseMask.from_stripes, SparseMask.from_ranges
LISTS_OF_FOUR = IndexLists.from_map(bits(1, 2, 4, 3))
CONSTRUCTORS = [
    *(
        mask_error(r"(tile is|SparseMask\.tile_q is).*positive number of tokens", build, CALL, tile)
        for tile in (0, -4, 2.0, True, (4, 0), (4, -1), (4, 4, 4), (True, 4))
        for build in (SparseMask.full, SparseMask.empty)
    ),
    *(mask_error(r"group is .*pass a positive number", STRIPES, CALL, bits(1, 12), group) for group in (0, -1, 1.5)),
    mask_error(r"keep has shape \(2, 3\).*must broadcast to .*\(1, 2, 3, 3\)", TILES, CALL, bits(2, 3), 4),
    mask_error(r"keep is torch\.float32: pass a bool tensor", TILES, CALL, torch.ones(3, 3), 4),
    mask_error("keep is list: pass a bool tensor", STRIPES, CALL, [True]),
    mask_error("must broadcast", TILES, CALL, bits(1, 1, 1, 3, 3), 4),
    mask_error(
        r"keep has shape \(1, 1, 2, 3, 3\): it must broadcast to .*\(1, 2, 3, 3\)", TILES, CALL, bits(1, 1, 2, 3, 3), 4
    ),
    mask_error(r"keep has shape \(1, 1, 2, 3, 12\): it must broadcast", STRIPES, CALL, bits(1, 1, 2, 3, 12), tile=4),
    mask_error("made for an AttentionCall or its geometry, not for Tensor", SparseMask.full, torch.zeros(1)),
    mask_error(r"SparseMask\.tiles has lists \(1, 2, 4\).*\(1, 2, 3\)", SparseMask, CALL.geometry, 4, 4, LISTS_OF_FOUR),
    mask_error(r"SparseMask\.stripes has lists", SparseMask, CALL.geometry, 4, 4, None, 2, LISTS_OF_FOUR),
    mask_error("2147483648", SparseMask, make(8).geometry, 2**31, 2**31, None),
    mask_error(r"first is torch\.float32: pass an int64 tensor \[B, R, P\]", RANGES, CALL, RANGE.float(), RANGE, 3, 4),
    mask_error(r"last is torch\.float64: pass an int64 tensor", RANGES, CALL, RANGE, RANGE.double(), 3, 4),
    mask_error("last is list: pass an int64 tensor", RANGES, CALL, RANGE, [0], 3, 4),
    mask_error(r"first has shape \(3, 1\): pass \[B, R, P\]", RANGES, CALL, RANGE[0], RANGE, 3, 4),
    mask_error(r"first has shape \(1, 1, 3, 1\): pass \[B, R, P\]", RANGES, CALL, RANGE[None], RANGE[None], 3, 4),
    mask_error(r"last has shape \(1, 2, 1\): pass first's", RANGES, CALL, RANGE, RANGE[:, :2], 3, 4),
    mask_error(r"width is 2\.5: pass the number of entries", RANGES, CALL, RANGE, RANGE, 2.5, 4),
]

NARROW, WIDE = (STRIPES(make(100), bits(4, 1), tile=(32, 32), width=width) for width in (1, 16))
WIDTHS = [
    *(
        mask_error(rf"SparseMask\.stripe_width is {width}: .*{wrong}", evolve, NARROW, stripe_width=width)
        for width, wrong in ((48, "pass a number of tokens that divides tile_k, 32"), (0, "positive"), (64, "divides"))
    ),
    mask_error("width is 12: pass a divisor of 16, the mask's own", WIDE.with_stripe_width, 12),
]

INDICES: list[tuple[Any, str]] = [
    ([999], r"\[999\]"),
    ([-11], r"\[-11\]"),
    (torch.tensor([0, 10]), r"\[0, 10\]"),
    ([0.5], r"torch\.float32"),
    ([True], r"torch\.bool"),
    ([[0]], r"of shape \(1, 1\)"),
    (["first"], "'first'"),
]
VERBS = [
    *(
        mask_error(rf"rows is .*{shown}.*: pass indices of query rows, integers from 0 to 9", FULL.to_dense, rows)
        for rows, shown in INDICES
    ),
    *(mask_error(r"cells is .*: pass a positive number of cells", FULL.shade, cells) for cells in (0, -1, 2.5, True)),
    *(
        mask_error(rf"{name} is -?\d: pass an integer from 0 to", FULL.head, *where)
        for where, name in (((1, 0), "batch"), ((0, 2), "head"), ((0, -1), "head"))
    ),
    *(
        mask_error("pass an integer from 0 to 1", SparseMask.full(make(8, batch=2), 4).head, *where)
        for index in (1.0, 2, -1)
        for where in ((index, 0), (0, index))
    ),
]


def padded(name: str, *rows: int) -> SparseMask:
    return SparseMask.full(make(10, 12, batch=2, **dict[str, Any]({name: int32(*rows)})), 4)


OF_OTHER_CALLS = [
    refused(TypeError, "unsupported operand", or_, FULL, 3),
    refused(TypeError, "unsupported operand", sub, FULL, 1),
    mask_error(r"Nq=10, Nkv=12.*Nq=9, Nkv=12", or_, FULL, SparseMask.full(make(9, 12))),
    mask_error(
        "cannot subtract masks of different calls",
        *(sub, random_mask(CALL, "tiles", (8, 8), 1, seed=1), SparseMask.full(make(40), 8)),
    ),
    *(
        mask_error(words, verb, padded(name, 0, 5), padded(name, 4, 0))
        for name in ("starts", "lengths")
        for verb, words in (
            (or_, rf"different calls: .*{name}=\[0, 5\].*{name}=\[4, 0\]"),
            (sub, rf"cannot subtract .*{name}="),
        )
    ),
]

LISTS: dict[str, torch.Tensor] = {
    "counts": torch.zeros(1, 2, 3, dtype=torch.int32),
    "offsets": torch.zeros(1, 2, 3, dtype=torch.int64),
    "indices": torch.zeros(4, dtype=torch.int32),
}


def lists(**changes: Any) -> IndexLists:
    return IndexLists(**{**LISTS, **changes})


INDEX_LISTS = [
    *(
        mask_error(words, lists, **{name: value})
        for name, good in LISTS.items()
        for value, words in (
            (good.float(), rf"IndexLists\.{name} is torch\.float32: pass torch\.int"),
            ([1], rf"IndexLists\.{name} is list"),
            (good[None], "IndexLists shapes are"),
        )
    ),
    mask_error(r"IndexLists\.counts is torch\.int64: pass torch\.int32", lists, counts=LISTS["counts"].long()),
    mask_error(r"IndexLists\.offsets is torch\.int32: pass torch\.int64", lists, offsets=LISTS["offsets"].int()),
    mask_error(r"IndexLists\.indices is torch\.int64: pass torch\.int32", lists, indices=LISTS["indices"].long()),
    mask_error("IndexLists shapes are", lists, counts=LISTS["counts"][0], offsets=LISTS["offsets"][0]),
    mask_error("IndexLists shapes are", lists, counts=LISTS["counts"][..., :2]),
]


def tile_map(*shape: int, call: AttentionCall = CALL, tile: int = 4) -> TileMap:
    return TileMap(geometry=call.geometry, tile_q=tile, tile_k=tile, keep=bits(*shape))


ONE_TILE = evolve(CALL.geometry, q_len=4, kv_len=4, q_offset=0)
TILE_MAPS = [
    *(
        mask_error(
            r"is a map of .* tokens per tile: the mask has \(4, 4\)",
            *(SparseMask, ONE_TILE, 4, 4, TileMap(geometry=ONE_TILE, tile_q=q, tile_k=k, sink=1)),
        )
        for q, k in ((8, 4), (4, 8))
    ),
    mask_error(
        r"a map of \(8, 8\) tokens per tile: the mask has \(8, 16\)",
        *(evolve, TILES(make(64), bits(8, 8), 8)),
        tile_k=16,
    ),
    mask_error(r"TileMap\.keep has shape \(1, 2, 3, 4\): pass \[1, 2 or a divisor, 3, 3\]", tile_map, 1, 2, 3, 4),
    *(
        mask_error(r"TileMap\.keep has shape", tile_map, *shape)
        for shape in ((1, 3, 3, 3), (2, 2, 3, 3), (1, 2, 2, 3), (3, 3))
    ),
    *(
        mask_error(r"pass \[1, 2 or a divisor, 8, 8\]", tile_map, *shape, call=make(64), tile=8)
        for shape in ((8, 8), (1, 2, 8, 7), (1, 2, 7, 8), (2, 2, 8, 8), (1, 3, 8, 8))
    ),
]

LONG = make(300, heads=4, kv_heads=2)
BY_TILES, BY_EIGHT = TILES(LONG, bits(3, 3)), SparseMask.full(make(16), (8, 8))
EXPORTS = [
    mask_error("has stripes", STRIPES(LONG, bits(3, 300)).to_fa4, None),
    mask_error("left padding", TILES(evolve(LONG, starts=int32(3)), bits(1, 3)).to_fa4, None),
    mask_error("q_offset is 64, so query 0 lies inside a tile of 128", TILES(make(236, 300), bits(1, 3)).to_fa4),
    mask_error(r"block is \(96, 96\): pass sizes that divide the mask's tiles, \(128, 128\)", BY_TILES.to_fa4, 96),
    mask_error("block is 0", BY_TILES.to_fa4, 0),
    mask_error("block is True", BY_TILES.to_fa4, True),
    mask_error("block is", BY_TILES.to_fa4, (16, 16, 16)),
    *(mask_error("pass sizes that divide the mask's tiles", BY_EIGHT.to_fa4, block) for block in ((4, 3), (3, 4))),
    *(
        mask_error("block is", SparseMask.full(LONG).to_flex, block)
        for block in (0, -1, 2.0, "128", (128,), True, 1 << 31)
    ),
]

NESTED = nested(torch.ones(2), torch.ones(3))
WORDS = 1 << 32
NO_RULES: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "stride",
        (
            0,
            True,
            2.0,
            math.nan,
            -1,
            "3",
            Stride(0, 7),
            Stride(-2, 7),
            Stride(True, 7),
            Stride(2, -1),
            Stride(2, WORDS),
        ),
        r"Stride\(every from 1",
    ),
    (
        "random",
        (2.0, 0, True, Random(0, 1), Random(WORDS + 1, 1), Random(True, 1), Random(5, WORDS), Stride(2, 5)),
        r"Random\(bound 1 to 2\^32",
    ),
    (
        "dense",
        (5, True, 1.5, (1,), (1, 2, 3), (0.0, 1.0), (0, True), [0, 1], "01", (0, 1 << 63), int32(0, 1), NESTED.int()),
        r"\(first, behind\), int32 \[B, 2\], or None",
    ),
    (
        "dense",
        (int32(0, 1).repeat(2, 1), int32(0, 1)[None].to("meta")),
        "one range for each of 1 batch rows, on cpu",
    ),
    ("first_head", (-1, 1.0, True, 1 << 63, None), "the number of a head"),
    ("keep", (torch.ones(3, 3), [[True]], NESTED.bool()), "a bool tensor"),
    ("per_row", (0, 1.5, True), "a positive number of tiles"),
]
"""Fields of a `TileMap` with values that are none."""
STATE = ReferenceExecutor().accumulate(CALL, Plan(FULL))
ZEROS = torch.zeros(1, 2, 3)
PLANS = [
    mask_error(r"Plan\.mask is NoneType: pass a SparseMask", Plan, None),
    mask_error(r"Plan\.mask is the class SparseMask", Plan, SparseMask),
    mask_error(r"Plan\.carry is int: pass a Carry", Plan, FULL, 3),
    mask_error(
        rf"Plan\.carry\.state has values of 3: pass one of the call's dimension {CALL.value_dim}",
        *(Plan(FULL, Carry(SoftmaxState.empty((1, 2, 10), 3, torch.float32, FULL.geometry.device), FULL)).begun, CALL),
    ),
    mask_error(
        r"Plan\.carry\.state has rows \(1, 2, 9\): pass one of the call's \(1, 2, 10\)",
        *(Plan, FULL, Carry(SoftmaxState.empty((1, 2, 9), 8, torch.float32, FULL.geometry.device), FULL)),
    ),
    mask_error(r"Plan\.probe is list: pass a Tensor", Plan, FULL, probe=[[True, True]]),
    mask_error(r"Plan\.probe is torch\.float32 \(1, 2\): pass a bool tensor", Plan, FULL, probe=torch.ones(1, 2)),
    mask_error(r"Plan\.probe is torch\.bool \(1, 3\).*= \(1, 2\)", Plan, FULL, probe=bits(1, 3)),
    mask_error(r"Plan\.probe is torch\.bool \(2,\)", Plan, FULL, probe=bits(2)),
    mask_error(r"Plan\.probe", evolve, Plan(FULL).keep(sink=1), probe=bits(1, 3)),
    mask_error(r"Carry\.state is int: pass a SoftmaxState", Carry, 3, FULL),
    mask_error(r"Carry\.region is AttentionCall", Carry, STATE, CALL),
    *(
        mask_error(r"pass thresholds from 0 to less than 1", Plan, FULL, skip_below=wrong)
        for wrong in (torch.ones(1), torch.tensor([-0.1]), torch.tensor([float("nan")]))
    ),
    *(
        mask_error(r"pass a float32 tensor \[B\] = \(1,\)", Plan, FULL, skip_below=wrong)
        for wrong in (torch.zeros(2), torch.zeros(1, dtype=torch.float64), 0.5)
    ),
    *(
        mask_error(
            rf"TileMap\.{name} is .*: pass a number of tiles, an integer from 0", Plan(FULL).keep, **{name: value}
        )
        for name, value in (("band", -1), ("band", "1"), ("sink", 1.5), ("sink", True), ("sink", -3))
    ),
    *(
        mask_error(rf"TileMap\.{name} is .*: pass .*{remedy}", keep, **{name: value})
        for name, values, remedy in NO_RULES
        for value in values
        for keep in (Plan(FULL).keep, partial(Plan(FULL).keep, 2))
    ),
    mask_error(r"Plan\.probe is a nested tensor", Plan, FULL, probe=NESTED.bool()),
    mask_error(r"Plan\.skip_below is a nested tensor", Plan, FULL, skip_below=NESTED),
    mask_error("keep is a nested tensor: pass a bool tensor", TILES, CALL, NESTED.bool(), 4),
    mask_error("keep is of layout torch.sparse_coo: pass a bool tensor", TILES, CALL, bits(3, 3).to_sparse(), 4),
    mask_error(r"IndexLists\.counts is a nested tensor", lists, counts=NESTED.int()),
    mask_error("tile is 0", Plan(FULL).keep, 0, sink=1),
    refused(TypeError, "sinks", Plan(FULL).keep, sinks=1),
    mask_error(r"Plan\.priority is dict: pass a Priority", Plan, FULL, priority={}),
    parameter_error("PriorityScores has no scores: pass tiles, or columns", PriorityScores),
    parameter_error(
        "tile_q=None, tile_k=8: pass the tokens of a tile", PriorityScores, tiles=torch.zeros(1, 1, 1, 1), tile_k=8
    ),
    mask_error(
        r"SoftmaxState shapes are .*\(1, 2, 4\)", SoftmaxState, ZEROS, torch.zeros(1, 2, 4), torch.zeros(1, 2, 3, 4)
    ),
    mask_error("SoftmaxState shapes", SoftmaxState, ZEROS, ZEROS, torch.zeros(1, 2, 4)),
]


def of_lists(*entries: int, counts: int | None = None, offset: int = 0) -> SparseMask:
    """A mask of stripes with one list for all rows, as a caller may make it."""
    shape, many = (1, 2, 3), len(entries) if counts is None else counts
    made = IndexLists(torch.full(shape, many, dtype=torch.int32), torch.full(shape, offset), int32(*entries))
    return SparseMask(CALL.geometry, 4, 4, stripes=made)


WRONG_LISTS = [
    *(
        mask_error(words, use, made)
        for made, words in (
            (of_lists(1, 1, 3), r"stripes must hold ascending, distinct indices from 0 to 11: .* is \[1, 1, 3\]"),
            (of_lists(3, 1), r"row 0 is \[3, 1\]"),
            (of_lists(-1, 1), r"row 0 is \[-1, 1\]"),
            (of_lists(1, 12), r"row 0 is \[1, 12\]"),
            (of_lists(1, 2, counts=3), "it must lie within the 2 indices"),
            (of_lists(1, 2, offset=-1), "it must lie within the 2 indices"),
            (of_lists(1, 2, counts=-1), "must hold ascending"),
            (evolve(of_lists(2), stripes=None, tiles=of_lists(1, 1).stripes), r"tiles must hold .* is \[1, 1\]"),
        )
        for use in (
            lambda mask: mask.density,
            SparseMask.check,
            SparseMask.pairs,
            lambda mask: ReferenceExecutor().execute(CALL, Plan(mask)),
            lambda mask: CpuExecutor().accumulate(CALL, Plan(mask)),
        )
    ),
]


@over([*CONSTRUCTORS, *WIDTHS, *VERBS, *OF_OTHER_CALLS, *INDEX_LISTS, *TILE_MAPS, *EXPORTS, *PLANS, *WRONG_LISTS])
def test_refused(refusal: Refusal) -> None:
    refusal.check()
