"""Exact attention of single sampled query rows by key tile, and how much of it a mask keeps; streamed over keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.statistics.sampled import PAIRS, PAIRS_ON_CPU, Logits

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


@frozen(eq=False)
class RowMass:
    """Attention mass of each sampled row; float32 (float64 for float64 calls).

    tiles: ``[B, Hq, n, ceil(Nkv / tile)]`` by key tile on the row's grid, 1 in all over the keys that a row may see, 0
    where there is no such row. kept: the same of the keys of a mask alone. lse: ``[B, Hq, n]`` over all keys, natural
    log, sinks left out, -inf where there is no such row.
    """

    tiles: Tensor
    kept: Tensor
    lse: Tensor


@torch.no_grad()
def row_mass(call: AttentionCall, rows: Tensor, real: Tensor, tile: int, keys: Tensor | None = None) -> RowMass:
    """Softmax rows of the queries `rows` (index ``[B, n]``, where `real`) over all keys they may see, by key tile.

    tile: tokens of a key tile. keys: bool ``[B, Hq, n, Nkv]``, by position on the row's grid, which keys a mask keeps
    for each row; None for none. One pass over the keys, some key tiles at a time: of each its LSE is kept, from which
    the row's own follows, so that no matrix of rows and all keys is made and no key is read twice.
    """
    geometry, count = call.geometry, rows.shape[1]
    pairs = PAIRS_ON_CPU if call.q.device.type == "cpu" else PAIRS
    size = tile * max(1, pairs // (geometry.batch * geometry.heads * count * tile))
    logits = Logits(call, rows, real)
    every: list[Tensor] = []
    of_mask: list[Tensor] = []
    for first in range(0, geometry.tile_columns(tile) * tile, size):
        some = slice(first, min(first + size, geometry.tile_columns(tile) * tile))
        each = logits.at(some)
        every.append(torch.logsumexp(each.unflatten(-1, (-1, tile)), -1))
        if keys is not None:
            kept = keys[..., some]
            kept = functional.pad(kept, (0, each.shape[-1] - kept.shape[-1]))
            of_mask.append(torch.logsumexp(each.masked_fill_(~kept, -torch.inf).unflatten(-1, (-1, tile)), -1))
    by_tile = torch.cat(every, -1)
    lse = torch.logsumexp(by_tile, -1)
    base = torch.where(lse == -torch.inf, 0.0, lse)[..., None]
    mass = (by_tile - base).exp()
    kept_mass = torch.zeros_like(mass) if keys is None else (torch.cat(of_mask, -1) - base).exp()
    return RowMass(mass, kept_mass, lse)
