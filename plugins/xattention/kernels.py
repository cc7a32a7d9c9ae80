"""Algorithm 1 in two Triton kernels: partial softmaxes of tiles of groups, then the scores of key tiles.

No logit is stored: of each row of groups and key tile, the sum of exponentials is, an eighth of them by default. They are
launched for a part of the query tiles at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.groups import (
    RUNTIME,
    GroupTiles,
    Operands,
    Tile,
    first_query_group,
    group_products,
    places,
    program_tile,
    token_row,
)
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.steps import LN2, LOG2E, factor, floor_div

from .scores import PARTIALS


@triton.jit
def _seen_rows(group, tokens, window, SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Queries of the query groups, those on the late half of the places, and whether any key group is seen."""
    begin, end = places(group, tokens.low, tokens.high, SIZE)
    count = tl.maximum(end - begin, 0)
    late = tl.maximum(end - tl.maximum(begin, SIZE // 2), 0)
    before = (count > 0) & (group > 0)
    if WINDOW:
        before = before & (window > 1)
    return count, late, before | (late > 0)


@triton.jit(
    do_not_specialize=(*RUNTIME, "window", "first_row", "stride_rows", "width", "blocks"),
    do_not_specialize_on_alignment=("table_ptr", "k_scale_ptr"),
)
def partial_softmax_kernel(
    sums_ptr, tops_ptr, totals_ptr, q_ptr, k_ptr, table_ptr, k_scale_ptr, q_desc, k_desc, starts_ptr, lengths_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, q_shift,
    q_offset, q_len, kv_len, tiles, skipped, base, heads, kv_group,
    scale, softcap, window, first_row, stride_rows, width, blocks,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of antidiagonal logits (Algorithm 1), for one tile of group pairs.

    Of each row of query groups: tops ``[rows, blocks]``, the maximum logit (base 2), and against it sums of
    exponentials by key tile, sums ``[rows, width]``, and in all, totals ``[rows, blocks]``.
    """
    per: tl.constexpr = BLOCK // SIZE
    parts: tl.constexpr = BLOCK_N // per
    x = Operands(
        q_ptr, k_ptr, table_ptr, factor(k_scale_ptr), q_desc, k_desc,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, q_shift,
    )  # fmt: skip
    b, h, hk, row, column = program_tile(tl.program_id(0), tiles, skipped, base, heads, kv_group, BLOCK_M, BLOCK_N)
    tokens = token_row(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len)
    first_q, first_k = first_query_group(tokens.first, row, BLOCK, SIZE, BLOCK_M), column * BLOCK_N
    if (first_k >= first_q + BLOCK_M) | (first_q * SIZE >= tokens.high):
        return
    crossing = first_k + BLOCK_N > first_q
    acc = group_products(
        x, Tile(b, h, hk, first_q, first_k), tokens, crossing,
        SIZE, True, SIZE // 2, BLOCK_M, BLOCK_N, BLOCK_K, D, TMA, PAGE, PRECISION,
    )  # fmt: skip
    group, key = first_q + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_N)
    count, late, _ = _seen_rows(group, tokens, window, SIZE, WINDOW)
    acc = acc * (scale / tl.maximum(count, 1).to(tl.float32))[:, None]
    lag = group[:, None] - key[None, :]
    if crossing:
        # The diagonal holds the sum over the late places alone.
        again = tl.maximum(count, 1).to(tl.float32) / tl.maximum(late, 1).to(tl.float32)
        acc = tl.where(lag == 0, acc * again[:, None], acc)
    if SOFTCAP:
        acc = (2.0 * tl.sigmoid(2.0 * acc * LN2 / softcap) - 1.0) * softcap * LOG2E
    if crossing | (first_q * SIZE < tokens.low) | ((first_q + BLOCK_M) * SIZE > tokens.high) | WINDOW:
        seen = ((lag > 0) & (count > 0)[:, None]) | ((lag == 0) & (late > 0)[:, None])
        if WINDOW:
            seen = seen & ((lag == 0) | (lag * SIZE - SIZE + 1 < window))
        acc = tl.where(seen, acc, float("-inf"))
    top = tl.max(acc, 1)
    e = tl.math.exp2(acc - tl.where(top == float("-inf"), 0.0, top)[:, None])  # [BLOCK_M, BLOCK_N]
    sums = tl.sum(tl.reshape(e, [BLOCK_M, parts, per]), 2)  # [BLOCK_M, parts]
    total = tl.sum(sums, 1)
    r = row * BLOCK_M + tl.arange(0, BLOCK_M) - first_row
    line = (b * heads + h).to(tl.int64) * stride_rows + r
    c = column * parts + tl.arange(0, parts)
    tl.store(sums_ptr + line[:, None] * width + c[None, :], sums)
    tl.store(tops_ptr + line * blocks + column, top)
    tl.store(totals_ptr + line * blocks + column, total)


@triton.jit(
    do_not_specialize=(
        "q_offset", "q_len", "kv_len", "window", "first_row", "stride_rows", "width", "blocks", "heads", "rows", "columns"
    )
)  # fmt: skip
def tile_scores_kernel(
    scores_ptr, sums_ptr, tops_ptr, totals_ptr, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, window,
    first_row, stride_rows, width, blocks, heads, rows, columns,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """scores ``[batch, heads, rows, columns]`` of key tiles: sums of softmaxes over a query tile's groups (Algorithm 1).

    One program: one query tile, from the partial softmaxes of its groups. Key tiles of the future get 0.
    """
    per: tl.constexpr = BLOCK // SIZE
    parts: tl.constexpr = BLOCK_N // per
    bh, r = tl.program_id(1), first_row // per + tl.program_id(0)
    tokens = token_row(bh // heads, starts_ptr, lengths_ptr, q_offset, q_len, kv_len)
    tile = floor_div(tokens.first, BLOCK) + r
    group = tile * per + tl.arange(0, per)
    _, _, real = _seen_rows(group, tokens, window, SIZE, WINDOW)
    # Behind the call's end and in padding there is nothing to read.
    live = (tl.minimum((tile + 1) * BLOCK, tokens.high) > tl.maximum(tile * BLOCK, tokens.low)).to(tl.int32)
    end = tl.minimum(tile + 1, columns) * live
    met = tl.cdiv(end, parts)
    line = bh.to(tl.int64) * stride_rows + r * per - first_row + tl.arange(0, per)
    top, total = tl.full([per], float("-inf"), tl.float32), tl.zeros([per], tl.float32)
    for at in tl.range(0, met, PARTS):
        n = at + tl.arange(0, PARTS)
        inside = (n < met)[None, :]
        m = tl.load(tops_ptr + line[:, None] * blocks + n[None, :], mask=inside, other=float("-inf"))  # [per, PARTS]
        t = tl.load(totals_ptr + line[:, None] * blocks + n[None, :], mask=inside, other=0.0)  # [per, PARTS]
        higher = tl.maximum(top, tl.max(m, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(top - level) + tl.sum(t * tl.math.exp2(m - level[:, None]), 1)
        top = higher
    level = tl.where(top == float("-inf"), 0.0, top)
    share = 1.0 / total
    for at in tl.range(0, columns, COLUMNS):
        c = at + tl.arange(0, COLUMNS)
        inside = (c < end)[None, :]
        m = tl.load(tops_ptr + line[:, None] * blocks + (c // parts)[None, :], mask=inside, other=float("-inf"))
        s = tl.load(sums_ptr + line[:, None] * width + c[None, :], mask=inside, other=0.0)  # [per, COLUMNS]
        p = s * tl.math.exp2(m - level[:, None]) * share[:, None]  # [per, COLUMNS]
        score = tl.sum(tl.where(real[:, None] & inside, p, 0.0), 0)
        tl.store(scores_ptr + (bh.to(tl.int64) * rows + r) * columns + c, score, mask=c < columns)


def tile_scores(call: AttentionCall, stride: int, block: int) -> Tensor:
    """float32 ``[B, Hq, R, C]``: see `scores.tile_scores`, all query tiles at once. Key tiles of the future get 0."""
    geometry, tiles = call.geometry, GroupTiles.of(call, block, stride)
    chosen, per = tiles.settings, block // stride
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    pairs, parts, step = geometry.batch * geometry.heads, chosen.block_n // per, chosen.block_m // per
    options: dict[str, Any] = {"dtype": torch.float32, "device": geometry.device}
    scores: Tensor = torch.empty(geometry.batch, geometry.heads, rows, columns, **options)
    most = pairs * chosen.block_m * tiles.reach(tiles.count - 1)
    size = min(max(1, PARTIALS // (most * parts)), tiles.count)
    sums = torch.empty(most * parts * size, **options)
    tops, totals = torch.empty(2, most * size, **options)
    flags = {"WINDOW": geometry.window is not None}
    cap = {"SOFTCAP": call.softcap is not None}
    scale, softcap, window = call.softmax_scale * LOG2E.value, call.softcap or 0.0, geometry.window or 0
    for first in range(0, tiles.count, size):
        some = range(first, min(first + size, tiles.count))
        height, reach = len(some) * chosen.block_m, tiles.reach(some[-1])
        place = (first * chosen.block_m, height, reach * parts, reach)
        for part in tiles.parts(some):
            enqueue(partial_softmax_kernel, (part.programs,),
                sums, tops, totals, *part.arguments, scale, softcap, window, *place,
                **part.flags, **flags, **cap, **chosen.options,
            )  # fmt: skip
        enqueue(tile_scores_kernel, (min(rows, some.stop * step) - first * step, pairs),
            scores, sums, tops, totals, geometry.starts, geometry.lengths,
            geometry.q_offset, geometry.q_len, geometry.kv_len, window, *place, geometry.heads, rows, columns,
            BLOCK=block, SIZE=stride, BLOCK_N=chosen.block_n, COLUMNS=256, PARTS=32, **flags, num_warps=4, **FUSED,
        )  # fmt: skip
    return scores
