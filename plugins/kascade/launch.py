"""Launchers of Kascade's kernels: one launch each, nothing read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.kernels.sampled.launch import block, capability, settings
from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.source import Keys, strides
from sparseprefill.kernels.steps import LOG2E

from .kernels import column_sums_kernel, top_columns_kernel

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.lists import IndexLists

    from .rows import Rows

CHUNK = 2048
"""Keys of a program."""
LOADED = (8, 512, 16)
"""Entries of a thread, threads and warps of a program that looks through a row."""


def column_sums(call: AttentionCall, rows: Rows, begin: Tensor, until: int) -> Tensor:
    """float32 ``[B, Hkv, n, until]``: see `sums.column_sums`; of keys at or behind `begin`, ``[B, n]``, no sums.

    What stands there is not written, and nobody may read it.
    """
    geometry, (batch, tiles, count) = call.geometry, rows.index.shape
    q, keys = call.q if call.q.stride(-1) == 1 else call.q.contiguous(), Keys.of(call)
    width = q.shape[-1]
    _, chosen = settings(capability(q.device), block(width), q.element_size())
    pairs = min(chosen.block_m, block(count * call.group))
    together = chosen.block_m // pairs
    groups, parts = cdiv(tiles, together), cdiv(count * call.group, pairs)
    weight = rows.weight.flatten(1)[:, None]
    base = torch.where(weight > 0, rows.lse(call) * LOG2E.value - weight.log2(), torch.inf)
    out = torch.empty(batch, call.kv_heads, tiles, until, dtype=torch.float32, device=q.device)
    column_sums_kernel[batch * call.kv_heads * groups, cdiv(until, CHUNK)](
        q, keys.k, keys.table, keys.scale, rows.index.to(torch.int32).contiguous(), base.contiguous(), begin,
        geometry.starts, out, *strides(q), *keys.strides, begin.stride(0),
        call.softmax_scale * LOG2E.value, call.softcap or 0.0,
        tiles, count, call.kv_heads, call.group, groups, parts, CHUNK, until, geometry.kv_len,
        TILES=together, PAIRS=pairs, PARTS=parts > 1, BLOCK_N=chosen.block_n, D=width, BLOCK_D=block(width),
        SOFTCAP=call.softcap is not None, PAGE=keys.page, PRECISION="ieee", **chosen.options,
    )  # fmt: skip
    return out


def top_columns(sums: Tensor, begin: Tensor, lists: IndexLists, part: slice) -> None:
    """Write the lists of the tiles `part` of ``[B, Hkv, G]``. begin: int64 ``[B, G]``, of all tiles."""
    batch, heads, tiles, width = sums.shape
    each, threads, warps = LOADED
    top_columns_kernel[(batch * heads * tiles,)](
        sums, begin, lists.counts, lists.offsets, lists.indices, tiles, lists.shape[2], part.start, heads, width,
        N=each, WIDTH=threads, num_warps=warps, **FUSED,
    )  # fmt: skip
