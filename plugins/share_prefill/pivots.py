"""The pivots of one request: what clusters have learnt from their dense heads so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels

from .heads import index, of_heads

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory

    from .decide import Choice
    from .heads import LayerHeads

KEY = "share-prefill"
NEVER = 2**31 - 1


@frozen(eq=False)
class Pivots:
    """One pivot per batch row and cluster, made in some layer of one call of the model.

    sizes: of the call, without its heads. at: layer and first head of the last part that wrote. made: int32 ``[B, K]``,
    the layer that made each pivot, or NEVER. last: ``[B, K, C]``, block-averaged attention of the pivot head's last
    queries (the paper's a~). packed: uint8 ``[B, K, R, ceil(C / 8)]``, its pattern (M), a bit per tile: at a million
    tokens the patterns of a table of clusters would be gigabytes as bool maps.
    """

    sizes: tuple[int | None, ...]
    at: tuple[int, int]
    made: Tensor
    last: Tensor
    packed: Tensor

    @classmethod
    def none(cls, call: AttentionCall, shape: torch.Size, clusters: int, dtype: torch.dtype) -> Pivots:
        """No cluster has one. shape: ``[B, *, R, C]`` of their patterns."""
        batch, _, rows, columns = shape
        device = call.q.device
        return cls(
            _sizes(call),
            _at(call),
            torch.full((batch, clusters), NEVER, dtype=torch.int32, device=device),
            torch.zeros(batch, clusters, columns, dtype=dtype, device=device),
            torch.zeros(batch, clusters, rows, -(-columns // 8), dtype=torch.uint8, device=device),
        )

    @property
    def taken(self) -> Tensor:
        """bool ``[B, K]``: clusters that have a pivot, or get one in this layer."""
        return self.made != NEVER

    def ready(self, layer: int) -> Tensor:
        """bool ``[B, K]``: clusters whose pivot the heads of `layer` may use, as an earlier layer made it."""
        return self.made < layer

    def pattern(self, clusters: Tensor) -> Tensor:
        """bool ``[B, H, R, C]``: the patterns of the clusters of heads, int64 ``[H]``."""
        bits = torch.arange(8, dtype=torch.uint8, device=self.packed.device)
        tiles = (self.packed[:, clusters, :, :, None] >> bits) & 1
        return tiles.flatten(3)[..., : self.last.shape[2]].bool()

    def updated(self, call: AttentionCall, which: Tensor, made: Tensor, last: Tensor, tiles: Tensor) -> Pivots:
        """With the pivots of the clusters `which` (int64 ``[S]``) replaced where `made` (bool ``[B, S]``)."""
        layers, old_last, old_packed = self.made.clone(), self.last.clone(), self.packed.clone()
        layers[:, which] = torch.where(made, call.layer, self.made[:, which])
        old_last[:, which] = torch.where(made[..., None], last, self.last[:, which])
        old_packed[:, which] = torch.where(made[..., None, None], _pack(tiles), self.packed[:, which])
        return evolve(self, at=_at(call), made=layers, last=old_last, packed=old_packed)


def renewed(
    call: AttentionCall, old: Pivots | None, clusters: int, heads: LayerHeads, choice: Choice, tiles: Tensor
) -> Pivots:
    """`old`, or None, with the pivots of the heads that ran dense. tiles: bool ``[B, S, R, C]``, by open cluster."""
    own = choice.own
    if kernels.serve(tiles):
        from .fused import updated

        return Pivots(_sizes(call), _at(call), *updated(old, call.layer, clusters, heads, choice.dense, own, tiles))
    if old is None:
        old = Pivots.none(call, tiles.shape, clusters, own.dtype)
    head, made = heads.dense(choice.dense)
    return old.updated(call, index(heads.open, own.device), made, of_heads(own, head), tiles)


def earlier(call: AttentionCall, memory: Memory) -> Pivots | None:
    """Pivots made before this call in this very call of the model; None where there are none.

    Before: in earlier layers, and in this one by heads before the call's, where it is a part of a longer call. A pivot
    holds a pattern for the query rows that it was made from. The next chunk of the prompt has other rows, and its own
    pivots: it shows by other sizes, or by the layers starting over.
    """
    pivots: Pivots | None = memory.get(KEY, None)
    if pivots is None or _at(call) <= pivots.at or pivots.sizes != _sizes(call):
        return None
    return pivots


def _at(call: AttentionCall) -> tuple[int, int]:
    return call.layer, call.first_head


def _sizes(call: AttentionCall) -> tuple[int | None, ...]:
    g = call.geometry
    return g.batch, g.q_len, g.kv_len, g.q_offset, g.window


def _pack(tiles: Tensor) -> Tensor:
    """uint8 ``[..., ceil(C / 8)]`` of bool ``[..., C]``."""
    bits = functional.pad(tiles, (0, -tiles.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=tiles.device)
    packed: Tensor = (bits * weights).sum(-1, dtype=torch.uint8)
    return packed
