"""The mean query and the anchor of each block, laid out as the scoring kernel reads them: one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import batch_row, floor_div, load_rows

ROUNDING = tl.constexpr(2.0**-19)  # of a float32 dot product, against |q| |k|


@triton.jit(
    do_not_specialize=("q_offset", "q_len", "kv_len", "block_rows", "group_rows", "tiles", "heads", "kv_group", "parts")
)
def pool_kernel(
    q_ptr, m_ptr, starts_ptr, lengths_ptr, pooled_ptr, anchor_ptr, high_ptr, limit_ptr, slack_ptr,
    stride_qb, stride_qh, stride_qn,
    scale, theta, softcap, q_offset, q_len, kv_len, block_rows, group_rows, tiles, heads, kv_group, parts,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr, CHUNKS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_ANCHOR: tl.constexpr,
):  # fmt: skip
    """AvgPool of Alg. 2, of queries and of the anchor pass's maxima. One program: one set, STEP_P blocks of a head and group.

    Writes the mean queries [B, Hq, R, D] and anchors [B, Hq, R] in float32; the mean queries rounded to 16 bits
    in the scoring kernel's order; the least logit that selects (`limit`, +inf where there is no block); and per set
    (`slack`) how far rounding can move ``logit - limit``: a factor on |k|, one on |k - rounded k|, and a constant.
    """
    row, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    share, member = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    part = share % parts
    kv_heads = heads // kv_group
    b, hk = share // parts // kv_heads, share // parts % kv_heads
    inner = part * HEADS + member
    _, length, first = batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len)
    block = (floor_div(first, BLOCK * STEP) + row) * STEP + chunk * STEP_P
    at = block - floor_div(first, BLOCK)
    few = tl.minimum(tl.minimum(STEP - chunk * STEP_P, STEP_P), block_rows - at)
    few = tl.where((inner < kv_group) & (row < group_rows), few, 0)
    head = b.to(tl.int64) * heads + hk * kv_group + inner
    q_base = q_ptr + b.to(tl.int64) * stride_qb + (hk * kv_group + inner).to(tl.int64) * stride_qh
    m_base = m_ptr + head * q_len
    means = head * block_rows + at
    place = (share.to(tl.int64) * CHUNKS + chunk) * tiles + row // ROWS
    which = (row % ROWS) * HEADS + member
    # One thread of a tensor-core tile holds columns 2t, 2t + 1 of every eight: so a whole set, in this order.
    columns = place * BLOCK_N + (which // 4) * (4 * STEP_P) + (which % 4) * 2
    dims = tl.arange(0, BLOCK_D)
    inside = dims < D
    steps = tl.arange(0, BLOCK_R)
    slack, size, fixed = 0.0, 0.0, 0.0
    for number in range(STEP_P):
        mean = tl.zeros([BLOCK_D], tl.float32)
        limit = float("inf")
        if (at + number >= 0) & (number < few):
            base = (block + number) * BLOCK
            low = tl.maximum(tl.maximum(base, first), 0)
            top = tl.minimum(tl.minimum(base + BLOCK, first + q_len), length)
            total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
            maxima = tl.zeros([BLOCK_R], tl.float32)
            for r in tl.static_range(0, BLOCK, BLOCK_R):
                position = base + r + steps
                real = (position >= low) & (position < top)
                q = load_rows(q_base, position - first, real, stride_qn, D, BLOCK_D)  # [BLOCK_R, BLOCK_D]
                total += q.to(tl.float32)
                if USE_ANCHOR:
                    maxima += tl.load(m_base + position - first, mask=real, other=0.0)  # [BLOCK_R]
            count = tl.maximum(top - low, 1).to(tl.float32)
            mean = tl.sum(total, 0) / count
            # A block of padding alone asks for no column: else its group would depend on the rest of the batch.
            anchor = tl.where(top > low, tl.sum(maxima, 0) / count, float("inf"))
            tl.store(pooled_ptr + (means + number) * D + dims, mean, mask=inside)
            tl.store(anchor_ptr + means + number, anchor)
            limit = tl.where(theta == float("inf"), float("-inf"), anchor - theta)
            about = tl.abs(anchor) + tl.abs(theta) + softcap
            fixed = tl.maximum(fixed, tl.where(about - about == 0.0, about * 4e-7, 0.0))
        high = mean.to(high_ptr.dtype.element_ty)
        rest = mean - high.to(tl.float32)
        norm = tl.sqrt(tl.sum(mean * mean, 0)) * scale
        # NaN on either side leaves the set to the exact test.
        reach = tl.where(limit != limit, limit, tl.sqrt(tl.sum(rest * rest, 0)) * scale + ROUNDING * norm)
        slack = tl.where((reach != reach) | (reach > slack), reach, slack)
        size = tl.where((norm != norm) | (norm > size), norm, size)
        spot = columns + (number // 2) * 8 + number % 2
        tl.store(high_ptr + spot * D + dims, high, mask=inside)
        tl.store(limit_ptr + spot, limit)
    sets: tl.constexpr = BLOCK_N // STEP_P
    tl.store(slack_ptr + place * (3 * sets) + which, slack)
    tl.store(slack_ptr + place * (3 * sets) + sets + which, size)
    tl.store(slack_ptr + place * (3 * sets) + 2 * sets + which, fixed)
