"""Delta: the difference that dense attention makes to every gamma-th row, given to the rows behind it."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import AttentionCall, rows_at, uncast
from sparseprefill.mask.samples import Held
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Result, base_of, check_plan
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.pooled import products
from sparseprefill.statistics.sampled import Logits
from sparseprefill.validate import whole

ENTRIES, ENTRIES_ON_CPU = 1 << 26, 1 << 22
"""Logits over batch and heads at once, 4 bytes each, a few times over."""


@frozen(kw_only=True)
class Delta:
    """Every `gamma`-th row is dense, and what that changed of it is added to the rows up to the next one.

    With g the last position at or before row i that `gamma` divides: ``o_i + (dense_g - o_g)``, o being the output of
    the mask, of each query head by itself. Row g becomes dense, and nothing goes back to rows before it. The dense
    output is the row's own, merged by LSE with the pairs that its mask leaves out. A row of which nothing is left out
    gives no difference and gets none: it is dense already, as the rows of a dense tail are.

    g is counted on each batch row's grid from its first real token, so padding changes nothing, and the grain is
    `gamma`: cuts at its multiples change nothing. A chunk that begins between two of them takes its first row in place
    of the one that it cannot see.

    A difference that is NaN or infinite, as of a row that leaves out such a value, is not given. `Result.lse` and the
    mask stay those of the mask's own pairs, so that recall goes on saying what the mask kept. Costs 1 / gamma of the
    pairs left out; PyTorch operations alone, a few rows at a time, without host synchronisation.

    Source: Delta Attention (arXiv 2505.11254), the correction term; as in jeffwillette/delta-attention,
    delta_attention/llama.py. Its dense tail (the last 128 rows and the group cut short) is not part of it here: that is
    `DenseRows`, which hosts add to every method. `smooth`, which interpolates to the next row, would show a row the
    keys behind it.
    """

    gamma: int = field(default=64, validator=whole())
    head_scope: ClassVar[HeadScope] = "head"

    @property
    def grain(self) -> int:
        """Tokens at whose multiples a cut changes nothing: `gamma`."""
        return self.gamma

    def workspace(self, call: AttentionCall) -> int:
        """A map of tiles, one difference for each sampled row, and a block of logits and keys."""
        geometry = call.geometry
        heads, rows = geometry.batch * geometry.heads, geometry.tile_rows(self.gamma)
        width = call.q.shape[-1] + call.value_dim
        maps = heads * geometry.tile_rows(128) * geometry.tile_columns(128) * 4
        keys = geometry.batch * call.kv_heads * geometry.kv_len * width * 12
        blocks = 20 * max(heads * geometry.kv_len, _entries(call))
        return maps + keys + blocks + heads * (rows * width * 8 + 3 * geometry.q_len * call.value_dim * 4)

    @uncast
    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        """The result with the differences added; shapes, LSE and plan stay."""
        check_plan(call, plan)
        geometry, held = call.geometry, plan.held()
        sampled = torch.maximum(geometry.tiles(self.gamma) * self.gamma, geometry.first_position()[:, None])
        index, real = geometry.locate(sampled)
        values, spoilt = _values(call, held.map.shape[3] * held.grid[1])
        step = max(1, _entries(call) // (geometry.batch * geometry.heads * values.shape[2]))
        found = []
        for at in range(0, sampled.shape[1], step):
            some = (index[:, at : at + step], sampled[:, at : at + step], real[:, at : at + step])
            found.append(_differences(call, held, result, values, spoilt, *some))
        difference = torch.cat(found, 2)
        group = geometry.query_positions() // self.gamma
        mine = rows_at(difference, group - geometry.first_tile(self.gamma)[:, None])
        lacking = geometry.real_queries()[:, None] & ~_complete(call, held, values.shape[2])
        changed = (mine != 0) & lacking[..., None]
        out = torch.where(changed, (result.out.to(mine.dtype) + mine).to(result.out.dtype), result.out)
        return evolve(result, out=out)


def _complete(call: AttentionCall, held: Held, length: int) -> Tensor:
    """bool ``[B, Hq, Nq]``: rows whose masks hold every key that they may see. length: of the keys, in whole tiles."""
    geometry, (tile_q, tile_k), heads = call.geometry, held.grid, call.geometry.heads
    tiles, inside = geometry.tiles(tile_q), torch.arange(tile_q, device=call.q.device)
    step = max(1, _entries(call) // (geometry.batch * heads * length))
    found = []
    for at in range(0, tiles.shape[1], step):
        tile = tiles[:, at : at + step]
        kept = held.tiles(tile).repeat_interleave(tile_k, 3)
        stripes = held.stripes(tile, length)
        missing = (~(kept if stripes is None else kept | stripes)).cumsum(3, dtype=torch.int32)
        last = (tile[..., None] * tile_q + inside)[:, None].expand(-1, heads, -1, -1)
        lacking = missing.gather(3, last.clamp(0, length - 1))
        if geometry.window is not None:
            before = last - geometry.window
            lacking = lacking - torch.where(before < 0, 0, missing.gather(3, before.clamp(0, length - 1)))
        found.append(lacking == 0)
    rows = geometry.query_positions() - geometry.first_tile(tile_q)[:, None] * tile_q
    return rows_at(torch.cat(found, 2).flatten(2)[..., None], rows.clamp(min=0))[..., 0]


def _differences(
    call: AttentionCall,
    held: Held,
    result: Result,
    values: Tensor,
    spoilt: Tensor,
    index: Tensor,
    position: Tensor,
    real: Tensor,
) -> Tensor:
    """``[B, Hq, n, Dv]``: dense output less the mask's of some query rows; 0 where there is none."""
    length, heads = values.shape[2], call.geometry.heads
    tile = position // held.grid[0]
    kept = held.tiles(tile).repeat_interleave(held.grid[1], 3)
    stripes = held.stripes(tile, length)
    logits = Logits(call, index, real).at(slice(0, length))
    logits = logits.masked_fill(kept if stripes is None else kept | stripes, -torch.inf)
    out = rows_at(result.out, index).to(logits.dtype)
    lse = torch.gather(result.lse, 2, index[:, None].expand(-1, heads, -1)).to(logits.dtype)
    total = lse if call.sinks is None else torch.logaddexp(lse, call.sinks.to(lse.dtype)[:, None])
    highest = logits.amax(-1)
    base = base_of(torch.maximum(total, highest).detach())  # cancels out
    mine, weights = torch.exp(total - base), torch.exp(logits - base[..., None])
    theirs = weights.sum(-1)
    both = mine + theirs
    both = torch.where(both == 0, 1.0, both)  # of a row that sees no key at all
    share, mean = theirs / both, products(weights, values.mT) / both[..., None]
    difference = mean - share[..., None] * out  # dense less sparse, where dense = (1 - share) out + mean
    fit = torch.isfinite(difference).all(-1, keepdim=True) & (highest > -torch.inf)[..., None]
    fit &= ~(products(weights, spoilt.mT) > 0)
    return torch.where(fit, difference, 0.0)


def _values(call: AttentionCall, length: int) -> tuple[Tensor, Tensor]:
    """Values by position, ``[B, Hkv, length, Dv]``, 0 where one is not finite; and ``[..., 1]``, 1 where that is so."""
    geometry, v = call.geometry, call.v
    dtype = torch.promote_types(v.dtype, torch.float32)
    if geometry.starts is None:
        v = functional.pad(v, (0, 0, 0, length - geometry.kv_len))
    else:
        index = torch.arange(length, device=v.device) + geometry.starts[:, None]
        v = rows_at(v, index.clamp(max=geometry.kv_len - 1))
    finite = torch.isfinite(v)
    return torch.where(finite, v, 0).to(dtype), (~finite.all(-1, keepdim=True)).to(dtype)


def _entries(call: AttentionCall) -> int:
    return ENTRIES if call.q.is_cuda else ENTRIES_ON_CPU
