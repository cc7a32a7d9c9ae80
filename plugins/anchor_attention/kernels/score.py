"""Alg. 2's scores by one tensor-core product per key and block; keys too close to call are flagged for `compact.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import batch_row, factor, floor_div, stored_rows


@triton.jit
def capped(s, softcap, SOFTCAP: tl.constexpr):
    """Logits under the model's softcap: cap * tanh(s / cap)."""
    if SOFTCAP:
        s = (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0) * softcap
    return s


@triton.jit
def best(x, BLOCK_M: tl.constexpr, SETS: tl.constexpr, STEP_P: tl.constexpr):
    """[BLOCK_M, SETS]: the maximum over each set's columns (`pool.column`), all of them in one thread's registers."""
    x = tl.reshape(x, [BLOCK_M, SETS // 4, STEP_P // 2, 4, 2])
    return tl.reshape(tl.max(tl.max(x, 4), 2), [BLOCK_M, SETS])


@triton.jit(
    do_not_specialize=("q_offset", "kv_len", "group_rows", "tiles", "words", "first_key", "heads", "kv_group", "parts"),
    do_not_specialize_on_alignment=("table_ptr", "k_scale_ptr"),
)
def score_kernel(
    k_ptr, table_ptr, k_scale_ptr, high_ptr, high_desc, limit_ptr, slack_ptr, starts_ptr, flags_ptr,
    stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, kv_len, group_rows, tiles, words, first_key, heads, kv_group, parts,
    GROUP: tl.constexpr, STEP_P: tl.constexpr, CHUNKS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    WORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Alg. 2's difference test, ``anchor - logit <= theta`` (eq. 2), with a bound on what rounding to 16 bits can change.

    One program: BLOCK_M keys of one KV head, kept on chip, against the pooled queries of every later group.
    Flags are int32 [B, Hq, G, words]: WORD keys a word, bit i "selected for sure", bit 16 + i "too close to call".
    Words of keys that are no candidates of a group may hold anything.
    """
    share = tl.program_id(1)
    kv_heads = heads // kv_group
    part = share % parts
    b, hk = share // parts // kv_heads, share // parts % kv_heads
    start, _, first = batch_row(b, starts_ptr, None, q_offset, kv_len)
    key = first_key + tl.program_id(0) * BLOCK_M
    at = key + start + tl.arange(0, BLOCK_M)
    k_base = k_ptr + b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh
    k = stored_rows(
        k_base, at, at < kv_len, stride_kn, table_ptr, stride_kb, factor(k_scale_ptr), TYPE, PAGE, D, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    wide = k.to(tl.float32)
    norm = tl.sqrt(tl.sum(wide * wide, 1))
    rounded = k.to(high_ptr.dtype.element_ty)
    lost = norm
    if k.dtype == tl.float32:
        lost = wide - rounded.to(tl.float32)
        lost = tl.sqrt(tl.sum(lost * lost, 1))
    # Groups at or before the keys cannot select them.
    row = tl.maximum(key // GROUP + 1 - floor_div(first, GROUP), 0)
    sets: tl.constexpr = BLOCK_N // STEP_P
    which = tl.arange(0, sets)
    inner = part * HEADS + which % HEADS
    head = b.to(tl.int64) * heads + hk * kv_group + inner
    word = tl.arange(0, BLOCK_M // WORD)
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for tile in tl.range(row // ROWS, tiles):
        flags = tl.zeros([BLOCK_M, sets], tl.int32)
        for chunk in tl.static_range(CHUNKS):
            place = (share * CHUNKS + chunk) * tiles + tile
            limit = tl.load(limit_ptr + place * BLOCK_N + columns)  # [BLOCK_N]
            slack_row = slack_ptr + place * (3 * sets) + which
            bound = norm[:, None] * tl.load(slack_row)[None, :] + tl.load(slack_row + 2 * sets)[None, :]
            if k.dtype == tl.float32:
                bound += lost[:, None] * tl.load(slack_row + sets)[None, :]
            if TMA:
                q = high_desc.load([place * BLOCK_N, 0])
            else:
                spot = high_ptr + (place.to(tl.int64) * BLOCK_N + columns)[:, None] * D + dims[None, :]
                q = tl.load(spot, mask=(dims < D)[None, :], other=0.0)  # [BLOCK_N, BLOCK_D]
            s = capped(tl.dot(rounded, tl.trans(q)) * scale, softcap, SOFTCAP)  # [BLOCK_M, BLOCK_N]
            above = best(s - limit[None, :], BLOCK_M, sets, STEP_P)  # [BLOCK_M, sets]
            # Written so that NaN, in any of the three, ends up unsure.
            sure = above > bound
            unsure = (sure | (above < -bound)) == 0
            flags = flags | sure.to(tl.int32) | (unsure.to(tl.int32) << WORD)
        bits = tl.reshape(flags, [BLOCK_M // WORD, WORD, sets]) << tl.arange(0, WORD)[None, :, None]
        packed = tl.sum(bits, 1)
        group = tile * ROWS + which // HEADS
        spot = (head * group_rows + group) * words + (key - first_key) // WORD
        inside = (group < group_rows) & (inner < kv_group)
        tl.store(flags_ptr + spot[None, :] + word[:, None], packed, mask=inside[None, :])
