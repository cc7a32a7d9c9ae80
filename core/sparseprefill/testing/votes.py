"""Pairs that a result says it computed: its mask, less what its rows voted to leave out."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.plan import Result


def computed(call: AttentionCall, result: Result) -> Tensor:
    """bool ``[B, Hq, Nq, Nkv]``: what `call`'s result computed; the mask where nothing was skipped.

    The votes are held again, in float64, over the blocks that the result names (`Result.skipped`).
    """
    plan, skipped = result.plan, result.skipped
    if skipped is None or plan.skip_below is None:
        return result.mask.to_dense()
    mask, geometry = plan.mask, plan.mask.geometry
    left = mask.to_dense()  # without the carry's region
    tiles = mask.tile_map()
    stripes, real = mask.stripes, geometry.real_queries()
    for b in range(geometry.batch):
        first = int(geometry.first_position()[b])
        start = 0 if geometry.starts is None else int(geometry.starts[b])
        bound = torch.log(plan.skip_below[b].double())
        tile_zero, group_zero = (int(geometry.first_tile(size)[b]) for size in (mask.tile_q, mask.group_rows))
        for h in range(geometry.heads):
            q, k = call.q[b, h].double(), call.k[b, h // call.group].double()
            for block in range(tiles.shape[2] * mask.tile_q // skipped.block):
                row = block * skipped.block // mask.tile_q
                low = tile_zero * mask.tile_q + block * skipped.block
                steps = _tile_steps(torch.nonzero(tiles[b, h, row])[:, 0].tolist(), mask.tile_k, skipped.keys, low)
                if stripes is not None:
                    group = (tile_zero + row) // mask.group - group_zero
                    offset, count = int(stripes.offsets[b, h, group]), int(stripes.counts[b, h, group])
                    columns = stripes.indices[offset : offset + count].to(torch.int64)[:, None] * mask.stripe_width
                    columns = (columns + torch.arange(mask.stripe_width, device=columns.device)).flatten()
                    taken = set(torch.nonzero(tiles[b, h, row])[:, 0].tolist())
                    for chunk in columns.split(skipped.keys):
                        steps.append([at for at in chunk.tolist() if at // mask.tile_k not in taken])
                for part in range(low, low + skipped.block, skipped.rows):
                    rows = torch.arange(part, part + skipped.rows, device=q.device) - first
                    rows = rows[(rows >= 0) & (rows < geometry.q_len)]
                    rows = rows[real[b, rows]]
                    most = torch.full(rows.shape, -torch.inf, dtype=torch.float64, device=q.device)
                    if plan.carry is not None:
                        most = plan.carry.state.m[b, h, rows].double()
                    for step in steps:
                        at = torch.tensor(step, dtype=torch.int64, device=q.device) + start
                        at = at[at < geometry.kv_len]
                        here = left[b, h][rows[:, None], at]
                        logits = q[rows] @ k[at].T * call.softmax_scale
                        if call.softcap is not None:
                            logits = call.softcap * torch.tanh(logits / call.softcap)
                        logits = logits.masked_fill(~here | logits.isnan(), -torch.inf)
                        highest = torch.cat([logits, torch.full_like(most[:, None], -torch.inf)], 1).amax(1)
                        if bool((highest < most + bound).all()):
                            left[b, h][rows[:, None], at] = False
                        else:
                            most = torch.maximum(most, highest)
    region = torch.zeros_like(left) if plan.carry is None else plan.carry.region.to_dense()
    return left | region


def _tile_steps(tiles: list[int], size: int, keys: int, low: int) -> list[list[int]]:
    """Key positions step by step: what reaches behind row `low`, from the last; the first tile; the rest, backwards."""
    parts = size // keys
    steps = [tile * size + part * keys for tile in tiles for part in range(parts)]
    beyond = sum(first + keys - 1 > low for first in steps)
    before = steps[: len(steps) - beyond]
    order = [*reversed(steps[len(before) :]), *reversed(before[:parts]), *reversed(before[parts:])]
    return [list(range(first, first + keys)) for first in order]
