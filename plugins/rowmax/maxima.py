"""The largest share that sampled query rows give to each column of keys, by PyTorch's products.

A column is a key tile, or a part of one.

A row is never averaged with others: where a single row looks something up, its share stands. Of each query tile some
rows are looked at; which ones changes from tile to tile and from head to head, so that heads of a KV group that share
what they keep see rows between those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.statistics.grid import keys_on_grid

from . import RowMaxConfig

LOGITS, LOGITS_ON_CPU = 1 << 26, 1 << 20
"""Logits of sampled rows in memory at once, over batch and heads; on a CPU as many as its cache holds."""

ROWS = 4096
"""Sampled rows whose maxima are in memory at once, over batch and heads, where a query tile has no more."""

MAXIMA = 1 << 27
"""Maxima of rows by column that the kernels leave in memory at once, over batch and heads; twice as many in 16 bits."""

LINES = 128
"""Rows of a kernel's program, at most."""


@frozen(eq=False)
class Rows:
    """Sampled rows of some query tiles. index: int64 ``[B, H, n]`` among the call's rows. position: int64 of the same
    shape, on the row's grid. real: bool, which of them are tokens of the call. n is tiles times rows of a tile."""

    index: Tensor
    position: Tensor
    real: Tensor


@frozen
class Sampling:
    """The rows of a query tile that a head looks at: one in `stride`, which divides the tile. In tile t the first one
    is number ``(t + head * shift) % stride``."""

    stride: int
    shift: int


def sampling(config: RowMaxConfig, group: int) -> Sampling:
    """One row in `every` for each head that keeps alone. `group` heads that share what they keep look at one row in
    `every` between them, each row by another head in turn; where they are no power of two, some rows by two heads."""
    heads = 1 << (group.bit_length() - 1) if config.union == "group" else 1
    while config.block % (config.every * heads):
        heads //= 2
    return Sampling(config.every * heads, config.every if heads > 1 else 1)


def workspace(call: AttentionCall, block: int, width: int, stride: int, *, by_kernels: bool) -> int:
    """Bytes that shares of columns take, with the maxima, logits and converted keys that are in memory on the way."""
    geometry, per = call.geometry, block // stride
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(width)
    one = geometry.batch * geometry.heads * columns
    keys = geometry.batch * call.kv_heads * geometry.tile_columns(block) * (block * call.q.shape[3] + 4)
    if by_kernels:
        return 4 * (one * rows + min(MAXIMA, one * rows * per) + 2 * one * math.lcm(per, LINES)) + keys
    logits = LOGITS_ON_CPU if call.q.device.type == "cpu" else LOGITS
    return 8 * (one * rows + one * max(ROWS, per) + logits + one * per * width + 2 * keys)


def sampled_rows(call: AttentionCall, first: int, last: int, block: int, which: Sampling) -> Rows:
    """Sampled rows of the call's query tiles from `first` to before `last`. For heads that keep alone, the rows for a
    stride are among those for any divisor of it."""
    geometry = call.geometry
    tile = geometry.tiles(block)[:, first:last]  # [B, t]
    head = torch.arange(geometry.heads, device=tile.device) + call.first_head
    phase = (tile[:, None] + head[:, None] * which.shift) % which.stride  # [B, H, t]
    offset = torch.arange(0, block, which.stride, device=tile.device)
    position = ((tile[:, None] * block + phase)[..., None] + offset).flatten(2)
    index, real = geometry.locate(position)
    return Rows(index, position, real)


def shares(call: AttentionCall, block: int, width: int, which: Sampling) -> Tensor:
    """``[B, Hq, R, C]``: the largest share of each column of `width` keys for the sampled rows of a query tile.

    float32 (float64 for float64 calls). Columns that no sampled row may see have 0.
    """
    kind = torch.promote_types(call.q.dtype, torch.float32)
    every = call.q.new_zeros(call.geometry.map_shape(block, width), dtype=kind)
    for tiles, _, found in by_tiles(call, block, width, which):
        every[:, :, tiles, : found.shape[4]] = found.amax(3)
    return every


