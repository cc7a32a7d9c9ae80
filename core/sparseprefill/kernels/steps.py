"""Device functions that the attention kernels share: one online-softmax step, rows by pointer, positions."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def floor_div(x, y: tl.constexpr):
    """Floor division that holds for negative x (Triton's // truncates)."""
    return tl.where(x >= 0, x // y, -((y - 1 - x) // y))


@triton.jit
def batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len):
    """(start, length, first) of batch row `b`: index of its first real key, number of its real keys, and the position
    of query row 0 on the row's own grid, which begins at its first real key. Pointers may be None: no padding."""
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b)
    length = kv_len - start
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b)
    return start, length, q_offset - start


@triton.jit
def load_rows(ptr, rows, keep, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr = 0):
    """[len(rows), BLOCK_D]: rows of a matrix by index, 0 where not kept. RUN: numbers that a thread loads at once, at
    most; 0 for no limit but the hardware's."""
    dims = tl.arange(0, BLOCK_D)
    if RUN > 0:
        dims = tl.max_contiguous(dims, RUN)
    where = ptr + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    if D == BLOCK_D:
        return tl.load(where, mask=keep[:, None], other=0.0)
    return tl.load(where, mask=keep[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def factor(scale_ptr):
    """The one number behind a pointer, loaded once for all steps of a program; None of None."""
    scale = scale_ptr
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    return scale


@triton.jit
def converted(x, scale, TYPE: tl.constexpr):
    """Contents of a cache as the numbers to compute with: times `scale`, in float32, unless that is None; then in TYPE,
    unless that is. Whatever reads or copies a cache does it here, so that all of it finds the same bits."""
    if scale is not None:
        x = x.to(tl.float32) * scale
    if TYPE is not None:
        x = x.to(TYPE)
    return x


@triton.jit
def stored_rows(
    ptr, rows, keep, stride, table_ptr, stride_page, scale,
    TYPE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPREAD: tl.constexpr = False,
):  # fmt: skip
    """`load_rows` of a head's K or V, `converted`; with PAGE > 0, row j is slot ``j % PAGE`` of page ``table[j // PAGE]``.

    SPREAD: numbers lie in the threads as they would if they were stored in TYPE, so that sums over them have the same
    order, and the same bits; else a thread loads more of smaller ones.
    """
    RUN: tl.constexpr = 128 // TYPE.primitive_bitwidth if SPREAD and TYPE is not None else 0
    if PAGE == 0:
        x = load_rows(ptr, rows, keep, stride, D, BLOCK_D, RUN)
    else:
        page = tl.load(table_ptr + rows // PAGE, mask=keep, other=0).to(tl.int64)
        where = page * stride_page + (rows % PAGE).to(tl.int64) * stride
        x = load_rows(ptr, where, keep, 1, D, BLOCK_D, RUN)
    return converted(x, scale, TYPE)


@triton.jit
def logits(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """[M, N] base-2 logits of q [M, D] and k [N, D]."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [M, D] x [D, N]
    if SOFTCAP:
        # tanh(x) = 2 * sigmoid(2x) - 1; scale holds log2(e), which the cap must not see
        s = (2.0 * tl.sigmoid(2.0 * s * LN2 / softcap) - 1.0) * softcap * LOG2E
    return s


@triton.jit
def step(acc, l, m, q, k, v, score, PRECISION: tl.constexpr):
    """One online-softmax step over keys that every row may see.

    acc [M, D], l and m [M]: the state. q [M, D], k and v [N, D]. score: `arguments.Logits`.
    """
    if score.softcap is not None:
        s = logits(q, k, score.scale, score.softcap, True, PRECISION)  # [M, N]
        m_new = tl.maximum(m, tl.max(s, 1))  # [M]
        p = tl.math.exp2(s - m_new[:, None])  # [M, N]
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        m_new = tl.maximum(m, tl.max(s, 1) * score.scale)  # [M]
        p = tl.math.exp2(s * score.scale - m_new[:, None])  # [M, N]
    alpha = tl.math.exp2(m - m_new)  # [M]
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)  # [M, N] x [N, D]
    return acc, l, m_new


@triton.jit
def masked_step(
    acc, l, m, q, k, v, keep, score, PRECISION: tl.constexpr, CAREFUL: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One online step where `keep` [M, N] says which pairs count. Rows without a key so far stay at -inf, without NaN.

    CAREFUL: a NaN or infinity of v reaches only the rows that may see its key (0 * NaN is NaN in a plain product).
    """
    s = logits(q, k, score.scale, score.softcap, score.softcap is not None, PRECISION)  # [M, N]
    s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))  # [M]
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - base[:, None])  # [M, N]
    alpha = tl.math.exp2(m - base)  # [M]
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    acc = acc * alpha[:, None]
    if CAREFUL:
        wide = v.to(tl.float32)  # [N, D]
        nonfinite = (wide - wide) != 0.0  # [N, D]
        finite = tl.where(nonfinite, 0.0, wide).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), finite, acc, input_precision=PRECISION)  # [M, N] x [N, D]
        number = tl.arange(0, BLOCK_N)
        for j in range(BLOCK_N):
            mine = number == j  # [N]
            value = tl.sum(tl.where(mine[:, None], wide, 0.0), 0)  # [D]
            strange = tl.max(tl.where(mine[:, None], nonfinite.to(tl.int32), 0), 0) > 0  # [D]
            sees = tl.max(tl.where(mine[None, :], keep.to(tl.int32), 0), 1) > 0  # [M]
            weight = tl.sum(tl.where(mine[None, :], p, 0.0), 1)  # [M]
            add = sees[:, None] & strange[None, :]  # [M, D]
            acc = tl.where(add, acc + weight[:, None] * value[None, :], acc)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [M, N] x [N, D]
    return acc, l, m_new


