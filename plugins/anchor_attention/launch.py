"""Alg. 2 on the GPU in three launches: pool, score, compact. No score matrix in memory, nothing counted on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseprefill.kernels.sampled.launch import capability
from sparseprefill.kernels.settings import FUSED, Settings
from sparseprefill.kernels.source import Keys, strides

from .kernels import compact_kernel, pool_kernel, score_kernel
from .layout import WORD, Layout

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from .regions import Regions

WORDS = 256  # words of flags per step of the compaction
BATCH = 64  # keys settled at once


def settings(capability: tuple[int, int], block_d: int, itemsize: int) -> Settings:
    """Settings of the scoring launch, block_m keys by block_n pooled queries: (9, 0) is Hopper, (0, 0) the interpreter.

    block_d: head dimension, rounded up to a power of two. itemsize: bytes per element of k.
    """
    if capability[0] < 9:
        return Settings(64, 64, 4, 2)
    if block_d > 128:
        return Settings(128, 64, 8, 2, tma=True)
    # 256 keys x 64 queries: each pooled query is read half as often as with 128 x 128, and two programs still fit.
    return Settings(256, 64, 8, 3, tma=True, maxnreg=128 if itemsize == 2 else None)


def stripes(
    call: AttentionCall, regions: Regions, m: Tensor, theta: float, *, use_anchor: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, offsets and indices of `identify.stripes`, for m ``[B, Hq, Nq]``, the anchor pass's row maxima.

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
    limit, slack = torch.empty(places, chosen.block_n, **real), torch.empty(places, 3, plan.sets, **real)

    numbers = (call.softmax_scale, call.softcap or 0.0)
    cut: dict[str, Any] = {"STEP_P": plan.step, "D": width, "BLOCK_D": block_d}
    tile: dict[str, Any] = {"CHUNKS": plan.chunks, "HEADS": plan.heads, "ROWS": plan.rows, "BLOCK_N": chosen.block_n}
    bits: dict[str, Any] = {"SOFTCAP": call.softcap is not None, "WORD": WORD, **keys.flags}
    pool_kernel[(plan.tiles * plan.rows * plan.chunks, plan.shares * plan.heads)](
        q, m.contiguous(), call.starts, call.lengths, pooled, anchor, high, limit, slack, *strides(q),
        call.softmax_scale, theta, call.softcap or 0.0, geometry.q_offset, geometry.q_len, geometry.kv_len,
        blocks, plan.groups, plan.tiles, heads, call.group, plan.parts,
        BLOCK=regions.block, STEP=regions.step, BLOCK_R=_rows_at_once(regions.block),
        USE_ANCHOR=use_anchor, **cut, **tile, num_warps=4, **FUSED,
    )  # fmt: skip
    score_kernel[(plan.key_tiles, plan.shares)](
        keys.k, keys.table, keys.scale, high, _descriptor(high, chosen, block_d), limit, slack, call.starts, flags,
        *keys.strides, *numbers, geometry.q_offset, geometry.kv_len, plan.groups, plan.tiles, plan.words,
        plan.first_key, heads, call.group, plan.parts,
        GROUP=regions.group, BLOCK_M=chosen.block_m, TMA=chosen.tma, **cut, **tile, **bits,
        **{**chosen.options, "num_stages": chosen.stages if plan.chunks == 1 else 1},
    )  # fmt: skip
    compact_kernel[(plan.groups, batch * heads)](
        keys.k, keys.table, keys.scale, pooled, anchor, call.starts, flags, counts, offsets, indices, *keys.strides,
        *numbers, theta, geometry.q_offset, geometry.q_len, blocks, plan.groups, plan.words, plan.first_key,
        regions.init_tokens, geometry.q_offset // regions.group, plan.room, heads, call.group,
        BLOCK=regions.block, STEP=regions.step, WORDS=WORDS, BLOCK_N=BATCH, **{**cut, "STEP_P": max(plan.step, 16)},
        **bits, PRECISION="ieee", num_warps=4, **FUSED,
    )  # fmt: skip
    return counts, offsets, indices


def choose(call: AttentionCall) -> Settings:
    """Settings of the scoring launch for the call's device and width."""
    return settings(capability(call.q.device), triton.next_power_of_2(call.q.shape[-1]), call.q.element_size())


def _rows_at_once(block: int) -> int:
    """Of a block of queries, for at most a few loads in flight: 32 of the usual 128."""
    return int(max(min(32, triton.next_power_of_2(block)), triton.next_power_of_2(-(-block // 8))))


def _descriptor(high: Tensor, chosen: Settings, block_d: int) -> TensorDescriptor | None:
    return TensorDescriptor.from_tensor(high, [chosen.block_n, block_d]) if chosen.tma else None
