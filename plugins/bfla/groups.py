"""Tokens as flattened groups: g vectors of C entries become one of g * C, on each row's own token grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


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


def query_groups(call: AttentionCall, block: int, size: int, blocks: range) -> Groups:
    """Groups of `size` queries of the query blocks `blocks`, counted from the first that the call touches."""
    geometry = call.geometry
    first = geometry.first_position()
    high = torch.minimum(first + geometry.q_len, geometry.key_counts())
    start = (geometry.first_tile(block) + blocks.start) * block
    plain = geometry.starts is None and geometry.lengths is None
    shift = blocks.start * block - geometry.q_offset % block if plain else None
    return _groups(call.q, start, first, first.clamp(min=0), high, len(blocks) * block, size, shift)


def key_groups(call: AttentionCall, size: int, tokens: int) -> Groups:
    """Groups of `size` keys of the positions 0 to `tokens` - 1. Keys after the call's last query do not count."""
    geometry, end = call.geometry, call.geometry.q_offset + call.geometry.q_len
    zero = torch.zeros_like(geometry.first_position())
    row_zero = zero if geometry.starts is None else -geometry.starts.to(torch.int64)
    plain = geometry.starts is None and geometry.lengths is None
    high = torch.minimum(geometry.first_position() + geometry.q_len, geometry.key_counts())
    return _groups(call.k[:, :, :end], zero, row_zero, zero, high, tokens, size, 0 if plain else None)


def _groups(
    x: Tensor, start: Tensor, row_zero: Tensor, low: Tensor, high: Tensor, tokens: int, size: int, shift: int | None
) -> Groups:
    """Groups of x ``[B, H, N, C]`` over the `tokens` positions from `start`.

    start: int64 ``[B]``. row_zero: int64 ``[B]``, position of row 0 of x. low, high: int64 ``[B]``, half-open range of
    the positions that hold a token. shift: the row of x at `start`, on the host, where all rows of x are tokens.
    """
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
