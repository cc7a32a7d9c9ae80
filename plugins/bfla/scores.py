"""Scores of blocks: the largest dot product over pairs of flattened token groups (eq. 3 and 4).

Of a token group, g vectors of C entries make one of g * C, on each batch row's own token grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

HALVES = (torch.float16, torch.bfloat16)
Range = tuple[Tensor, Tensor, Tensor]
"""int64 ``[B]`` each: the position of row 0 of a tensor, and the half-open range of positions that hold a token."""
CHUNK = 1 << 23
"""Scores of groups at a time: enough to fill a GPU, and few enough that most of what is not causal is left out."""


def block_scores(call: AttentionCall, block: int, size: int, entries: int | None = None) -> Tensor:
    """``[B, Hq, R, L]`` of query blocks and key blocks, float32 (float64 for float64 calls); -inf without a pair.

    Works on chunks of query blocks, so that about `entries` scores of groups exist at a time, and leaves out the key
    blocks behind a chunk. K is not repeated for GQA.
    """
    entries = entries or (CHUNK if call.q.is_cuda else CHUNK >> 2)
    geometry, per, at = call.geometry, block // size, call.geometry.token_range()
    behind = (geometry.q_offset + geometry.q_len - 1) // block + 1
    keys = key_groups(call, at, size, behind * block)
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    batch, heads, rows, columns = geometry.map_shape(block, block)
    scores = torch.full((batch, heads, rows, columns), -torch.inf, dtype=dtype, device=geometry.device)
    step = max(1, entries // (batch * heads * per * per * behind))
    for first in range(0, rows, step):
        blocks = range(first, min(first + step, rows))
        end = min(behind, geometry.q_offset // block + blocks.stop)
        queries, seen = query_groups(call, at, block, size, blocks), keys.head(end * per)
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


@frozen(eq=False)
class Groups:
    """Consecutive groups of g tokens.

    vectors: ``[B, H, n, g * C]``, zeros where there is no token. low, high: int64 ``[B, n]``, half-open range of the
    places in each group that hold a token; empty where none does.
    """

    vectors: Tensor
    low: Tensor
    high: Tensor

    def meets(self, other: Groups) -> Tensor:
        """bool ``[B, n, m]``: pairs of groups that both hold a token at some place."""
        low = torch.maximum(self.low[:, :, None], other.low[:, None])
        high = torch.minimum(self.high[:, :, None], other.high[:, None])
        return low < high

    def head(self, count: int) -> Groups:
        """The first `count` groups (views)."""
        return Groups(self.vectors[:, :, :count], self.low[:, :count], self.high[:, :count])


def query_groups(call: AttentionCall, at: Range, block: int, size: int, blocks: range) -> Groups:
    """Groups of `size` queries of the query blocks `blocks`, counted from the first that the call touches."""
    geometry = call.geometry
    start = (torch.div(at[0], block, rounding_mode="floor") + blocks.start) * block
    plain = geometry.starts is None and geometry.lengths is None
    shift = blocks.start * block - geometry.q_offset % block if plain else None
    return _groups(call.q, start, at, len(blocks) * block, size, shift)


def key_groups(call: AttentionCall, at: Range, size: int, tokens: int) -> Groups:
    """Groups of `size` keys of the positions 0 to `tokens` - 1. Keys after the call's last query do not count."""
    geometry, end = call.geometry, call.geometry.q_offset + call.geometry.q_len
    zero = torch.zeros_like(at[0])
    row_zero = zero if geometry.starts is None else -geometry.starts.to(torch.int64)
    plain = geometry.starts is None and geometry.lengths is None
    return _groups(call.k[:, :, :end], zero, (row_zero, zero, at[2]), tokens, size, 0 if plain else None)


def _groups(x: Tensor, start: Tensor, at: Range, tokens: int, size: int, shift: int | None) -> Groups:
    """Groups of x ``[B, H, N, C]`` over the `tokens` positions from `start`, int64 ``[B]``.

    shift: the row of x at `start`, on the host, where all rows of x are tokens.
    """
    row_zero, low, high = at
    if shift is None:
        position = start[:, None] + torch.arange(tokens, device=x.device)
        real = (position >= low[:, None]) & (position < high[:, None])
        row = (position - row_zero[:, None]).clamp(0, x.shape[2] - 1)
        picked = torch.gather(x, 2, row[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        picked = torch.where(real[:, None, :, None], picked, 0)
    else:
        picked = x[:, :, max(shift, 0) : shift + tokens]
        front = max(-shift, 0)
        back = tokens - front - picked.shape[2]
        picked = functional.pad(picked, (0, 0, front, back)) if front or back else picked
    first = start[:, None] + torch.arange(tokens // size, device=x.device) * size
    bounds = [(bound[:, None] - first).clamp(0, size) for bound in (low, high)]
    return Groups(picked.reshape(*x.shape[:2], tokens // size, -1), *bounds)
