"""Exact attention of single sampled query rows by key tile, and how much of it a mask keeps; streamed over keys."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.samples import KeptKeys
from sparseprefill.statistics.sampled import PAIRS, PAIRS_ON_CPU, Logits

TILE = 512
"""Tokens of a key tile where nobody asks for one: few sums to keep, and on a CPU as many logits as its cache holds."""


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


def mass_of(by_tile: Tensor, of_mask: Tensor | None) -> RowMass:
    """The mass of each row by key tile, from what `lse_by_tile` returns."""
    lse = torch.logsumexp(by_tile, -1)
    base = torch.where(lse.isneginf(), 0.0, lse)[..., None]
    mass = (by_tile - base).exp()
    return RowMass(mass, torch.zeros_like(mass) if of_mask is None else (of_mask - base).exp(), lse)


@uncast
@torch.no_grad()
def row_lse(call: AttentionCall, rows: Tensor, real: Tensor) -> Tensor:
    """``[B, Hq, n]``: LSE of the queries `rows` (index ``[B, n]``, where `real`) over all keys they may see.

    float32 (float64 for float64 calls), natural log, sinks left out, -inf where there is no such row. One pass over the
    keys; nothing is read on the host.
    """
    by_tile, _ = lse_by_tile(call, rows, real, TILE, None)
    return torch.logsumexp(by_tile, -1)


@uncast
def lse_by_tile(
    call: AttentionCall, rows: Tensor, real: Tensor, tile: int, keys: KeptKeys | None
) -> tuple[Tensor, Tensor | None]:
    """``[B, Hq, n, C]``: LSE of each row in each key tile, over all keys and over those that are kept.

    rows, real: as of `row_lse`. tile: tokens of a key tile. keys: those that a mask keeps; None for none. One pass over
    the keys, some key tiles at a time: no matrix of rows and all keys is made, and no key is read twice.
    """
    if kernels.serve_rows(call.q):
        from sparseprefill.kernels.sampled.by_tile import tile_lse

        return tile_lse(call, rows, real, tile, keys)
    geometry, count = call.geometry, rows.shape[1]
    pairs = PAIRS_ON_CPU if call.q.device.type == "cpu" else PAIRS
    size = tile * max(1, pairs // (geometry.batch * geometry.heads * count * tile))
    logits, behind = Logits(call, rows, real), geometry.tile_columns(tile) * tile
    kept = None if keys is None else keys.by_row
    every: list[Tensor] = []
    of_mask: list[Tensor] = []
    for first in range(0, behind, size):
        some = slice(first, min(first + size, behind))
        each = logits.at(some)
        every.append(torch.logsumexp(each.unflatten(-1, (-1, tile)), -1))
        if kept is not None:
            left_out = functional.pad(~kept[..., some], (0, max(some.stop - kept.shape[-1], 0)), value=True)
            of_mask.append(torch.logsumexp(each.masked_fill_(left_out, -torch.inf).unflatten(-1, (-1, tile)), -1))
    return torch.cat(every, -1), torch.cat(of_mask, -1) if of_mask else None
