"""Alg. 2 in plain PyTorch: which key columns each group keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.lists import IndexLists

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from .regions import Regions


def stripes(call: AttentionCall, regions: Regions, pooled: Tensor, anchor: Tensor, theta: float) -> IndexLists:
    """Lists ``[B, Hq, G]`` of the keys in [init, group start) that any block of the group selects (eq. 2).

    pooled: mean query per block ``[B, Hq, R, D]``. anchor: mean row maximum per block ``[B, Hq, R]``. A key is kept
    unless ``anchor - logit > theta``, so that a NaN logit travels as it would in dense attention.
    """
    geometry, group = call.geometry, call.group
    block, first = geometry.tiles(regions.block), geometry.first_tile(regions.group)
    which = torch.div(block, regions.step, rounding_mode="floor") - first[:, None]
    groups = geometry.tile_rows(regions.group)
    keep = torch.zeros(
        geometry.batch, geometry.heads, groups, geometry.kv_len, dtype=torch.bool, device=geometry.device
    )
    position = torch.arange(geometry.kv_len, device=geometry.device)
    for b in range(geometry.batch):
        start = 0 if geometry.starts is None else int(geometry.starts[b])
        for g in range(groups):
            end = (int(first[b]) + g) * regions.group
            if end <= regions.init_tokens:
                continue
            rows = torch.nonzero(which[b] == g)[:, 0]
            keys = call.k[b, :, start + regions.init_tokens : start + end].to(pooled.dtype)
            if rows.numel() == 0 or keys.shape[1] == 0:
                continue
            q = pooled[b, :, rows].unflatten(0, (-1, group)).flatten(1, 2)
            logits = (q @ keys.transpose(-1, -2) * call.softmax_scale).view(geometry.heads, rows.numel(), -1)
            if call.softcap is not None:
                logits = call.softcap * torch.tanh(logits / call.softcap)
            near = ~(anchor[b, :, rows, None] - logits > theta)
            columns = position[regions.init_tokens : regions.init_tokens + keys.shape[1]]
            keep[b, :, g, columns] = near.any(1)
    return IndexLists.from_map(keep)
