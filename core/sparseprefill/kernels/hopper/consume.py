"""The consumers: online softmax over the steps of an item, 64 query rows a warpgroup."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparseprefill.kernels.hopper.store import store_rows
from sparseprefill.kernels.hopper.work import CROSSING, ITEM, SEEN, SLOTS, TILES, WHOLE, get, item_rows

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def pin(x):
    """x, computed before whatever follows."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def hide(s, at_stage, position, COLUMNS: gl.constexpr):
    """Logits with -inf where a key stands behind its row, or nowhere (see produce.HIDDEN)."""
    at = at_stage.load(COLUMNS).to(gl.uint32, bitcast=True)
    return gl.where(at[None, :] <= position.to(gl.uint32, bitcast=True)[:, None], s, float("-inf"))


@gluon.jit
def softmax(s, m, l, scale):
    """One online step: weights, factor for what was summed before, new sum and new maximum (base 2)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - base[:, None])
    alpha = gl.exp2(m - base)
    return p, alpha, l * alpha + gl.sum(p, 1), m_new


@gluon.jit
def consume(
    q_smem, k_smem, v_smem, at_smem, work_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    work_ready, work_empty, starts_ptr, lengths_ptr, sinks_ptr, carry_m_ptr, carry_l_ptr, carry_acc_ptr,
    out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, scale, q_offset, q_len, kv_len, blocks, items, heads,
    HALF_NUMBER: gl.constexpr, TILE_Q: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, HAS_CARRY: gl.constexpr, STORE_STATE: gl.constexpr, HAS_STARTS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of a query block. The next step's logits run on the tensor cores during this one's softmax.

    The softmax of step j hides behind the product of step j - 1 with its values, as in FlashAttention-3 (Shah et al.,
    2024, Algorithm 2).
    """
    half: gl.constexpr = BLOCK_M // 2
    width: gl.constexpr = D if D <= 128 else 128  # of one accumulator; a second one, `o_high`, holds what lies beyond
    wide: gl.constexpr = D > 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = k_smem.dtype
    stage = 0
    phase = 0
    turn = 0
    slot = 0
    lap = 0
    going = True
    while going:
        mbarrier.wait(work_ready.index(slot), lap)
        item = get(work_smem, slot, ITEM)
        tiles = get(work_smem, slot, TILES)
        crossing = get(work_smem, slot, CROSSING)
        steps = tiles + gl.cdiv(get(work_smem, slot, SEEN), BLOCK_N)
        masked = tiles + get(work_smem, slot, WHOLE)
        mbarrier.arrive(work_empty.index(slot), count=1)
        slot += 1
        if slot == SLOTS:
            slot = 0
            lap ^= 1
        going = item < items
        if going:
            bh, block, _, length, first, _, low = item_rows(
                item, starts_ptr, lengths_ptr, q_offset, kv_len, blocks, heads, TILE_Q, BLOCK_M, HAS_STARTS, HAS_LENGTHS
            )
            row = low - first + HALF_NUMBER * half  # of the call's queries
            index = row + gl.arange(0, half, layout=s_rows)
            position = index + first
            inside = (index >= 0) & (index < q_len)
            o_index = row + gl.arange(0, half, layout=o_rows)
            o_inside = (o_index >= 0) & (o_index < q_len)
            dims = gl.arange(0, width, layout=gl.SliceLayout(0, o_layout))
            head_row = bh.to(gl.int64) * q_len
            if HAS_CARRY:
                m = gl.load(carry_m_ptr + head_row + index, mask=inside, other=float("-inf")) * LOG2E
                l = gl.load(carry_l_ptr + head_row + index, mask=inside, other=0.0)  # noqa: E741
                at = carry_acc_ptr + (head_row + o_index)[:, None] * D + dims[None, :]
                o = gl.load(at, mask=o_inside[:, None], other=0.0)
                if wide:
                    o_high = gl.load(at + width, mask=o_inside[:, None], other=0.0)
            else:
                m = gl.full([half], float("-inf"), gl.float32, s_rows)
                l = gl.full([half], 0.0, gl.float32, s_rows)  # noqa: E741
                o = gl.full([half, width], 0.0, gl.float32, o_layout)
                if wide:
                    o_high = gl.full([half, width], 0.0, gl.float32, o_layout)
            if steps > 0:
                q = q_smem.index(HALF_NUMBER).reshape([half, D])
                mbarrier.wait(q_ready, turn & 1)
                turn += 1
                zero = gl.full([half, BLOCK_N], 0.0, gl.float32, s_layout)
                mbarrier.wait(k_ready.index(stage), phase)
                k = k_smem.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
                s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                if (crossing > 0) | (masked == 0):
                    s = hide(s, at_smem.index(stage), position, s_columns)
                mbarrier.arrive(k_empty.index(stage), count=1)
                p, alpha, l, m = softmax(s, m, l, scale)
                if HAS_CARRY:
                    factor = gl.convert_layout(alpha, o_rows)[:, None]
                    o = o * factor
                    if wide:
                        o_high = o_high * factor
                p16 = gl.convert_layout(p.to(dtype), p_layout)
                for j in range(1, steps):
                    before = stage
                    phase_before = phase
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
                    mbarrier.wait(k_ready.index(stage), phase)
                    k = k_smem.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
                    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                    mbarrier.wait(v_ready.index(before), phase_before)
                    v = v_smem.index(before).reshape([BLOCK_N, D])
                    if wide:
                        o = warpgroup_mma(p16, v.slice(0, width, dim=1), o, is_async=True)
                        o_high = warpgroup_mma(p16, v.slice(width, width, dim=1), o_high, is_async=True)
                    else:
                        o = warpgroup_mma(p16, v, o, is_async=True)
                    s = warpgroup_mma_wait(2 if wide else 1, deps=[s])
                    if (j < crossing) | (j >= masked):
                        s = hide(s, at_smem.index(stage), position, s_columns)
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    p, alpha, l, m = softmax(s, m, l, scale)
                    # ptxas moves the wait for the values above the softmax, which would then hide behind nothing.
                    # A wait that is over already (a loop in the machine code) holds it in place.
                    l = pin(l)  # noqa: E741
                    mbarrier.wait(k_ready.index(stage), phase)
                    if wide:
                        o, o_high = warpgroup_mma_wait(0, deps=[o, o_high])
                    else:
                        o = warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(v_empty.index(before), count=1)
                    factor = gl.convert_layout(alpha, o_rows)[:, None]
                    o = o * factor
                    if wide:
                        o_high = o_high * factor
                    p16 = gl.convert_layout(p.to(dtype), p_layout)
                mbarrier.arrive(q_empty, count=1)
                mbarrier.wait(v_ready.index(stage), phase)
                v = v_smem.index(stage).reshape([BLOCK_N, D])
                if wide:
                    o = warpgroup_mma(p16, v.slice(0, width, dim=1), o, is_async=True)
                    o_high = warpgroup_mma(p16, v.slice(width, width, dim=1), o_high, is_async=True)
                    o, o_high = warpgroup_mma_wait(0, deps=[o, o_high])
                else:
                    o = warpgroup_mma(p16, v, o, is_async=True)
                    o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.arrive(v_empty.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            real = inside & (position >= 0) & (position < length)
            o_real = o_inside & (o_index + first >= 0) & (o_index + first < length)
            # A NaN, or an infinity, shows in a row's sum: one flag for the block, whoever writes it.
            checked = gl.sum(o, 1)
            if wide:
                checked += gl.sum(o_high, 1)
            flag = gl.full([half], 1, gl.int8, o_rows)
            where = odd_ptr + bh.to(gl.int64) * blocks + block + 0 * o_index
            gl.store(where, flag, mask=o_real & (checked - checked != 0.0))
            m = gl.where(real, m, float("-inf"))
            l = gl.where(real, l, 0.0)  # noqa: E741
            if STORE_STATE:
                gl.store(m_ptr + head_row + index, m * LN2, mask=inside)
                gl.store(l_ptr + head_row + index, l, mask=inside)
                at = acc_ptr + (head_row + o_index)[:, None] * D + dims[None, :]
                gl.store(at, gl.where(o_real[:, None], o, 0.0), mask=o_inside[:, None])
                if wide:
                    gl.store(at + width, gl.where(o_real[:, None], o_high, 0.0), mask=o_inside[:, None])
            else:
                lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(gl.where(l == 0.0, 1.0, l))) * LN2)
                b = (bh // heads).to(gl.int64)
                h = (bh % heads).to(gl.int64)
                gl.store(lse_ptr + b * stride_lb + h * stride_lh + index, lse, mask=inside)
                total = l
                if HAS_SINKS:
                    floor = gl.where(m == float("-inf"), 0.0, m)
                    total += gl.exp2(gl.load(sinks_ptr + bh % heads).to(gl.float32) * LOG2E - floor)
                inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), o_rows)
                out = gl.where(o_real[:, None], o * inverse[:, None], 0.0).to(out_ptr.dtype.element_ty)
                base_ptr = out_ptr + b * stride_ob + h * stride_oh
                store_rows(base_ptr, stride_on, row, q_len, out, half, width)
                if wide:
                    out = gl.where(o_real[:, None], o_high * inverse[:, None], 0.0).to(out_ptr.dtype.element_ty)
                    store_rows(base_ptr + width, stride_on, row, q_len, out, half, width)
