"""Plans for tests of refiners: any mask, with or without a carry; and the positions that rules speak about."""

from __future__ import annotations

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.plan import Carry, Plan
from sparseprefill.stages import MaskRefiner
from sparseprefill.testing import allowed_pairs, calls, masks

CALLS = calls(max_len=90, max_heads=4, head_dims=(2,), max_batch=2)
KINDS = ("both", "stripes", "tiles", "union")


@st.composite
def plans(draw: st.DrawFn, call: AttentionCall, *, kinds: tuple[str, ...] = KINDS, carry: bool = True) -> Plan:
    """Any mask; half of the time beside the carry of another mask, from which it is disjoint."""
    mask = draw(masks(call, kinds=kinds))
    if not carry or draw(st.booleans(), label="no carry"):
        return Plan(mask)
    region = draw(masks(call, kinds=kinds))
    return Plan(mask - region, Carry(ReferenceExecutor().accumulate(call, Plan(region)), region))


def whole(plan: Plan) -> Tensor:
    """bool ``[B, Hq, Nq, Nkv]``: what the plan computes, its carry's region included."""
    dense = plan.mask.to_dense()
    return dense if plan.carry is None else dense | plan.carry.region.to_dense()


def refined(refiner: MaskRefiner, call: AttentionCall, plan: Plan) -> Plan:
    """The refiner's plan, whose mask is well formed and disjoint from the carry, which is the same."""
    assert isinstance(refiner, MaskRefiner)
    after = refiner.refine(call, plan, Memory())
    after.mask.check()
    assert after.carry is plan.carry
    if after.carry is not None:
        assert not bool((after.mask.to_dense() & after.carry.region.to_dense()).any())
    return after


@frozen(eq=False)
class Positions:
    """Where queries int64 ``[B, 1, Nq, 1]`` and keys ``[B, 1, 1, Nkv]`` stand; allowed bool ``[B, 1, Nq, Nkv]``."""

    query: Tensor
    key: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, call: AttentionCall) -> Positions:
        """From the call's fields alone."""
        batch, q_len, kv_len = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        offset = kv_len - q_len if call.q_offset is None else call.q_offset
        start = torch.zeros(batch, dtype=torch.int64) if call.starts is None else call.starts.long()
        query, key = torch.arange(q_len) + offset - start[:, None], torch.arange(kv_len) - start[:, None]
        return cls(query[:, None, :, None], key[:, None, None], allowed_pairs(call)[:, None])


def tile_of(mask: SparseMask, tile: int | None) -> tuple[int, int]:
    """The grid on which a refiner with this `tile` works."""
    return (mask.tile_q, mask.tile_k) if tile is None else (tile, tile)
