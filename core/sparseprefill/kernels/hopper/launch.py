"""When the Hopper kernel serves a call, and its launch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparseprefill.kernels.hopper.kernel import hopper_attention_fwd_kernel
from sparseprefill.kernels.hopper.paged import cache_descriptors, cache_strides, refusal
from sparseprefill.kernels.source import Source, strides
from sparseprefill.kernels.steps import LOG2E

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.kernels.attention.launch import Outputs
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.softmax import SoftmaxState

BLOCK_M = 128
STAGES = {64: 4, 128: 3, 256: 2}
"""Steps of K and V in shared memory, by head dimension."""
BLOCK_N = {64: 128, 128: 128, 256: 64}
"""Most keys of a step, by head dimension."""
REGISTERS = (216, 48, 32)
"""Per thread of the consumers, the producer and the scheduler: 216 + 216 + 48 + 32 is a multiprocessor's share."""
SCRATCH = 16
"""Bytes before the flags of the scratch tensor; the first four are the counter of work items."""


def objection(call: AttentionCall, mask: SparseMask) -> str | None:
    """Why the portable kernel has to serve the call, or None. Sizes and features alone; no device is asked."""
    reason = features(call, mask)
    if reason is not None:
        return reason
    if call.pages is not None:
        return refusal(call.pages, call)
    return None if _aligned(call.k) and _aligned(call.v) else "rows that are not aligned to 16 bytes"


def features(call: AttentionCall, mask: SparseMask) -> str | None:
    """The same, whatever K and V are read from."""
    q = call.q
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in STAGES:
        return f"{q.dtype} with head dimension {q.shape[-1]}"
    if mask.tile_q % BLOCK_M or mask.tile_k < 64 or mask.tile_k & (mask.tile_k - 1):
        return f"tiles of {mask.tile_q} x {mask.tile_k}"
    if call.window is not None or call.softcap is not None:
        return "a sliding window or softcap"
    return None if _aligned(q) else "rows that are not aligned to 16 bytes"


def launch(
    call: AttentionCall,
    mask: SparseMask,
    lists: tuple[Tensor, ...],
    chosen: Tensor | None,
    carry: SoftmaxState | None,
    filled: Outputs,
) -> Tensor:
    """Run the kernel; int8 flags ``[B * Hq * blocks]`` of the query blocks that met a NaN or infinity.

    lists: counts, offsets and indices of tiles, then of stripes. chosen: uint8 tile map, where stripes and tiles of the
    mask may overlap. filled: out and lse, or a state, to fill.
    """
    geometry, (batch, heads, _, width), source = call.geometry, call.q.shape, Source.of(call)
    block_n = min(mask.tile_k, BLOCK_N[width])
    rows = geometry.tile_rows(mask.tile_q)
    blocks = rows * (mask.tile_q // BLOCK_M)
    items = batch * heads * blocks
    scratch = torch.zeros(SCRATCH + items, dtype=torch.int8, device=call.q.device)
    none, state = (None, None, None), filled.state
    flags: dict[str, Any] = {
        "TILE_Q": mask.tile_q, "TILE_K": mask.tile_k, "GROUP": mask.group, "BLOCK_M": BLOCK_M, "BLOCK_N": block_n,
        "D": width, "STAGES": STAGES[width], "HAS_TILES": mask.tiles is not None,
        "HAS_STRIPES": mask.stripes is not None, "DEDUPE": chosen is not None, "HAS_CARRY": carry is not None,
        "STORE_STATE": filled.state is not None, "HAS_STARTS": geometry.starts is not None,
        "HAS_LENGTHS": geometry.lengths is not None, "HAS_SINKS": call.sinks is not None, "PAGE": source.page,
        "REGISTERS": REGISTERS,
    }  # fmt: skip
    if source.page:
        descriptors, steps = cache_descriptors(source, block_n), cache_strides(source)
    else:
        descriptors = _descriptor(source.k, block_n), _descriptor(source.v, block_n)
        steps = (*strides(source.k), *strides(source.v))
    hopper_attention_fwd_kernel[(min(items, _multiprocessors(call.q.device)),)](
        _descriptor(call.q, BLOCK_M // 2), *descriptors, source.k, source.v, source.table,
        geometry.starts, geometry.lengths, call.sinks, *lists, chosen,
        *(none if carry is None else (carry.m.contiguous(), carry.l.contiguous(), carry.acc.contiguous())),
        filled.out, filled.lse, *(none if state is None else (state.m, state.l, state.acc)),
        scratch[SCRATCH:], scratch[:4].view(torch.int32),
        *steps, *filled.strides, call.softmax_scale * LOG2E.value,
        geometry.q_offset, geometry.q_len, geometry.kv_len, blocks, rows, geometry.tile_rows(mask.group_rows),
        geometry.tile_columns(mask.tile_k), items, heads, call.group, **flags, num_warps=4,
    )  # fmt: skip
    return scratch[SCRATCH:]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of `rows` tokens of one head."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[-1]], layout)


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:3])
