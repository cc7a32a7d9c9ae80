"""Alg. 2 in three Triton kernels and launches: mean queries and anchors of blocks, scores that flag keys, their lists.

Scores are one tensor-core product per key and block, in 16 bits. Keys that are too close to call by it are flagged, and
settled in float32 before a group's flags become its ascending list. No score matrix in memory, nothing counted on the
host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.chips import Chip, chip
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, HALVES_ALONE, Settings
from sparseprefill.kernels.source import Keys, strides
from sparseprefill.kernels.steps import batch_row, factor, floor_div, load_rows, stored_rows

from .layout import WORD, Layout, Regions

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


@triton.jit
def capped(s, softcap, SOFTCAP: tl.constexpr):
    """Logits under the model's softcap: cap * tanh(s / cap)."""
    if SOFTCAP:
        s = (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0) * softcap
    return s


@triton.jit
def best(x, BLOCK_M: tl.constexpr, SETS: tl.constexpr, STEP_P: tl.constexpr):
    """[BLOCK_M, SETS]: the maximum over each set's columns (the order of `pool_kernel`), all of them in one thread's registers."""
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


WORDS = 256  # words of flags per step of the compaction
BATCH = 64  # keys settled at once


def settings(chip: Chip, block_d: int, itemsize: int) -> Settings:
    """Settings of the scoring launch, block_m keys by block_n pooled queries.

    block_d: head dimension, rounded up to a power of two. itemsize: bytes per element of k.
    """
    if block_d > HALVES_ALONE:
        return Settings(64, 64, 4, 2, tma=True) if chip.large else Settings(32, 32, 4, 2)
    if not chip.large:
        return Settings(64, 64, 4, 2)
    if block_d > 128:
        return Settings(128, 64, 8, 2, tma=True)
    # 256 keys x 64 queries: each pooled query is read half as often as with 128 x 128, and two programs still fit.
    cap = chip.registers if itemsize == 2 else None
    return Settings(256, 64, 8, 3, tma=True, maxnreg=cap)


def stripes(
    call: AttentionCall, regions: Regions, m: Tensor, theta: float, *, use_anchor: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, offsets and indices of `stages.stripes`, for m ``[B, Hq, Nq]``, the anchor pass's row maxima.

    Lists have room for every candidate key. Keys are selected as by float32 mean queries and float32 sums.
    """
    geometry, device, theta = call.geometry, call.q.device, float(theta)
    q, keys = call.q if call.q.stride(-1) == 1 else call.q.contiguous(), Keys.of(call)
    batch, heads, _, width = q.shape
    chosen = choose(call)
    plan = Layout.of(geometry, call.kv_heads, regions, chosen.block_m, chosen.block_n)
    blocks, block_d = geometry.tile_rows(regions.block), triton.next_power_of_2(width)
    counts = torch.empty(batch, heads, plan.groups, dtype=torch.int32, device=device)
    offsets = torch.empty(batch, heads, plan.groups, dtype=torch.int64, device=device)
    if plan.room == 0:
        return counts.zero_(), offsets.zero_(), counts.new_zeros(1)
    real: dict[str, Any] = {"dtype": torch.float32, "device": device}
    indices = torch.empty(batch * heads * plan.room, dtype=torch.int32, device=device)
    flags = torch.empty(batch * heads * plan.groups, plan.words, dtype=torch.int32, device=device)
    pooled, anchor = torch.empty(batch, heads, blocks, width, **real), torch.empty(batch, heads, blocks, **real)
    places = plan.shares * plan.chunks * plan.tiles
    rounded = torch.float16 if q.dtype == torch.float32 else q.dtype
    high = torch.empty(places * chosen.block_n, width, dtype=rounded, device=device)
    pooled_desc = TensorDescriptor.from_tensor(high, [chosen.block_n, block_d]) if chosen.tma else None
    limit, slack = torch.empty(places, chosen.block_n, **real), torch.empty(places, 3, plan.sets, **real)

    numbers = (call.softmax_scale, call.softcap or 0.0)
    cut: dict[str, Any] = {"STEP_P": plan.step, "D": width, "BLOCK_D": block_d}
    tile: dict[str, Any] = {"CHUNKS": plan.chunks, "HEADS": plan.heads, "ROWS": plan.rows, "BLOCK_N": chosen.block_n}
    bits: dict[str, Any] = {"SOFTCAP": call.softcap is not None, "WORD": WORD, **keys.flags}
    enqueue(pool_kernel, (plan.tiles * plan.rows * plan.chunks, plan.shares * plan.heads),
        q, m.contiguous(), call.starts, call.lengths, pooled, anchor, high, limit, slack, *strides(q),
        call.softmax_scale, theta, call.softcap or 0.0, geometry.q_offset, geometry.q_len, geometry.kv_len,
        blocks, plan.groups, plan.tiles, heads, call.group, plan.parts,
        BLOCK=regions.block, STEP=regions.step, BLOCK_R=_rows_at_once(regions.block),
        USE_ANCHOR=use_anchor, **cut, **tile, num_warps=4, **FUSED,
    )  # fmt: skip
    enqueue(score_kernel, (plan.key_tiles, plan.shares),
        keys.k, keys.table, keys.scale, high, pooled_desc, limit, slack, call.starts, flags,
        *keys.strides, *numbers, geometry.q_offset, geometry.kv_len, plan.groups, plan.tiles, plan.words,
        plan.first_key, heads, call.group, plan.parts,
        GROUP=regions.group, BLOCK_M=chosen.block_m, TMA=chosen.tma, **cut, **tile, **bits,
        **{**chosen.options, "num_stages": chosen.stages if plan.chunks == 1 else 1},
    )  # fmt: skip
    enqueue(compact_kernel, (plan.groups, batch * heads),
        keys.k, keys.table, keys.scale, pooled, anchor, call.starts, flags, counts, offsets, indices, *keys.strides,
        *numbers, theta, geometry.q_offset, geometry.q_len, blocks, plan.groups, plan.words, plan.first_key,
        regions.init_tokens, geometry.q_offset // regions.group, plan.room, heads, call.group,
        BLOCK=regions.block, STEP=regions.step, WORDS=WORDS, BLOCK_N=BATCH, **{**cut, "STEP_P": max(plan.step, 16)},
        **bits, PRECISION="ieee", num_warps=4, **FUSED,
    )  # fmt: skip
    return counts, offsets, indices


def choose(call: AttentionCall) -> Settings:
    """Settings of the scoring launch for the call's device and width."""
    return settings(chip(call.q.device), triton.next_power_of_2(call.q.shape[-1]), call.q.element_size())


def _rows_at_once(block: int) -> int:
    """Rows of a block of queries, for at most a few loads in flight: 32 of the usual 128."""
    return int(max(min(32, triton.next_power_of_2(block)), triton.next_power_of_2(-(-block // 8))))
