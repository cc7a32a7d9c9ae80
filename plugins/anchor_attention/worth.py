"""What AnchorAttention leaves as priority: the weight of a key against all of the anchor pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.priority import Priority, tiles_of_columns
from sparseprefill.statistics.pooled import tile_mean

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from .regions import Regions


@frozen(eq=False)
class AnchorPriority(Priority):
    """``exp(logit - lse)``: pooled logits as of Algorithm 2, for the mean query of a block, against the block's anchor
    pass; the mean over the blocks of a group.

    m, l: of the anchor pass's state, ``[B, Hq, Nq]``. Logits are made again where somebody asks for them.
    """

    regions: Regions
    m: Tensor
    l: Tensor  # noqa: E741  (as of SoftmaxState)

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """See `Priority`: the mean of a tile's columns."""
        return tiles_of_columns(self, call, self.regions.group, tile_q, tile_k)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        geometry, regions = call.geometry, self.regions
        chosen = range(geometry.heads)[heads]
        kv = slice(chosen.start // call.group, (chosen.stop - 1) // call.group + 1)
        head = torch.arange(chosen.start, chosen.stop, device=geometry.device)
        of = torch.div(head, call.group, rounding_mode="floor") - kv.start
        key = torch.arange(geometry.kv_len, device=geometry.device)
        k = call.k[:, kv]
        if geometry.starts is not None:
            at = (key + geometry.starts[:, None]).clamp(max=geometry.kv_len - 1)
            k = torch.gather(k, 2, at[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
        real = tile_mean(geometry.real_queries()[:, None].to(self.m.dtype), geometry, regions.block)[:, 0] > 0
        pooled = tile_mean(call.q[:, heads], geometry, regions.block)
        lse = tile_mean((self.m + torch.log(self.l))[:, heads], geometry, regions.block)
        first = torch.div(position, regions.group, rounding_mode="floor") * regions.step
        first = first - geometry.first_tile(regions.block)[:, None]
        k = k.to(pooled.dtype)[:, of].transpose(-1, -2)
        total = pooled.new_zeros(geometry.batch, len(chosen), position.shape[1], geometry.kv_len)
        count = total.new_zeros(geometry.batch, 1, position.shape[1], 1)
        for i in range(regions.step):
            row = first + i
            there = (row >= 0) & (row < real.shape[1])
            row = row.clamp(0, real.shape[1] - 1)
            there = (there & torch.gather(real, 1, row))[:, None, :, None]
            at = row[:, None, :, None].expand(-1, len(chosen), -1, -1)
            logits = torch.gather(pooled, 2, at.expand(-1, -1, -1, pooled.shape[3])) @ k * call.softmax_scale
            if call.softcap is not None:
                logits = call.softcap * torch.tanh(logits / call.softcap)
            shares = torch.exp(logits - torch.gather(lse, 2, at[..., 0])[..., None])
            total += torch.where(there, shares, 0.0)
            count += there
        scores = total / count.clamp(min=1)
        if geometry.starts is None and geometry.lengths is None:
            return scores
        return scores.masked_fill(
            (key >= geometry.key_counts()[:, None])[:, None, None], 0.0
        )  # padding is worth nothing
