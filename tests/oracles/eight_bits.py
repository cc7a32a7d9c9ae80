"""Attention in 8 bits, tile after tile: SageAttention2's recipe with our additions; shares no code with the library.

Roundings are done by hand: integers, e4m3's three bits, a sum of 13 bits."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128
LARGEST = 448.0
"""Of e4m3."""
AT_ONCE = 32
"""Keys of one product of the matrix unit, behind which its sum is rounded."""


def e4m3(x: Tensor) -> Tensor:
    """Numbers rounded to the nearest of e4m3, ties to even; beyond the largest that one."""
    exponent = torch.floor(torch.log2(x.abs().clamp(min=2.0**-6))).clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return (torch.round(x / step) * step).clamp(-LARGEST, LARGEST)


def short(x: Tensor, bits: int = 13) -> Tensor:
    """Numbers cut to so many bits behind the leading one, as the sums of the matrix unit are."""
    exponent = torch.floor(torch.log2(x.abs().clamp(min=1e-30)))
    step = 2.0 ** (exponent - bits)
    return torch.trunc(x / step) * step


def summed(p: Tensor, v: Tensor, before: Tensor | None = None) -> Tensor:
    """p ``[rows, keys]`` times v ``[keys, D]`` by the matrix unit, on top of what it held before."""
    total = torch.zeros(p.shape[0], v.shape[1], dtype=p.dtype) if before is None else before
    for at in range(0, p.shape[1], AT_ONCE):
        total = short(total + p[:, at : at + AT_ONCE] @ v[at : at + AT_ONCE])
    return total


def flat_sum(v: Tensor, flush: int) -> Tensor:
    """Mean of v ``[keys, D]``, of one weight, where the sum is added to float32 and begun anew each `flush` keys."""
    total = torch.zeros(1, v.shape[1], dtype=torch.float32)
    part: Tensor | None = None
    for at in range(0, len(v), AT_ONCE):
        part = summed(torch.ones(1, AT_ONCE), v[at : at + AT_ONCE], part)
        if (at + AT_ONCE) % flush == 0:
            total, part = total + part, None
    return (total if part is None else total + part) / len(v)


def attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, offset: int, scale: float, exact: bool
) -> tuple[Tensor, Tensor]:
    """out ``[N, D]`` and LSE ``[N]`` of one head. q ``[N, D]``; k, v ``[M, D]``; tiles: bool, query tiles x key tiles.

    Query tiles lie on the grid of positions, of which q's rows begin at `offset`. exact: the head stays in 16 bits.
    """
    q, k, v = q.double(), k.double(), v.double()
    k_mean, v_mean = k.mean(0), v.mean(0)
    v_unit = (v - v_mean).abs().amax(0).clamp(min=1e-30) / LARGEST
    v8 = e4m3((v - v_mean) / v_unit)
    q_unit = q.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    q8 = torch.round(q / q_unit)
    out = torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    lse = torch.full((len(q),), -torch.inf, dtype=torch.float64)
    first = offset // TILE
    for number in range(len(tiles)):
        low = (first + number) * TILE
        positions = torch.arange(max(low, offset), min(low + TILE, offset + len(q)))
        rows = positions - offset
        m = torch.full((len(rows),), -torch.inf, dtype=torch.float64)
        total = torch.zeros(len(rows), dtype=torch.float64)
        acc = torch.zeros(len(rows), v.shape[1], dtype=torch.float64)
        chosen = torch.nonzero(tiles[number]).flatten().tolist()[::-1]
        whole = exact or number == len(tiles) - 1
        early = [t for t in chosen if whole or (t + 1) * TILE - 1 > low or t == 0]
        for t in [*early, *(t for t in chosen if t not in early)]:
            at = torch.arange(t * TILE, min((t + 1) * TILE, len(k)))
            if t in early:
                s = q[rows] @ k[at].T * scale
                s = s.masked_fill(at[None] > positions[:, None], -torch.inf)
            else:
                tile = k[at] - k_mean
                unit = tile.abs().max().clamp(min=1e-30) / 127
                s = (q8[rows] @ torch.round(tile / unit).T) * (q_unit[rows] * unit * scale)
                s = s + (q[rows] @ k_mean * scale)[:, None]
            new = torch.maximum(m, s.amax(1))
            base = torch.where(new == -torch.inf, 0.0, new)
            p, factor = torch.exp(s - base[:, None]), torch.exp(m - base)
            total, acc, m = total * factor + p.sum(1), acc * factor[:, None], new
            if t in early:
                acc = acc + p @ v[at]
            else:  # less the mean of the values, and the mean again
                acc = acc + summed(e4m3(p * LARGEST), v8[at]) * v_unit / LARGEST + p.sum(1)[:, None] * v_mean
        seen = total > 0
        out[rows[seen]] = acc[seen] / total[seen, None]
        lse[rows[seen]] = m[seen] + torch.log(total[seen])
    return out, lse
