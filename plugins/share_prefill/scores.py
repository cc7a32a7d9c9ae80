"""Block-averaged attention of the last queries, for the tests, and of whole maps, for pivots.

By mass, exactly, or the paper's way: the softmax over blocks of the mean logit in each, over the pairs that causality
allows. A softcap then applies to the mean. Sliding windows are refused: they would cut tiles in two at both ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import rows_at
from sparseprefill.errors import StageError
from sparseprefill.mask.geometry import reachable_map
from sparseprefill.statistics.pooled import key_tile_mean, real_rows, tile_mean

from .heads import of_heads

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.memory import Memory

KEYS = 8192
"""Keys, or query rows, whose sums are in memory at once."""


def shares(sums: Tensor) -> Tensor:
    """Sums ``[B, H, C]`` as shares of each head's whole (a-hat, Algorithm 3); 0 where that is 0."""
    whole = sums.sum(-1, keepdim=True)
    share: Tensor = sums / torch.where(whole == 0, 1.0, whole)
    return share


def on_blocks(probe: Tensor, mask: SparseMask, block: int) -> Tensor:
    """``[B, H, R, C]``: `Result.probe` on tiles of ``block x block``.

    A refiner may have put the mask on a finer grid: columns are then summed, rows averaged by their number of real
    queries. StageError where the mask's tiles do not divide the block.
    """
    if (mask.tile_q, mask.tile_k) == (block, block):
        return probe
    if block % mask.tile_q or block % mask.tile_k:
        raise StageError(
            f"share-prefill: the mask has tiles of {mask.tile_q} x {mask.tile_k} tokens; refiners must leave tiles "
            f"that divide block={block}, or no pivot can be made from it"
        )
    geometry = mask.geometry
    bins, parts = geometry.tile_columns(block), block // mask.tile_k
    x = functional.pad(probe, (0, bins * parts - probe.shape[-1])).unflatten(-1, (bins, parts)).sum(-1)
    weight = real_rows(geometry, mask.tile_q)
    row = torch.div(geometry.tiles(mask.tile_q) * mask.tile_q, block, rounding_mode="floor")
    row = (row - geometry.first_tile(block)[:, None]).clamp(0, geometry.tile_rows(block) - 1)
    at = row[:, None, :, None].expand(-1, x.shape[1], -1, bins)
    summed = x.new_zeros(*x.shape[:2], geometry.tile_rows(block), bins)
    summed.scatter_add_(2, at, x * weight[:, None, :, None])
    mean: Tensor = summed / real_rows(geometry, block).clamp(min=1)[:, None, :, None]
    return mean


