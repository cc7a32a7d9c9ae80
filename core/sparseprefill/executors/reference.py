"""ReferenceExecutor: sparse attention in plain PyTorch. The truth for every test, and the default on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.executors.selection import TileKeys
from sparseprefill.plan import Plan, Result
from sparseprefill.softmax import SoftmaxState

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


@frozen
class ReferenceExecutor:
    """One query tile of one head at a time: gathers the selected keys, exact softmax in float32.

    Runs on any device, dtype and head dimension, with every feature of AttentionCall. Memory is bounded by one query
    tile's logits; time is proportional to the pairs selected. float64 calls are computed in float64.
    """

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The carry, if any, merged with attention over the plan's mask; unnormalised."""
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        shape = (call.q.shape[0], call.q.shape[1], call.q.shape[2])
        state = SoftmaxState.empty(shape, call.value_dim, dtype, call.q.device)
        for (b, h, rows), keys, logits, keep in _tiles(call, plan, dtype):
            m = logits.amax(-1)
            p = torch.exp(logits - torch.where(m == -torch.inf, 0.0, m)[:, None])
            state.m[b, h, rows], state.l[b, h, rows] = m, p.sum(-1)
            state.acc[b, h, rows] = weigh(p, call.v[b, h // call.group][keys].to(dtype), keep)
        return state if plan.carry is None else plan.carry.state.merge(state)

    def workspace(self, call: AttentionCall) -> int:
        """The state in full precision, a few times over; logits are those of one query tile of one head."""
        rows, width = call.q.numel() // call.q.shape[-1], call.value_dim + 2
        return rows * width * 4 * max(4, call.q.element_size())

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Output, LSE, and the tile mass of probed heads."""
        out, lse = self.accumulate(call, plan).finish(call.sinks)
        probe = None if plan.probe is None else _tile_mass(call, plan, lse)
        return Result(out.to(call.q.dtype), lse, plan, probe)


def _tiles(
    call: AttentionCall, plan: Plan, dtype: torch.dtype, heads: Tensor | None = None
) -> Iterator[tuple[tuple[int, int, slice], Tensor | slice, Tensor, Tensor]]:
    """Every non-empty (batch row, head, query rows), its keys, its logits (-inf where not allowed) and who may see."""
    selection = TileKeys(plan.mask)
    for b in range(call.q.shape[0]):
        for h in range(call.q.shape[1]):
            if heads is not None and not bool(heads[b, h]):
                continue
            k = call.k[b, h // call.group]
            for row in range(selection.rows):
                picked = selection.pick(b, h, row)
                if picked is None:
                    continue
                rows, keys, keep = picked
                logits = call.q[b, h, rows].to(dtype) @ k[keys].to(dtype).T * call.softmax_scale
                if call.softcap is not None:
                    logits = call.softcap * torch.tanh(logits / call.softcap)
                yield (b, h, rows), keys, logits.masked_fill_(~keep, -torch.inf), keep


def weigh(p: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """``p @ v`` in which a NaN or infinity of `v` reaches only the rows that may see its key."""
    finite = torch.isfinite(v)
    if bool(finite.all()):
        return p @ v
    out = p @ torch.where(finite, v, 0.0)
    for j in torch.nonzero(~finite.all(-1))[:, 0].tolist():
        odd = keep[:, j, None] & ~finite[j]
        out = torch.where(odd, out + p[:, j, None] * v[j], out)
    return out


def _tile_mass(call: AttentionCall, plan: Plan, lse: Tensor) -> Tensor:
    """float32 [B, Hq, R, C]: see `Result.probe`."""
    mask = plan.mask
    chosen = mask.tile_map()
    mass = torch.zeros(chosen.shape, dtype=torch.float32, device=call.q.device)
    first = mask.geometry.first_tile(mask.tile_q).tolist()
    query, position = mask.geometry.query_positions(), mask.geometry.key_positions()
    for (b, h, rows), keys, logits, _ in _tiles(call, plan, lse.dtype, plan.probe):
        row = int(query[b, rows.start]) // mask.tile_q - first[b]
        column = torch.div(position[b][keys], mask.tile_k, rounding_mode="floor")
        base = lse[b, h, rows, None]
        p = torch.exp(logits - torch.where(base == -torch.inf, 0.0, base)).mean(0)
        mass[b, h, row].index_add_(0, column, p.to(torch.float32))
    return mass * chosen