@triton.jit
def crossing_steps(list_ptr, count, low, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number of a list's last steps (BLOCK_N keys each) that hold a key beyond row `low`, so that they need a mask.

    Lists ascend. Only the few last tiles can cross, which one load shows; a list that names tiles of the future, as
    callers may make it, is searched on.
    """
    parts: tl.constexpr = TILE_K // BLOCK_N
    few: tl.constexpr = TILE_Q // TILE_K + 1 if TILE_Q < 4 * TILE_K else 4
    total = 0
    for entry in tl.static_range(few):
        # Scalars, loaded side by side: a vector here would cost the main loop its uniform registers.
        there = entry < count
        tile = tl.load(list_ptr + count - 1 - entry, mask=there, other=0)
        below = tl.minimum(tl.maximum((low + 1 - tile * TILE_K) // BLOCK_N, 0), parts)
        total += tl.where(there, parts - below, 0)
    more = (total >= few * parts) & (count > few)
    while more:
        end = (tl.load(list_ptr + count - 1 - total // parts) + 1) * TILE_K - 1
        more = end > low
        if more:
            total += parts
            more = total < count * parts
    return total


@triton.jit
def count_up_to(indices_ptr, offset, count, bound, WIDTH: tl.constexpr = 1):
    """Number of keys <= bound in an ascending list of columns, each WIDTH keys wide; one load where all are."""
    end = bound
    if WIDTH > 1:
        bound = floor_div(end, WIDTH)
    low, high = 0, count
    if count > 0:
        if tl.load(indices_ptr + offset + count - 1) <= bound:
            low = count
        while low < high:
            middle = (low + high) // 2
            if tl.load(indices_ptr + offset + middle) <= bound:
                low = middle + 1
            else:
                high = middle
    if WIDTH > 1:  # noqa: SIM102 - the first is known when this is compiled
        if low > 0:
            behind = (tl.load(indices_ptr + offset + low - 1) + 1) * WIDTH
            low = low * WIDTH - tl.maximum(behind - 1 - end, 0)
    return low


@triton.jit
def column_keys(list_ptr, first, number, WIDTH: tl.constexpr, seen=None):
    """Positions of keys `first` + `number` [N] in a list of columns, each WIDTH keys wide; `first` is a multiple of N.

    seen: keys of the list that there are, behind which nothing is read; None where all are there. Columns of one key are
    read as a list of keys is, by the same instructions. Of wider ones each entry is loaded once and spread: with a load
    of ``index[key // WIDTH]`` for each key, Triton 3.6 gave wrong positions in masked steps on an H100, where the
    interpreter gave right ones (tests/kernels/test_widths.py). Why was not found.
    """
    N: tl.constexpr = number.shape[0]
    if WIDTH == 1:
        if seen is None:
            at = tl.load(list_ptr + first + number)
        else:
            at = tl.load(list_ptr + first + number, mask=first + number < seen, other=0)
    elif WIDTH >= N:
        entry = tl.load(list_ptr + first // WIDTH)
        at = entry * WIDTH + first % WIDTH + number
    else:
        entry = first // WIDTH + tl.arange(0, N // WIDTH)  # [N / WIDTH]
        if seen is None:
            column = tl.load(list_ptr + entry)
        else:
            column = tl.load(list_ptr + entry, mask=entry * WIDTH < seen, other=0)
        at = tl.reshape(column[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], [N])
    return at
