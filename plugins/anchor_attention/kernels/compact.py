"""Settles the keys that were too close to call, in float32, and turns the flags of a group into its ascending list."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparseprefill.kernels.steps import batch_row, factor, floor_div, load_rows, stored_rows

from .score import capped


class Blocks(NamedTuple):
    """Mean queries of some blocks in three parts, each [BLOCK_D, N]; anchors [N]; and which blocks there are."""

    high: Any
    middle: Any
    low: Any
    anchor: Any
    real: Any


@triton.jit
def _parts(pooled, DTYPE: tl.constexpr):
    """A float32 matrix, transposed, in three parts of the keys' dtype, which keep its accuracy."""
    high = pooled.to(DTYPE)
    rest = pooled - high.to(tl.float32)
    middle = rest.to(DTYPE)
    return tl.trans(high), tl.trans(middle), tl.trans((rest - middle.to(tl.float32)).to(DTYPE))


@triton.jit
def _near(k, blocks, scale, softcap, theta, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """[N] int32: which keys come near the anchor of any of the blocks (eq. 2). A NaN logit does."""
    if k.dtype == tl.float32:
        s = tl.dot(k, blocks.high, input_precision=PRECISION)  # [BLOCK_N, STEP_P]
    else:
        s = tl.dot(k, blocks.high, tl.dot(k, blocks.middle, tl.dot(k, blocks.low)))
    s = capped(s * scale, softcap, SOFTCAP)
    return tl.max((((blocks.anchor[None, :] - s > theta) == 0) & blocks.real[None, :]).to(tl.int32), 1)


@triton.jit
def _blocks(
    pooled_ptr, anchor_ptr, base, at, block_rows, real, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr
):
    """The `Blocks` at rows `at`, where `real`."""
    real = real & (at >= 0) & (at < block_rows)
    high, middle, low = _parts(load_rows(pooled_ptr, base + at, real, D, D, BLOCK_D), DTYPE)
    return Blocks(high, middle, low, tl.load(anchor_ptr + base + at, mask=real, other=0.0), real)


@triton.jit
def _append(
    list_ptr, count, flags_ptr, first, low, end, first_key, SHIFT: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr
):
    """Append the candidate keys that WORDS words of flags name, in ascending order; the new count.

    A thread owns whole words, so that it walks their bits without talking to another.
    """
    word = first + tl.arange(0, WORDS)
    key = first_key + word * WORD
    value = tl.load(flags_ptr + word, mask=key < end, other=0, cache_modifier=".cg") >> SHIFT  # [WORDS]
    # Bits of keys that are no candidates: before `low`, and from `end` on.
    drop = tl.minimum(tl.maximum(low - key, 0), WORD)
    take = tl.minimum(tl.maximum(end - key, 0), WORD)
    value = value & ((1 << take) - (1 << tl.minimum(drop, take)))
    many = value - ((value >> 1) & 0x5555)
    many = (many & 0x3333) + ((many >> 2) & 0x3333)
    many = (many + (many >> 4)) & 0x0F0F
    many = (many + (many >> 8)) & 0x1F
    slot = list_ptr + (count + tl.cumsum(many, 0) - many)
    for i in tl.static_range(WORD):
        bit = (value >> i) & 1
        tl.store(slot, key + i, mask=bit > 0)
        slot += bit
    return count + tl.sum(many, 0)


@triton.jit(
    do_not_specialize=(
        "q_offset", "q_len", "block_rows", "group_rows", "words", "first_key", "init", "base_group", "total",
        "heads", "kv_group",
    ),
    do_not_specialize_on_alignment=("table_ptr", "k_scale_ptr"),
)  # fmt: skip
def compact_kernel(
    k_ptr, table_ptr, k_scale_ptr, pooled_ptr, anchor_ptr, starts_ptr, flags_ptr, counts_ptr, offsets_ptr, indices_ptr,
    stride_kb, stride_kh, stride_kn,
    scale, softcap, theta, q_offset, q_len, block_rows, group_rows, words, first_key, init, base_group, total,
    heads, kv_group,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Alg. 2's stripe lists: settles the keys that are too close to call in float32, then lists all that are selected.

    One program: the list of one group of one query head. base_group: row 0's group where nothing is padded.
    """
    row = group_rows - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b, h = bh // heads, bh % heads
    start, _, first = batch_row(b, starts_ptr, None, q_offset, 0)
    group = floor_div(first, BLOCK * STEP) + row
    end = group * (BLOCK * STEP)
    end = tl.where(end < first + q_len, end, 0)  # rows for lists that a later start needs have no query
    # Where the list begins: see `layout.before`. Rows that start later need less room than they get.
    skip = tl.minimum(tl.maximum(init // (BLOCK * STEP) + 1 - base_group, 0), row).to(tl.int64)
    many = row.to(tl.int64)
    pairs = (many * (many - 1) - skip * (skip - 1)) // 2
    offset = bh.to(tl.int64) * total + (many - skip) * (base_group * (BLOCK * STEP) - init) + pairs * (BLOCK * STEP)
    row_of_lists = bh.to(tl.int64) * group_rows + row
    tl.store(offsets_ptr + row_of_lists, offset)
    list_ptr = indices_ptr + offset
    mine = flags_ptr + row_of_lists * words
    used = tl.cdiv(tl.maximum(end - first_key, 0), WORD)

    unsure = 0
    for w in range(0, used, WORDS):
        unsure = _append(list_ptr, unsure, mine, w, init, end, first_key, WORD, WORD, WORDS)
    if unsure > 0:
        tl.debug_barrier()
        dtype: tl.constexpr = k_ptr.dtype.element_ty if TYPE is None else TYPE
        k_scale = factor(k_scale_ptr)
        k_base = k_ptr + b.to(tl.int64) * stride_kb + (h // kv_group).to(tl.int64) * stride_kh
        number = tl.arange(0, STEP_P)
        block = group * STEP - floor_div(first, BLOCK) + number
        base = bh.to(tl.int64) * block_rows
        # Groups of up to STEP_P blocks (the usual case) keep their mean queries on chip.
        once: tl.constexpr = STEP <= STEP_P
        blocks = _blocks(pooled_ptr, anchor_ptr, base, block, block_rows, number < STEP, D, BLOCK_D, dtype)
        for j in tl.range(0, unsure, BLOCK_N, num_stages=1):
            some = j + tl.arange(0, BLOCK_N) < unsure
            key = tl.load(list_ptr + j + tl.arange(0, BLOCK_N), mask=some, other=0, cache_modifier=".cg")
            k = stored_rows(
                k_base, key + start, some, stride_kn, table_ptr, stride_kb, k_scale, TYPE, PAGE, D, BLOCK_D
            )  # [BLOCK_N, BLOCK_D]
            near = _near(k, blocks, scale, softcap, theta, SOFTCAP, PRECISION)
            if not once:
                for chunk in range(STEP_P, STEP, STEP_P):
                    more = _blocks(
                        pooled_ptr, anchor_ptr, base, block + chunk, block_rows, chunk + number < STEP, D, BLOCK_D, dtype
                    )  # fmt: skip
                    near = near | _near(k, more, scale, softcap, theta, SOFTCAP, PRECISION)
            place = key - first_key
            tl.atomic_or(mine + place // WORD, 1 << (place % WORD), mask=some & (near > 0), sem="relaxed")
        tl.debug_barrier()

    count = 0
    for w in range(0, used, WORDS):
        count = _append(list_ptr, count, mine, w, init, end, first_key, 0, WORD, WORDS)
    tl.store(counts_ptr + row_of_lists, count)
