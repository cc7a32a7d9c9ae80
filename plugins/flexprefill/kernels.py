"""Softmax of pooled products, and its distance to the true attention, in two Triton kernels with their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.lists.kernels import span
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.statistics.distance import js_distance, js_terms, seen_blocks
from sparseprefill.kernels.steps import LOG2E, batch_row, floor_div

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

TINY = tl.constexpr(1.1754943508222875e-38)
SQRT_LN2 = tl.constexpr(0.8325546111576977)


@triton.jit
def _logits(line_ptr, c, begin, end, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits of the tiles `c`, -inf outside [begin, end)."""
    seen = (c >= begin) & (c < end)
    x = tl.load(line_ptr + c, mask=seen, other=0.0) * scale  # [WIDTH]
    if SOFTCAP:
        x = (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0) * softcap
    return tl.where(seen, x, float("-inf")) * LOG2E


@triton.jit
def _level(line_ptr, begin, end, scale, softcap, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr):
    """The largest logit, 0 for none, and one over the sum of exponentials."""
    top, total = float("-inf"), 0.0
    for at in tl.range(0, end, WIDTH):
        x = _logits(line_ptr, at + tl.arange(0, WIDTH), begin, end, scale, softcap, SOFTCAP)
        higher = tl.maximum(top, tl.max(x, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(top - level) + tl.sum(tl.math.exp2(x - level), 0)
        top = higher
    return tl.where(top == float("-inf"), 0.0, top), 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=("q_offset", "q_len", "kv_len", "first_row", "columns", "window", "heads"))
def tile_softmax_kernel(
    scores_ptr, starts_ptr, lengths_ptr, scale, softcap, q_offset, q_len, kv_len, first_row, columns, window, heads,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Products ``[batch, heads, rows, columns]`` become softmax scores, in place (Algorithm 4, of pooled vectors).

    Over the key tiles within reach of a query tile; 0 elsewhere. One program: one row, in two sweeps.
    """
    bh, r = tl.program_id(1), tl.program_id(0)
    _, length, first = batch_row(bh // heads, starts_ptr, lengths_ptr, q_offset, kv_len)
    tile = floor_div(first, BLOCK) + first_row + r
    high, low = tl.minimum(first + q_len, length), tl.maximum(first, 0)
    live = (tl.minimum((tile + 1) * BLOCK, high) > tl.maximum(tile * BLOCK, low)).to(tl.int32)
    begin, end = span(tile, columns, window, BLOCK, BLOCK, WINDOW)
    end *= live
    line = scores_ptr + (bh.to(tl.int64) * tl.num_programs(0) + r) * columns
    level, share = _level(line, begin, end, scale, softcap, SOFTCAP, WIDTH)
    for at in tl.range(0, columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        x = _logits(line, c, begin, end, scale, softcap, SOFTCAP)  # [WIDTH]
        tl.store(line + c, tl.math.exp2(x - level) * share, mask=c < columns)


@triton.jit(do_not_specialize=("q_offset", "q_len", "kv_len", "count", "columns", "window", "heads"))
def distance_kernel(
    products_ptr, true_ptr, far_ptr, starts_ptr, lengths_ptr, scale, softcap,
    q_offset, q_len, kv_len, count, columns, window, heads,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """far ``[batch * heads]``: Jensen-Shannon distance, in nats, by which a head takes its pattern (Algorithm 2).

    Of the softmax of products ``[batch * heads, columns]``, the pooled estimate, from the true mass, which is made to
    add up to 1. One program: one head.
    """
    bh = tl.program_id(0)
    begin, last = seen_blocks(
        bh // heads, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, count, window, BLOCK, WINDOW
    )  # fmt: skip
    end = tl.minimum(last + 1, columns)
    products, true = products_ptr + bh.to(tl.int64) * columns, true_ptr + bh.to(tl.int64) * columns
    level, share = _level(products, begin, end, scale, softcap, SOFTCAP, WIDTH)
    mass = tl.zeros([WIDTH], tl.float32)
    for at in tl.range(0, columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        mass += tl.load(true + c, mask=c < columns, other=0.0)  # [WIDTH]
    whole = tl.maximum(tl.sum(mass, 0), TINY)
    total = tl.zeros([WIDTH], tl.float32)
    for at in tl.range(0, columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        estimate = tl.math.exp2(_logits(products, c, begin, end, scale, softcap, SOFTCAP) - level) * share
        total += js_terms(estimate, tl.load(true + c, mask=c < columns, other=0.0) / whole)
    tl.store(far_ptr + bh, js_distance(tl.sum(total, 0)) * SQRT_LN2)  # to nats


def tile_softmax(call: AttentionCall, products: Tensor, first_row: int, block: int) -> Tensor:
    """Turns products ``[B, Hq, r, C]``, float32 and contiguous, of the query tiles from `first_row` on into scores."""
    batch, heads, rows, columns = products.shape
    numbers, flags = _arguments(call, block)
    tile_softmax_kernel[(rows, batch * heads)](
        products, *numbers, first_row, columns, call.window or 0, heads, WIDTH=512, **flags, num_warps=4
    )
    return products


def distance(call: AttentionCall, products: Tensor, true: Tensor, count: int, block: int) -> Tensor:
    """float32 ``[B, Hq]``, in nats, of ``[B, Hq, C]`` each. count: sampled queries, the call's last ones."""
    batch, heads, columns = products.shape
    far = torch.empty(batch, heads, dtype=torch.float32, device=products.device)
    numbers, flags = _arguments(call, block)
    distance_kernel[(batch * heads,)](
        products, true.contiguous(), far, *numbers, count, columns, call.window or 0, heads,
        WIDTH=1024, **flags, num_warps=8,
    )  # fmt: skip
    return far


def _arguments(call: AttentionCall, block: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    geometry = call.geometry
    numbers = (
        geometry.starts, geometry.lengths, call.softmax_scale, call.softcap or 0.0,
        geometry.q_offset, geometry.q_len, geometry.kv_len,
    )  # fmt: skip
    flags = {
        "BLOCK": block,
        "WINDOW": geometry.window is not None,
        "SOFTCAP": call.softcap is not None,
        **FUSED,
    }
    return numbers, flags
