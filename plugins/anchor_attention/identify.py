"""Alg. 2 in plain PyTorch: which key columns each group keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.mask.lists import IndexLists
from sparseprefill.statistics.pooled import real_rows, tile_mean

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from .regions import Regions


def stripes(call: AttentionCall, regions: Regions, m: Tensor, theta: float, *, use_anchor: bool = True) -> IndexLists:
    """Lists ``[B, Hq, G]`` of the keys in [init, group start) that any block of the group selects (eq. 2).

    m: row maxima of the anchor pass ``[B, Hq, Nq]``; their mean over a block is its anchor, unless `use_anchor` is
    False (0 then). A key is kept unless ``anchor - logit > theta``, so that a NaN logit travels as it would in dense
    attention.
    """
    geometry, group = call.geometry, call.group
    pooled, anchor = tile_mean(call.q, geometry, regions.block), tile_mean(m, geometry, regions.block)
    if not use_anchor:
        anchor = torch.zeros_like(anchor)
    if call.starts is not None or call.lengths is not None:
        # A block of padding alone asks for no column: else its group would depend on the rest of the batch.
        padding = real_rows(geometry, regions.block) == 0
        anchor = anchor.masked_fill(padding[:, None], torch.inf)
    width = regions.group
    block, first = geometry.tiles(regions.block), geometry.first_tile(width)
    which = torch.div(block, regions.step, rounding_mode="floor") - first[:, None]
    groups = geometry.tile_rows(width)
    keep = torch.zeros(
        geometry.batch, geometry.heads, groups, geometry.kv_len, dtype=torch.bool, device=geometry.device
    )
    for b in range(geometry.batch):
        start = 0 if geometry.starts is None else int(geometry.starts[b])
        turned = call.k[b].to(pooled.dtype).transpose(-1, -2).contiguous()  # few queries are multiplied faster so
        for g in range(groups):
            end = (int(first[b]) + g) * width
            if not regions.init_tokens < end < geometry.q_offset - start + geometry.q_len:
                continue
            rows = torch.nonzero(which[b] == g)[:, 0]
            keys = turned[..., start + regions.init_tokens : start + end]
            if rows.numel() == 0 or keys.shape[2] == 0:
                continue
            q = pooled[b, :, rows].unflatten(0, (-1, group)).flatten(1, 2)
            logits = (q @ keys).mul_(call.softmax_scale).view(geometry.heads, rows.numel(), -1)
            if call.softcap is not None:
                logits = call.softcap * torch.tanh(logits / call.softcap)
            below = (anchor[b, :, rows, None] - logits).amin(1)  # of the block that comes nearest; NaN where one is
            keep[b, :, g, regions.init_tokens : regions.init_tokens + keys.shape[2]] = ~(below > theta)
    return IndexLists.from_map(keep)
