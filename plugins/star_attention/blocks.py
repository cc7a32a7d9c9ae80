"""Phase 1 as one call: every (anchor, block) of every batch row becomes a batch row of its own (section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall

if TYPE_CHECKING:
    from .sizes import Sizes


@frozen(eq=False)
class Blocks:
    """The call of all blocks, and where its rows belong. All positions and lengths are in tokens.

    call: ``[B * n, H, *, D]``; row ``b * n + j`` holds the keys (prefix, block) of the j-th block that batch row b
    touches, in the order of their positions, and the block's queries; a row to spare holds a single token.
    start, prefix: int64 ``[B, n]``: first position of the block, and keys of the anchor before it.
    first: int64 ``[B]``: index of the first block touched. query: int64 ``[B, n]``: position of the first query.
    """

    call: AttentionCall
    start: Tensor
    prefix: Tensor
    first: Tensor
    query: Tensor
    count: int

    @classmethod
    def of(cls, call: AttentionCall, sizes: Sizes, tile: int) -> Blocks:
        """Gathers q, k and v; nothing is read on the host."""
        g = call.geometry
        block, anchor, context = sizes.block * tile, sizes.anchor * tile, sizes.context * tile
        row = g.first_position()
        first = torch.div(row.clamp(min=0), block, rounding_mode="floor")
        count = min(sizes.most_blocks, _touched(call, sizes, tile))
        start = (first[:, None] + torch.arange(count, device=g.device)) * block[:, None]
        end = torch.minimum(torch.minimum(row + g.q_len, g.key_counts()), context)[:, None]
        end = torch.minimum(start + block[:, None], end)
        query = torch.maximum(start, row[:, None])
        prefix = torch.minimum(anchor[:, None], start)
        real = query < end
        keys, before = (torch.where(real, x, y) for x, y in ((prefix + end - start, 1), (prefix + query - start, 0)))
        # Row 0 of a block's queries stands behind `before` keys. Padding on the left brings all rows to one offset.
        q_rows = min(sizes.most_block * tile, g.q_len)
        offset = min(sizes.most_anchor * tile, g.kv_len) + _cut(call, sizes, tile)
        pad = offset - before
        inside = torch.arange(offset + q_rows, device=g.device) - pad[..., None]
        position = inside + torch.where(inside < prefix[..., None], 0, (start - prefix)[..., None])
        left = 0 if g.starts is None else g.starts[:, None, None]
        index = torch.where(real[..., None], position, 0) + left
        rows = query[..., None] - row[:, None, None] + torch.arange(q_rows, device=g.device)
        q, (k, v) = _gather(call.q, rows), _keys(call, index)
        starts, lengths = (x.flatten().to(torch.int32) for x in (pad, keys))
        made = AttentionCall(
            q,
            k,
            v,
            scale=call.scale,
            layer=call.layer,
            starts=starts,
            lengths=lengths,
            softcap=call.softcap,
            sinks=call.sinks,
            first_head=call.first_head,
        )
        return cls(made, start, prefix, first, query, count)


def _touched(call: AttentionCall, sizes: Sizes, tile: int) -> int:
    """Most blocks that one batch row of the call may touch."""
    g, block = call.geometry, sizes.most_block * tile
    if not sizes.uniform:
        return sizes.most_blocks
    if g.starts is None:
        return (g.q_offset + g.q_len - 1) // block - g.q_offset // block + 1
    return (g.q_len + 2 * block - 2) // block


def _cut(call: AttentionCall, sizes: Sizes, tile: int) -> int:
    """Most tokens by which the first query of a chunk may stand inside its block."""
    g, block = call.geometry, sizes.most_block * tile
    if sizes.uniform and g.starts is None:
        return g.q_offset % block
    return 0 if g.q_offset == 0 else block - 1


def _keys(call: AttentionCall, index: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values by index ``[B, n, M]`` (clamped): ``[B * n, Hkv, M, *]`` each; of pages no others are read."""
    if call.pages is None:
        return _gather(call.k, index), _gather(call.v, index)
    flat = index.clamp(0, call.kv_len - 1).flatten(1)
    k, v = (x[0].unflatten(1, index.shape[1:]).transpose(0, 1) for x in (call.keys_at(flat), call.values_at(flat)))
    return k, v


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x ``[B, H, N, D]`` by index ``[B, n, M]`` (clamped): ``[B * n, H, M, D]``."""
    heads, length, width = x.shape[1:]
    index = index.clamp(0, length - 1)
    where = index[:, :, None, :, None].expand(-1, -1, heads, -1, width)
    return torch.gather(x[:, None].expand(-1, index.shape[1], -1, -1, -1), 3, where).flatten(0, 1)