def last_scores(
    call: AttentionCall, rows: Tensor, real: Tensor, seen: Tensor, block: int, memory: Memory | None = None
) -> Tensor:
    """``[B, H, C]`` of the sampled rows (index ``[B, n]``, where `real`); seen: bool ``[B, C]``, blocks in reach.

    memory: see `key_tile_mean`.

    In a block that every row sees the mean logit is the product of the means; pairs are formed for the others alone.
    """
    geometry, heads = call.geometry, call.q.shape[1]
    batch, count = rows.shape
    dtype = _dtype(call)
    q = rows_at(call.q, rows).to(dtype)
    q = torch.where(real[:, None, :, None], q, 0).unflatten(1, (-1, call.group))
    pooled = q.sum(3) / real.sum(1).clamp(min=1)[:, None, None, None]
    mean = (pooled @ key_tile_mean(call, block, memory).to(dtype).transpose(-1, -2)).flatten(1, 2)
    query = torch.gather(geometry.query_positions(), 1, rows)
    first = torch.where(real, query, geometry.kv_len).amin(1, keepdim=True)
    tiles = torch.div(first, block, rounding_mode="floor")
    tiles = tiles + torch.arange((count + block - 2) // block + 1, device=q.device)
    position = (tiles[..., None] * block + torch.arange(block, device=q.device)).flatten(1)
    sees = (query[:, :, None] >= position[:, None]) & real[:, :, None]
    keys = _key_tiles(call, tiles, block).flatten(2, 3)
    logits = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(batch, heads, count, -1)
    total = torch.where(sees[:, None], logits, 0).sum(2).unflatten(2, (-1, block)).sum(3)
    pairs = sees.sum(1).unflatten(1, (-1, block)).sum(2).clamp(min=1)
    # Tiles behind the last go to a column of their own, which is dropped.
    bins = mean.shape[2]
    at = tiles.clamp(max=bins)[:, None].expand(-1, heads, -1)
    mean = functional.pad(mean, (0, 1)).scatter(2, at, total / pairs[:, None])[..., :bins]
    return _softmax(call, mean, seen[:, None])


def map_scores(call: AttentionCall, head: Tensor, block: int, memory: Memory | None = None) -> Tensor:
    """``[B, S, R, C]`` of the query heads `head` ``[B, S]``; 0 in rows of blocks without a real query.

    memory: see `key_tile_mean`.
    """
    geometry, dtype = call.geometry, _dtype(call)
    kv_head = torch.div(head, call.group, rounding_mode="floor")
    q, keys = of_heads(call.q, head), of_heads(key_tile_mean(call, block, memory), kv_head).to(dtype)
    mean = tile_mean(q, geometry, block).to(dtype) @ keys.transpose(-1, -2)
    step = max(1, KEYS // block)
    tiles = geometry.tiles(block)
    own = torch.cat([_diagonal(call, q, kv_head, part, block) for part in tiles.split(step, 1)], 2)
    at = tiles.clamp(0, mean.shape[3] - 1)[:, None, :, None].expand(-1, mean.shape[1], -1, -1)
    mean = mean.scatter(3, at, own[..., None])
    real = real_rows(geometry, block) > 0
    return _softmax(call, mean, (reachable_map(geometry, block, block) & real[..., None])[:, None])


def _diagonal(call: AttentionCall, q: Tensor, kv_head: Tensor, tiles: Tensor, block: int) -> Tensor:
    """``[B, S, r]``: mean of q.k over the causal pairs of the diagonal tiles ``[B, r]``, without scale.

    q: ``[B, S, Nq, D]``, whose keys are of the KV heads ``[B, S]``. The keys that a row sees are added up first, so
    that a tile needs no matrix of pairs.
    """
    position = (tiles[..., None] * block + torch.arange(block, device=tiles.device)).flatten(1)
    index, real = call.geometry.locate(position)
    q = rows_at(q, index).to(_dtype(call))
    seen = of_heads(_key_tiles(call, tiles, block).cumsum(3).flatten(2, 3), kv_head)
    dots = torch.where(real[:, None], (q * seen).sum(-1), 0).unflatten(2, (-1, block)).sum(-1)
    pairs = torch.where(real, position % block + 1, 0).unflatten(1, (-1, block)).sum(-1)
    mean: Tensor = dots / pairs.clamp(min=1)[:, None]
    return mean


def _key_tiles(call: AttentionCall, tiles: Tensor, block: int) -> Tensor:
    """``[B, Hkv, r, block, D]``: keys of key tiles ``[B, r]``; where there is no key, some other one."""
    geometry = call.geometry
    index = (tiles[..., None] * block + torch.arange(block, device=tiles.device)).flatten(1)
    index = index if geometry.starts is None else index + geometry.starts[:, None]
    keys: Tensor = call.keys_at(index.clamp(0, geometry.kv_len - 1)).to(_dtype(call)).unflatten(2, (-1, block))
    return keys


def _softmax(call: AttentionCall, mean: Tensor, seen: Tensor) -> Tensor:
    logits = mean * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    scores = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
    return torch.where(seen, scores, 0.0)


def _dtype(call: AttentionCall) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32
