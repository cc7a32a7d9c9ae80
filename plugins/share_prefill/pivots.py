"""Algorithms 2 to 4: which heads share a pivot or run dense to make one, their tiles, and the pivots of a request.

A pivot is the pattern of one head, which heads of later layers may share.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.call import AttentionCall
from sparseprefill.errors import StageError
from sparseprefill.mask.geometry import Geometry, by_block
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.statistics.pooled import js_distance, real_rows
from sparseprefill.statistics.slashes import slash_tiles

from .heads import NEVER, LayerHeads, index, of_heads


@frozen(eq=False)
class Choice:
    """Each head's choice: vertical-slash where neither flag is set.

    flags: bool ``[3, B, H]``: heads that share their cluster's pivot, heads that run dense, either. own: ``[B, H, C]``,
    the block-averaged attention that decided.
    """

    flags: Tensor
    own: Tensor

    @property
    def share(self) -> Tensor:
        """bool ``[B, H]``."""
        return self.flags[0]

    @property
    def dense(self) -> Tensor:
        """bool ``[B, H]``."""
        return self.flags[1]

    @property
    def either(self) -> Tensor:
        """bool ``[B, H]``."""
        return self.flags[2]


@frozen(eq=False)
class Pivots:
    """One pivot per batch row and cluster, made in some layer of one call of the model.

    sizes: of the call, without its heads. at: layer and first head of the last part that wrote. made: int32 ``[B, K]``,
    the layer that made each pivot; without one ``NEVER - 1 - layer``, of the last layer in which a head ran dense for
    it that a refiner narrowed, or NEVER. last: ``[B, K, C]``, block-averaged attention of the pivot head's last
    queries (the paper's a~). packed: uint8 ``[B, K, R, ceil(C / 8)]``, its pattern (M), a bit per tile: at a million
    tokens the patterns of a table of clusters would be gigabytes as bool maps.
    """

    sizes: tuple[int | None, ...]
    at: tuple[int, int]
    made: Tensor
    last: Tensor
    packed: Tensor

    def pattern(self, clusters: Tensor) -> Tensor:
        """bool ``[B, H, R, C]``: the patterns of the clusters of heads, int64 ``[H]``."""
        bits = torch.arange(8, dtype=torch.uint8, device=self.packed.device)
        tiles = (self.packed[:, clusters, :, :, None] >> bits) & 1
        return tiles.flatten(3)[..., : self.last.shape[2]].bool()


def shares(sums: Tensor) -> Tensor:
    """Sums ``[B, H, C]`` as shares of each head's whole (a-hat, Algorithm 3); 0 where that is 0."""
    whole = sums.sum(-1, keepdim=True)
    share: Tensor = sums / torch.where(whole == 0, 1.0, whole)
    return share


def choose(
    own: Tensor, seen: Tensor, heads: LayerHeads, pivots: Pivots | None, layer: int, tau: float, delta: float
) -> Choice:
    """From the heads' block-averaged attention `own` ``[B, H, C]`` over the blocks `seen` (bool ``[B, C]``).

    All heads of a layer at once: of a cluster without a pivot the first head that may make one runs dense, and the
    others do not wait for it, nor do heads of the layer that come in a later part of the call.
    """
    codes = heads.codes(own.device)
    cluster = codes.clamp(min=0) // 2
    uniform = seen.to(own.dtype) / seen.sum(-1, keepdim=True).clamp(min=1)
    able = (codes >= 0) & (js_distance(own, uniform[:, None]) < delta)
    makes = able & (codes % 2 == 1)
    if pivots is None:
        share = torch.zeros_like(able)
    else:
        made = pivots.made[:, cluster]
        share = able & (made < layer) & (js_distance(own, pivots.last[:, cluster].to(own.dtype)) < tau)
        makes = makes & (made >= NEVER - layer)  # no pivot, and no head of this layer has run dense for one
    before = (cluster[:, None] == cluster).tril(-1)
    dense = makes & ~(makes[:, None] & before).any(-1)
    return Choice(torch.stack([share, dense, share | dense]), own)


def pattern_tiles(
    geometry: Geometry, slashes: Tensor, block: int, choice: Choice, heads: LayerHeads, pivots: Pivots | None
) -> Tensor:
    """bool ``[B, H, R, C]``: by choice the tiles of the cluster's pivot, all, or those of slashes ``[B, H, S]``."""
    codes = heads.codes(slashes.device)
    if kernels.serve(slashes):
        from . import kernels as gpu

        packed = None if pivots is None else pivots.packed
        return gpu.pattern_tiles(geometry, slashes, block, choice.flags, codes, packed)
    tiles = slash_tiles(geometry, slashes, block)
    if pivots is not None:
        tiles = torch.where(choice.share[..., None, None], pivots.pattern(codes.clamp(min=0) // 2), tiles)
    return tiles | choice.dense[..., None, None]


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
    x = by_block(probe, block // mask.tile_k)
    weight = real_rows(geometry, mask.tile_q)
    row = geometry.tiles(mask.tile_q) * mask.tile_q // block
    row = (row - geometry.first_tile(block)[:, None]).clamp(0, geometry.tile_rows(block) - 1)
    at = row[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    summed = x.new_zeros(*x.shape[:2], geometry.tile_rows(block), x.shape[3])
    summed.scatter_add_(2, at, x * weight[:, None, :, None])
    mean: Tensor = summed / real_rows(geometry, block).clamp(min=1)[:, None, :, None]
    return mean


def earlier(call: AttentionCall, memory: Memory, key: str) -> Pivots | None:
    """Pivots made before this call in this very call of the model; None where there are none.

    Before: in earlier layers, and in this one by heads before the call's, where it is a part of a longer call. A pivot
    holds a pattern for the query rows that it was made from. The next chunk of the prompt has other rows, and its own
    pivots: it shows by other sizes, or by the layers starting over.
    """
    pivots: Pivots | None = memory.get(key, None)
    if pivots is None or (call.layer, call.first_head) <= pivots.at or pivots.sizes != _sizes(call):
        return None
    return pivots


def renewed(
    call: AttentionCall, old: Pivots | None, clusters: int, heads: LayerHeads, choice: Choice, whole: Tensor,
    tiles: Tensor,
) -> Pivots:  # fmt: skip
    """`old`, or None, with the pivots of the heads that ran dense, where they are `whole`, bool ``[B, H]``: computed in
    full. tiles: bool ``[B, S, R, C]``, by open cluster."""
    own, which = choice.own, index(heads.open, choice.own.device)
    known = None if old is None else (old.made, old.last, old.packed)
    if kernels.serve(tiles):
        from . import kernels as gpu

        made, last, packed = gpu.updated(
            known, call.layer, clusters, heads.codes(own.device), which, choice.dense, whole, own, tiles
        )
    else:
        batch, _, rows, columns = tiles.shape
        made, last, packed = (x.clone() for x in known) if known else (
            torch.full((batch, clusters), NEVER, dtype=torch.int32, device=own.device),
            own.new_zeros(batch, clusters, columns),
            torch.zeros(batch, clusters, rows, -(-columns // 8), dtype=torch.uint8, device=own.device),
        )  # fmt: skip
        head, ran = heads.dense(choice.dense)
        fresh = ran & of_heads(whole, head)
        now = torch.where(fresh, call.layer, NEVER - 1 - call.layer)
        made[:, which] = torch.where(ran, now, made[:, which]).to(torch.int32)
        last[:, which] = torch.where(fresh[..., None], of_heads(own, head), last[:, which])
        packed[:, which] = torch.where(fresh[..., None, None], _pack(tiles), packed[:, which])
    return Pivots(_sizes(call), (call.layer, call.first_head), made, last, packed)


def _sizes(call: AttentionCall) -> tuple[int | None, ...]:
    """Sizes of the call, without its heads."""
    g = call.geometry
    return g.batch, g.q_len, g.kv_len, g.q_offset, g.window


def _pack(tiles: Tensor) -> Tensor:
    """uint8 ``[..., ceil(C / 8)]`` of bool ``[..., C]``."""
    bits = functional.pad(tiles, (0, -tiles.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=tiles.device)
    packed: Tensor = (bits * weights).sum(-1, dtype=torch.uint8)
    return packed