def chosen(call: AttentionCall, config: RowMaxConfig) -> Tensor:
    """bool ``[B, Hq, R, C]``: columns that a sampled row of the query tile gives a large enough share."""
    width = config.column
    keep = torch.zeros(call.geometry.map_shape(config.block, width), dtype=torch.bool, device=call.q.device)
    for tiles, rows, found in by_tiles(call, config.block, width, sampling(config, call.group)):
        columns = _columns_seen(rows.position, call.geometry.window, width).to(found.dtype)
        least = (config.times / columns).clamp_(max=config.eps).view(*found.shape[:4], 1)
        # What is no number is not known to be small.
        enough = ~(found < least)
        kept = enough.any(3)
        if config.shares_strong:
            strong = (enough & ~(found < config.strong)).any(3).unflatten(1, (-1, call.group)).any(2)
            kept |= strong.repeat_interleave(call.group, 1)
        keep[:, :, tiles, : found.shape[4]] = kept
    return keep


def _columns_seen(position: Tensor, window: int | None, width: int) -> Tensor:
    """Columns that rows at some positions may see; of rows before the first, 1."""
    first = 0 if window is None else (position - window + 1).clamp_(min=0) // width
    return position.clamp(min=0) // width - first + 1


def by_tiles(call: AttentionCall, block: int, width: int, which: Sampling) -> Iterator[tuple[slice, Rows, Tensor]]:
    """Some query tiles after others: which, their sampled rows, and the shares ``[B, Hq, tiles, n, c]`` that the n rows
    of a tile give to the first c columns; behind them none of the rows sees a key.

    With m the largest logit of a row in each column, a share is ``exp(m - logsumexp(m))`` over all columns that the row
    may see, sinks included: no less than the column's largest weight in the row's softmax.
    """
    geometry, per, each = call.geometry, block // which.stride, block // width
    rows, tiles = geometry.tile_rows(block), geometry.tile_columns(block)
    pairs = geometry.batch * geometry.heads * per
    size = max(1, ROWS // pairs)
    some_tiles = max(1, (LOGITS_ON_CPU if call.q.device.type == "cpu" else LOGITS) // (pairs * size * block))
    keys = keys_on_grid(call, tiles * block).to(torch.promote_types(call.q.dtype, torch.float32))
    before = geometry.q_offset // block
    for first in range(0, rows, size):
        last = min(first + size, rows)
        some = sampled_rows(call, first, last, block, which)
        q = torch.gather(call.q, 2, some.index[..., None].expand(-1, -1, -1, call.q.shape[3])).to(keys.dtype)
        behind = min(before + last, tiles)  # rows that start later stand no further
        lowest = max(geometry.q_offset, (before + first) * block)
        top = keys.new_empty(*some.index.shape, behind * each)
        for at in range(0, behind, some_tiles):
            end = min(at + some_tiles, behind)
            whole = geometry.starts is None and geometry.window is None and end * block <= lowest + 1
            part = slice(at * block, end * block)
            top[..., at * each : end * each] = _maxima(
                q, keys, part, width, None if whole else _hidden(call, some, part)
            )
        found = _shares(call, top, some).unflatten(2, (last - first, per))
        yield slice(first, last), some, found[..., : geometry.tile_columns(width)]


def _shares(call: AttentionCall, top: Tensor, rows: Rows) -> Tensor:
    """Shares from the largest products ``[B, Hq, n, c]``: neither a scale nor a cap makes another one the largest."""
    unseen = ~rows.real[..., None] | top.isneginf()
    top = top * call.softmax_scale
    if call.softcap is not None:
        top = call.softcap * torch.tanh(top / call.softcap)
    top = top.masked_fill_(unseen, -torch.inf)
    lse = torch.logsumexp(top, -1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(lse.dtype)[:, None])
    return torch.exp(top - torch.where(lse.isneginf(), 0.0, lse)[..., None])


def _maxima(q: Tensor, keys: Tensor, part: slice, width: int, hidden: Tensor | None) -> Tensor:
    """``[B, Hq, n, c]``: the largest product of each row in columns of some keys. hidden: bool ``[B, Hq, n, keys]``."""
    some = keys[:, :, part]
    products = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) @ some.transpose(-1, -2)
    products = products.view(*q.shape[:3], -1)
    if hidden is not None:
        products.masked_fill_(hidden, -torch.inf)
    found: Tensor = products.unflatten(-1, (-1, width)).amax(-1)
    return found


def _hidden(call: AttentionCall, rows: Rows, part: slice) -> Tensor:
    """bool ``[B, Hq, n, keys]``: keys of a part that causality and the window hide from a row."""
    window = call.geometry.window
    key = torch.arange(part.start, part.stop, device=rows.position.device)
    distance = rows.position[..., None] - key
    return distance < 0 if window is None else (distance < 0) | (distance >= window)
