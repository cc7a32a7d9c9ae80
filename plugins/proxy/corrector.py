"""Proxy: what a mask leaves out enters the output once per key tile, through its mean key."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, rows_at, uncast
from sparseprefill.errors import ParameterError
from sparseprefill.mask.samples import Held
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Result, base_of, check_plan
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.pooled import products
from sparseprefill.validate import maybe, whole

ENTRIES, ENTRIES_ON_CPU = 1 << 25, 1 << 21
"""Logits over batch and heads at once, 4 bytes each, a few times over."""


@frozen(kw_only=True)
class Proxy:
    """Adds to each query row the key tiles that its mask leaves out, each as one key: the mean of those left out.

    The keys of a tile that the row's mask does not hold, n of them, count as n keys equal to their mean, each with the
    mean of their values: logit ``s + ln n`` with s of the mean key (softcap included), value their mean. The softmax
    over the pairs computed and these proxies is exact: merged by LSE, sinks in the denominator. By Jensen's inequality
    a proxy never has more mass than the keys that it stands for.

    A tile is proxied for a row only if the row may see every key of it: those that end at the row or before, and begin
    within its window; so no key of the future enters, and of the diagonal tiles and the window's edge nothing does. A
    column that a stripe keeps for the row's query tile is no part of the mean. A tile that is kept has no proxy, nor
    has one in which a key or value is NaN or infinite. A row for which nothing is left out keeps its output bit by bit.

    tile: tokens of a proxied tile, which divide the plan's key tiles; None: those. 1 makes the result dense attention.

    `Result.lse` and the mask stay those of the pairs computed, so that recall goes on saying what the mask kept.

    Each row is corrected by its own mask and the keys before it, so that any cut of the prompt gives the same (the
    grain is 1), and padding is never seen. PyTorch operations alone: no kernel, no host synchronisation, and memory
    for a few query tiles at a time.

    Source: the compensation of skipped blocks in Sol-Attn (NVlabs/Sana, sol_attn/triton_ref/fwd.py: per skipped block
    ``l += L e^(s - m)``, ``acc += e^(s - m) sum(v)``, s of the block's mean key) and FlashPrefill V2's mean correction;
    the zeroth-order term of PISA (arXiv 2602.01077). Those are per block and, the first and the last, not causal; whole
    visible tiles alone, and stripes, are ours.
    """

    tile: int | None = field(default=None, validator=maybe(whole()))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """A map of tiles, the means, the output once more, and a block of logits."""
        geometry, size = call.geometry, 128 if self.tile is None else self.tile
        columns, width = geometry.tile_columns(size), call.q.shape[-1] + call.value_dim
        maps = geometry.batch * geometry.heads * geometry.tile_rows(128) * columns * 4
        means = geometry.batch * call.kv_heads * columns * width * 16
        heads = geometry.batch * geometry.heads
        out = heads * (geometry.q_len + 256) * call.value_dim * call.q.element_size() * 2
        block = max(_entries(call), heads * columns * (128 + size + width))
        return maps + means + out + 24 * block

    @uncast
    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        """The result with proxies for what is left out; LSE and plan stay. ParameterError for another `tile`."""
        check_plan(call, plan)
        own = plan.common_grid()[1]
        if self.tile is not None and own % self.tile:
            remedy = f"pass a divisor of {own}, the tokens of the plan's key tiles"
            raise ParameterError(f"Proxy.tile is {self.tile}: {remedy}")
        held, geometry = plan.held(self.tile), call.geometry
        tile_q, tile_k = held.grid
        # Only whole tiles up to the call's last row may be seen by one of its rows.
        columns = min(geometry.kv_len, geometry.q_offset + geometry.q_len) // tile_k
        if columns == 0:
            return result
        keys = _TileKeys(call, tile_k, columns)
        striped = any(mask.stripes is not None for mask in held.masks)
        tiles = geometry.tiles(tile_q)
        entries = columns * tile_q * geometry.batch * geometry.heads
        if striped:  # of each query tile and head its own means, too
            entries += columns * (tile_k + call.q.shape[-1] + call.value_dim) * geometry.batch * geometry.heads
        step = max(1, _entries(call) // entries)
        whole_tiles = result.out.new_empty(*result.out.shape[:2], tiles.shape[1] * tile_q, call.value_dim)
        for first in range(0, tiles.shape[1], step):
            here = tiles[:, first : first + step]
            rows = slice(first * tile_q, (first + here.shape[1]) * tile_q)
            whole_tiles[:, :, rows] = _corrected(call, held, keys, result, here, columns)
        # From whole query tiles back to the call's rows.
        if geometry.starts is None:
            skipped = geometry.q_offset % tile_q
            return evolve(result, out=whole_tiles[:, :, skipped : skipped + geometry.q_len].contiguous())
        before = geometry.first_position() - tiles[:, 0] * tile_q
        index = before[:, None] + torch.arange(geometry.q_len, device=before.device)
        return evolve(result, out=rows_at(whole_tiles, index))


def _corrected(call: AttentionCall, held: Held, keys: _TileKeys, result: Result, tile: Tensor, columns: int) -> Tensor:
    """Output of the rows of some query tiles, int64 ``[B, n]`` on each row's grid: ``[B, Hq, n * tile_q, Dv]``."""
    geometry, (tile_q, tile_k) = call.geometry, held.grid
    position = (tile[..., None] * tile_q + torch.arange(tile_q, device=tile.device)).flatten(1)
    index, real = geometry.locate(position)
    begin = torch.arange(columns, device=tile.device) * tile_k
    seen = (begin + tile_k - 1 <= position[..., None]) & real[..., None]
    if geometry.window is not None:
        seen &= position[..., None] - begin < geometry.window
    q, out = rows_at(call.q, index).to(keys.dtype) * call.softmax_scale, rows_at(result.out, index)
    lse = torch.gather(result.lse, 2, index[:, None].expand(-1, geometry.heads, -1)).to(keys.dtype)
    kept = held.stripes(tile, columns * tile_k)
    left = ~held.tiles(tile)[..., :columns] & keys.finite[:, :, None]
    mean_key, mean_value, count = keys.mean_key, keys.mean_value, None
    if kept is None:
        logits = products(q, mean_key)
    else:
        mean_key, mean_value, count = keys.without(kept, call.group)
        left = left & count.bool()
        logits = (q.unflatten(2, (-1, tile_q)) @ mean_key.transpose(-1, -2)).flatten(2, 3)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    entered = left.repeat_interleave(tile_q, 2) & seen[:, None]
    weight = math.log(tile_k) if count is None else count.clamp(min=1).log().repeat_interleave(tile_q, 2)
    logits = (logits + weight).masked_fill(~entered, -torch.inf)
    total = lse if call.sinks is None else torch.logaddexp(lse, call.sinks.to(lse.dtype)[:, None])
    highest = logits.amax(-1)
    base = base_of(torch.maximum(total, highest).detach())  # cancels out
    mine, theirs = torch.exp(total - base), torch.exp(logits - base[..., None])
    if kept is None:
        value = products(theirs, mean_value.mT)
    else:
        value = (theirs.unflatten(2, (-1, tile_q)) @ mean_value).flatten(2, 3)
    both = mine + theirs.sum(-1)
    both = torch.where(both == 0, 1.0, both)  # of a row that sees no key at all
    merged = (out.to(keys.dtype) * mine[..., None] + value) / both[..., None]
    return torch.where(highest.isneginf()[..., None], out, merged.to(out.dtype))


class _TileKeys:
    """Means of whole key tiles; a tile with a NaN or an infinity has a mean of 0, and is not `finite`.

    mean_key ``[B, Hkv, C, D]``, mean_value ``[B, Hkv, C, Dv]``, finite bool ``[B, Hq, C]``.
    """

    def __init__(self, call: AttentionCall, tile: int, columns: int) -> None:
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.tile = tile
        self.keys, self.values = (_by_tile(call, x, tile, columns) for x in (call.k, call.v))
        means = [x.mean(3, dtype=self.dtype) for x in (self.keys, self.values)]
        finite = torch.isfinite(means[0]).all(-1) & torch.isfinite(means[1]).all(-1)
        self.mean_key, self.mean_value = (torch.where(finite[..., None], x, 0.0) for x in means)
        self.finite = finite.repeat_interleave(call.group, 1)
        self._usable = finite[..., None, None]

    def without(self, kept: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """The means of what some columns leave: ``[B, Hq, n, C, *]`` twice, and how many keys, ``[B, Hq, n, C]``.

        kept: bool ``[B, Hq, n, C * tile]``, columns that a query tile's stripes hold.
        """
        left = (~kept).unflatten(-1, (-1, self.tile))  # [B, Hq, n, C, tile]
        count = left.sum(-1).to(self.dtype)
        weights = left.to(self.dtype) / count.clamp(min=1)[..., None]
        heads = weights.unflatten(1, (-1, group)).permute(0, 1, 4, 2, 3, 5)  # [B, Hkv, C, group, n, tile]
        flat = heads.flatten(3, 4)
        made = []
        for x in (self.keys, self.values):
            mean = flat @ torch.where(self._usable, x, 0).to(self.dtype)  # [B, Hkv, C, group * n, *]
            made.append(mean.unflatten(3, (group, -1)).permute(0, 1, 3, 4, 2, 5).flatten(1, 2))
        return made[0], made[1], count


def _by_tile(call: AttentionCall, x: Tensor, tile: int, columns: int) -> Tensor:
    """``[B, Hkv, C, tile, *]``: whole tiles on each row's grid; a view where no row has a start."""
    geometry, length = call.geometry, columns * tile
    if geometry.starts is None:
        whole: Tensor = x[:, :, :length].unflatten(2, (columns, tile))
        return whole
    index = torch.arange(length, device=x.device) + geometry.starts[:, None]
    found: Tensor = rows_at(x, index.clamp(max=geometry.kv_len - 1)).unflatten(2, (columns, tile))
    return found


def _entries(call: AttentionCall) -> int:
    return ENTRIES if call.q.is_cuda else ENTRIES_ON_CPU
