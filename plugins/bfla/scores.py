"""Scores of blocks: the largest dot product over pairs of flattened groups (eq. 3 and 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .groups import key_groups, query_groups

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

HALVES = (torch.float16, torch.bfloat16)
CHUNK = 1 << 23
"""Scores of groups at a time: enough to fill a GPU, and few enough that most of what is not causal is left out."""


def block_scores(call: AttentionCall, block: int, size: int, entries: int | None = None) -> Tensor:
    """``[B, Hq, R, L]`` of query blocks and key blocks, float32 (float64 for float64 calls); -inf without a pair.

    Works on chunks of query blocks, so that about `entries` scores of groups exist at a time, and leaves out the key
    blocks behind a chunk. K is not repeated for GQA.
    """
    entries = entries or (CHUNK if call.q.is_cuda else CHUNK >> 2)
    geometry, per = call.geometry, block // size
    rows, behind = geometry.tile_rows(block), (geometry.q_offset + geometry.q_len - 1) // block + 1
    keys = key_groups(call, size, behind * block)
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    shape = (geometry.batch, geometry.heads, rows, geometry.tile_columns(block))
    scores = torch.full(shape, -torch.inf, dtype=dtype, device=geometry.device)
    step = max(1, entries // (geometry.batch * geometry.heads * per * per * behind))
    for first in range(0, rows, step):
        blocks = range(first, min(first + step, rows))
        end = min(behind, geometry.q_offset // block + blocks.stop)
        queries, seen = query_groups(call, block, size, blocks), keys.head(end * per)
        pairs = _products(queries.vectors, seen.vectors, dtype)
        pairs.masked_fill_(~queries.meets(seen)[:, None], -torch.inf)
        scores[:, :, first : blocks.stop, :end] = pairs.unflatten(3, (end, per)).unflatten(2, (-1, per)).amax((3, 5))
    return scores


def _products(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """q ``[B, Hq, n, D]`` times k ``[B, Hkv, m, D]`` of its KV head: ``[B, Hq, n, m]``, summed in `dtype`."""
    batch, heads, n, width = q.shape
    rows = q.reshape(batch * k.shape[1], -1, width)
    columns = k.flatten(0, 1).transpose(1, 2)
    if q.device.type == "cuda" and q.dtype in HALVES:
        product = torch.bmm(rows, columns, out_dtype=dtype)
    else:
        product = torch.bmm(rows.to(dtype), columns.to(dtype))
    return product.view(batch, heads, n, -1)
