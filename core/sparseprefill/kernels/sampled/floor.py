"""The steps of a recall floor behind the pass over the keys; see `sparseprefill.refiners.recall`, which says the same.

Four launches in place of some 150 small operations: what each sampled row lacks, who hears of it, which heads run
dense, and what all of it comes to. Nothing is read on the host.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.steps import floor_div
from sparseprefill.mask.samples import Raised, Stretches

MOST_COLUMNS = 1 << 14
"""Key tiles of a row that `choose_kernel` holds in registers."""
WIDE = 1024
"""Key tiles of a step in the other kernels, and query tiles of one in `settle_kernel`."""
SIZES = ("heads", "samples", "rows", "columns", "stride_b", "stride_h", "stride_r", "stride_c")
INFINITE = tl.constexpr(0x7F800000)


class Held(NamedTuple):
    """On the host: key tiles as bool maps. have ``[B, Hq, R, C]``, any strides: those of the plan. reach ``[B, 1, R,
    C]``, contiguous: those with an allowed pair."""

    have: Tensor
    reach: Tensor


@triton.jit
def _held(map_ptr, inhabited_ptr, strides, heads, rows, columns, b, head, row, column, inside):
    """([BLOCK], [BLOCK]): key tiles of a query tile that the plan has, and those in reach that it has not."""
    have_ptr, reach_ptr = map_ptr
    stride_b, stride_h, stride_r, stride_c = strides
    line = have_ptr + b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_r
    reach_line = reach_ptr + (b * rows + row).to(tl.int64) * columns
    there = tl.load(inhabited_ptr + b * rows + row) != 0
    reach = (tl.load(reach_line + column, mask=inside, other=0) != 0) & there
    have = tl.load(line + column.to(tl.int64) * stride_c, mask=inside, other=0) != 0
    return have & reach, reach & ~have


@triton.jit(do_not_specialize=SIZES)
def choose_kernel(
    every_ptr, kept_ptr, real_ptr, position_ptr, own_ptr, have_ptr, reach_ptr, inhabited_ptr,
    lost_ptr, chosen_ptr, before_ptr, target, stride_b, stride_h, stride_r, stride_c,
    heads, samples, rows, columns, TILE_K: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """chosen: bytes ``[B, Hq, n, C]``, the fewest key tiles that a sampled row lacks to keep `target` of its mass, the
    largest first, and its own; every tile with ALL. lost: float32 ``[B, Hq, n, C]``, mass that the plan does not keep.
    before ``[B, Hq, n]``: mass that it keeps.

    every, kept: natural LSE of each tile, over all keys and over those of the plan's stripes, or None (`by_tile`). The
    least value taken is found by bisection on its bits (ours); of equal values the later tiles go first. One program:
    one sampled row of one head.
    """
    line = tl.program_id(0)
    sample = line % samples
    bh = line // samples
    head = bh % heads
    b = bh // heads
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = line.to(tl.int64) * columns + column
    real = tl.load(real_ptr + b * samples + sample) != 0
    every = tl.load(every_ptr + at, mask=inside, other=float("-inf"))  # [BLOCK]
    top = tl.max(every, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp(every - base), 0)
    broken = tl.sum((every != every).to(tl.int32), 0)
    lse = base + tl.math.log(tl.where(total == 0.0, 1.0, total))  # 0 of a row that sees nothing
    base = tl.where((top == float("inf")) & (broken == 0), top, lse)
    mass = tl.where(inside, tl.math.exp(every - base), 0.0)
    kept = tl.zeros([BLOCK], tl.float32)
    if kept_ptr is not None:
        of_mask = tl.load(kept_ptr + at, mask=inside, other=float("-inf"))
        kept = tl.where(inside, tl.math.exp(of_mask - base), 0.0)
    own = tl.load(own_ptr + b * samples + sample).to(tl.int32)
    have, _ = _held(
        (have_ptr, reach_ptr), inhabited_ptr, (stride_b, stride_h, stride_r, stride_c), heads, rows, columns,
        b, head, own, column, inside,
    )  # fmt: skip
    lost = mass - kept
    lost = tl.where((lost > 0.0) & ~have, lost, 0.0)  # what is not a number is not lost
    before = tl.sum(tl.where(have, mass, kept), 0)
    tl.store(before_ptr + line, before)
    tl.store(lost_ptr + at, lost, mask=inside)
    if ALL:
        tl.store(chosen_ptr + at, inside & real, mask=inside)
    else:
        need = tl.where(real, target - before, 0.0)
        bits = lost.to(tl.int32, bitcast=True)
        # The least bits above which less lies than is needed: `high` is such, `low` is not.
        low, high = tl.full([], -1, tl.int32), tl.max(bits, 0)
        while high - low > 1:
            middle = low + (high - low) // 2
            if tl.sum(tl.where(bits > middle, lost, 0.0), 0) < need:
                high = middle
            else:
                low = middle
        above = tl.sum(tl.where(bits > high, lost, 0.0), 0)
        least = high.to(tl.float32, bitcast=True)
        tie = (bits == high).to(tl.int32)
        behind = tl.sum(tie, 0) - tl.cumsum(tie, 0)  # ties to the later tile
        tied = (tie > 0) & (above + behind.to(tl.float32) * least < need) & (high > 0)
        chosen = (bits > high) | tied
        some = tl.sum(chosen.to(tl.int32), 0) > 0
        mine = tl.load(position_ptr + b * samples + sample) // TILE_K
        tl.store(chosen_ptr + at, chosen | (some & (column == mine)), mask=inside)


@triton.jit
def _heard(chosen_ptr, own_ptr, sample, line, row, column, columns, inside, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """[BLOCK]: whether the sample has chosen a key tile, or that which lies as far from its own diagonal."""
    own = tl.load(own_ptr + sample).to(tl.int32)
    at = chosen_ptr + line * columns
    heard = tl.load(at + column, mask=inside, other=0)
    apart = (own - row) * TILE_Q
    moved = column + floor_div(apart, TILE_K)
    heard |= tl.load(at + moved, mask=inside & (moved >= 0) & (moved < columns), other=0)
    if TILE_Q % TILE_K != 0:
        moved = column + floor_div(apart + TILE_K - 1, TILE_K)
        heard |= tl.load(at + moved, mask=inside & (moved >= 0) & (moved < columns), other=0)
    return heard


@triton.jit(do_not_specialize=(*SIZES, "each"))
def spread_kernel(
    chosen_ptr, own_ptr, of_ptr, have_ptr, reach_ptr, inhabited_ptr, added_ptr, counts_ptr,
    stride_b, stride_h, stride_r, stride_c, heads, samples, each, rows, columns,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """added: bytes ``[B, Hq, R, C]``, of the tiles in reach that the plan lacks those that a query tile's sample chose,
    or, with NEIGHBOURS, the one before it in its span. counts: int32 ``[B, Hq, R, 3]``: had, lacked, and added.

    chosen: bytes ``[B, Hq, n, C]``. own ``[B, n]``, of ``[B, R]``: see `Stretches`, int64. One program: one query tile
    of one head.
    """
    line = tl.program_id(0)
    row = line % rows
    bh = line // rows
    head = bh % heads
    b = bh // heads
    sample = tl.load(of_ptr + b * rows + row).to(tl.int32)
    had = tl.zeros([BLOCK], tl.int32)
    lacked = tl.zeros([BLOCK], tl.int32)
    more = tl.zeros([BLOCK], tl.int32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        have, free = _held(
            (have_ptr, reach_ptr), inhabited_ptr, (stride_b, stride_h, stride_r, stride_c), heads, rows, columns,
            b, head, row, column, inside,
        )  # fmt: skip
        heard = _heard(
            chosen_ptr, own_ptr, b * samples + sample, bh.to(tl.int64) * samples + sample, row, column, columns, inside,
            TILE_Q, TILE_K,
        )  # fmt: skip
        if NEIGHBOURS:
            before = tl.maximum(sample - 1, 0)
            reach = tl.where(sample % each > 0, columns, 0)  # the first of a span has nobody before it
            heard |= _heard(
                chosen_ptr, own_ptr, b * samples + before, bh.to(tl.int64) * samples + before, row, column, columns,
                column < reach, TILE_Q, TILE_K,
            )  # fmt: skip
        added = (heard != 0) & free
        tl.store(added_ptr + line.to(tl.int64) * columns + column, added, mask=inside)
        had += have.to(tl.int32)
        lacked += free.to(tl.int32)
        more += added.to(tl.int32)
    tl.store(counts_ptr + 3 * line, tl.sum(had, 0))
    tl.store(counts_ptr + 3 * line + 1, tl.sum(lacked, 0))
    tl.store(counts_ptr + 3 * line + 2, tl.sum(more, 0))


@triton.jit(do_not_specialize=("heads", "each", "rows", "spans", "share_bits"))
def settle_kernel(
    counts_ptr, of_ptr, dense_ptr, share_bits, heads, each, rows, spans, BLOCK: tl.constexpr
):  # fmt: skip
    """dense: bytes ``[B, Hq, P]``, whether a head holds at most a share of a span's tiles in reach and would pass it.

    share_bits: of the float64 share, as an integer. One program: one span of one head.
    """
    line = tl.program_id(0)
    span = line % spans
    bh = line // spans
    share = share_bits.to(tl.int64).to(tl.float64, bitcast=True)
    had = tl.zeros([BLOCK], tl.int64)
    lacked = tl.zeros([BLOCK], tl.int64)
    more = tl.zeros([BLOCK], tl.int64)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        of = tl.load(of_ptr + bh // heads * rows + row, mask=inside, other=0) // each
        mine = inside & (of == span)
        at = counts_ptr + 3 * (bh.to(tl.int64) * rows + row)
        had += tl.load(at, mask=mine, other=0)
        lacked += tl.load(at + 1, mask=mine, other=0)
        more += tl.load(at + 2, mask=mine, other=0)
    held = tl.sum(had, 0)
    bound = (held + tl.sum(lacked, 0)).to(tl.float64) * share
    passes = (held + tl.sum(more, 0)).to(tl.float64) > bound
    tl.store(dense_ptr + line, (held.to(tl.float64) <= bound) & passes)


@triton.jit(do_not_specialize=(*SIZES, "each", "spans", "lines"))
def finish_kernel(
    added_ptr, dense_ptr, of_ptr, own_ptr, have_ptr, reach_ptr, inhabited_ptr, lost_ptr, before_ptr, after_ptr,
    stride_b, stride_h, stride_r, stride_c, heads, samples, each, rows, columns, spans, lines, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gives dense spans every tile, in place, and works out `after` ``[B, Hq, n]``, mass that sampled rows keep then.

    One program: one query tile of one head; behind those, one sampled row of one head. No sampled row of a dense span
    reads what is written.
    """
    program = tl.program_id(0)
    if program < lines:
        row = program % rows
        bh = program // rows
        b = bh // heads
        span = tl.load(of_ptr + b * rows + row).to(tl.int32) // each
        if tl.load(dense_ptr + bh * spans + span) != 0:
            for first in range(0, columns, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < columns
                _, free = _held(
                    (have_ptr, reach_ptr), inhabited_ptr, (stride_b, stride_h, stride_r, stride_c), heads, rows,
                    columns, b, bh % heads, row, column, inside,
                )  # fmt: skip
                tl.store(added_ptr + program.to(tl.int64) * columns + column, free, mask=inside)
    else:
        line = program - lines
        sample = line % samples
        bh = line // samples
        b = bh // heads
        own = tl.load(own_ptr + b * samples + sample).to(tl.int32)
        span = tl.load(of_ptr + b * rows + own).to(tl.int32) // each
        few = tl.where(tl.load(dense_ptr + bh * spans + span) != 0, 0, columns)  # a dense span gets all
        gained = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < columns
            lost = tl.load(lost_ptr + line.to(tl.int64) * columns + column, mask=inside, other=0.0)
            place = (bh.to(tl.int64) * rows + own) * columns + column
            added = tl.load(added_ptr + place, mask=column < few, other=1)
            gained += tl.where(added != 0, lost, 0.0)
        tl.store(after_ptr + line, tl.load(before_ptr + line) + tl.sum(gained, 0))


def spread(
    chosen: Tensor, at: Stretches, held: Held, grid: tuple[int, int], *, neighbours: bool
) -> tuple[Tensor, Tensor]:
    """bool ``[B, Hq, R, C]`` and counts, as `spread_kernel` says; chosen: bool ``[B, Hq, n, C]``. One launch."""
    (batch, heads, samples, columns), rows = chosen.shape, at.of.shape[1]
    added = torch.empty(batch, heads, rows, columns, dtype=torch.bool, device=chosen.device)
    counts = torch.empty(batch, heads, rows, 3, dtype=torch.int32, device=chosen.device)
    enqueue(spread_kernel, (batch * heads * rows,),
        _bytes(chosen), at.own, at.of, *_bytes_of(held), _bytes(at.inhabited), _bytes(added), counts,
        *held.have.stride(), heads, samples, at.each, rows, columns,
        TILE_Q=grid[0], TILE_K=grid[1], NEIGHBOURS=neighbours, **_launch(columns),
    )  # fmt: skip
    return added, counts


def raised(
    by_tile: tuple[Tensor, Tensor | None], at: Stretches, held: Held, grid: tuple[int, int], *,
    target: float, dense_from: float, neighbours: bool,
) -> Raised:  # fmt: skip
    """The tiles that a floor adds. by_tile: natural LSE of each sampled row in each key tile, float32 ``[B, Hq, n, C]``, over all
    keys, and over those of stripes, if there are any. At most `MOST_COLUMNS` key tiles. Four launches."""
    every, kept = by_tile
    (batch, heads, samples, columns), rows = every.shape, at.of.shape[1]
    lost, chosen = torch.empty_like(every), torch.empty_like(every, dtype=torch.bool)
    before, after = torch.empty(2, batch, heads, samples, dtype=torch.float32, device=every.device)
    maps, inhabited, strides = _bytes_of(held), _bytes(at.inhabited), held.have.stride()
    wide = triton.next_power_of_2(columns)
    enqueue(choose_kernel, (batch * heads * samples,),
        every, kept, _bytes(at.real), at.position, at.own, *maps, inhabited, lost, _bytes(chosen), before,
        float(target), *strides, heads, samples, rows, columns,
        TILE_K=grid[1], ALL=target >= 1, BLOCK=wide, num_warps=4 if wide <= WIDE else 16, **FUSED,
    )  # fmt: skip
    added, counts = spread(chosen, at, held, grid, neighbours=neighbours)
    spans = samples // at.each
    dense = torch.empty(batch, heads, spans, dtype=torch.bool, device=every.device)
    # As bits, since Triton takes Python's floats for float32; 0 would be an integer of another type than all others.
    (share_bits,) = struct.unpack("<q", struct.pack("<d", dense_from if dense_from > 0 else -0.0))
    enqueue(settle_kernel, (batch * heads * spans,),
        counts, at.of, _bytes(dense), share_bits, heads, at.each, rows, spans, **_launch(rows),
    )  # fmt: skip
    lines = batch * heads * rows
    enqueue(finish_kernel, (lines + batch * heads * samples,),
        _bytes(added), _bytes(dense), at.of, at.own, *maps, inhabited, lost, before, after, *strides,
        heads, samples, at.each, rows, columns, spans, lines, **_launch(columns),
    )  # fmt: skip
    return Raised(added, before, after, dense)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _bytes_of(held: Held) -> tuple[Tensor, Tensor]:
    return _bytes(held.have), _bytes(held.reach)


def _launch(length: int) -> dict[str, Any]:
    return {"BLOCK": min(WIDE, triton.next_power_of_2(length)), "num_warps": 4, **FUSED}
