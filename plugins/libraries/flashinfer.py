"""FlashInfer's `VariableBlockSparseAttentionWrapper` (package flashinfer-python), for capabilities 8.0 to 9.0.

Each block row is a request of its own there, whose keys are those of its blocks, one behind the other. Its causal
variant lets the last row see them all, and each row before it one key less: that is exact where the last block is the
row's own tile, the diagonal one. Where some row has no such tile, keys before the diagonal are attended to without
causality, the diagonal tiles with it, and both are merged by their LSE. Making a plan waits for the device. Source:
flashinfer/sparse.py and include/flashinfer/attention/state.cuh of 0.7.2, whose LSE has base 2.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square
from sparseprefill.mask.geometry import in_a_mode
from sparseprefill.mask.mask import SparseMask

from .common import keep, missing, rows_reach_the_end

WORKSPACE = 128 << 20
"""Bytes that the library recommends for sums of parts."""


def objection(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """By what is installed, and sizes."""
    reason = missing("flashinfer", "flashinfer") or rows_reach_the_end(call)
    if reason is not None:
        return reason
    if in_a_mode():  # its plans and buffers outlive the call
        return "a mode or a transform of torch"
    if call.q.shape[0] > 1:
        return "several batch rows"
    if mask.tile_q != mask.tile_k:
        return f"tiles of {mask.tile_q} x {mask.tile_k}; it takes equal sides"
    if mask.shared % call.group:
        return "query heads of one KV head with tiles of their own"
    return None


def launch(job: Job) -> Launched:
    """Output and LSE; waits for the device, as the library's plans do."""
    call, mask = job.call, job.mask
    g, tile = call.geometry, mask.tile_q
    first = g.q_offset // tile
    tiles = mask.tile_map()[0, :: call.group]  # [Hkv, R, C]
    rows = torch.arange(tiles.shape[1], device=tiles.device)[:, None] + first
    columns = torch.arange(tiles.shape[2], device=tiles.device)
    own = columns == rows  # [R, C]
    before = tiles & (columns < rows)
    if bool((tiles & own).any(-1).all()):
        out, lse = _attend(call, before | own, tile, causal=True)
    else:
        parts = [_attend(call, kept, tile, causal) for kept, causal in ((before, False), (tiles & own, True))]
        out, lse = _merged(*parts)
    keep(job, out[None].to(call.q.dtype), lse[None])
    return Launched()


def _attend(call: AttentionCall, tiles: Tensor, tile: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Out ``[Hq, Nq, D]`` and natural LSE ``[Hq, Nq]`` over tiles ``[Hkv, R, C]``; -inf for rows without one."""
    g, heads = call.geometry, call.kv_heads
    if not bool(tiles.any()):
        return torch.zeros_like(call.q[0]), torch.full(
            call.q.shape[1:3], -torch.inf, dtype=torch.float32, device=call.q.device
        )
    sizes = [_sizes(*ends, tile).to(call.q.device) for ends in ((g.q_offset, g.kv_len), (0, g.kv_len))]
    wrapper = _wrapper(call.q.device, call.q.dtype, call.q.shape[-1])
    wrapper.plan(
        tiles,
        *(one.expand(heads, -1).contiguous() for one in sizes),
        call.q.shape[1],
        heads,
        call.q.shape[-1],
        causal=causal,
        logits_soft_cap=call.softcap,
        sm_scale=call.softmax_scale,
        q_data_type=call.q.dtype,
    )
    out, lse = wrapper.run(call.q[0], call.k[0], call.v[0], return_lse=True)
    lengths = (tiles * sizes[1]).sum(-1)  # [Hkv, R], keys of each block row
    empty = (lengths == 0).repeat_interleave(call.group, 0).repeat_interleave(sizes[0], 1, output_size=g.q_len)
    return out, torch.where(empty, -torch.inf, lse * math.log(2))


def _merged(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, which share none."""
    lse = torch.logaddexp(one[1], two[1])
    base = torch.where(lse == -torch.inf, 0.0, lse)
    weighed = [torch.where(x[1] == -torch.inf, 0.0, torch.exp(x[1] - base))[..., None] for x in (one, two)]
    seen = [torch.where(x[1][..., None] == -torch.inf, 0.0, x[0]) for x in (one, two)]
    return seen[0] * weighed[0] + seen[1] * weighed[1], lse


@cache
def _sizes(first: int, end: int, tile: int) -> Tensor:
    """int32 on the CPU: tokens of each tile between two positions."""
    edges = [first, *range(first - first % tile + tile, end, tile), end]
    return torch.tensor(edges, dtype=torch.int32, device="cpu").diff()


@cache
def _wrapper(device: torch.device, dtype: torch.dtype, dim: int) -> Any:
    """One for each kind of call, since the library settles for a backend when it first plans."""
    buffer = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    return import_module("flashinfer").VariableBlockSparseAttentionWrapper(buffer)


FLASHINFER = Family(
    name="flashinfer",
    rank={**dict.fromkeys([(8, 0), (8, 6), (8, 7), (8, 9)], 10), (9, 0): -10},
    launch=launch,
    features=Features(dims=square(64, 128, 256), softcap=True),
    objection=objection,
)
"""In front of the portable kernel, but behind it at capability 9.0, where it is tuned and never waits."""
