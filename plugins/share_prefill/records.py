"""What heads of a layer run, and the pivots of a request: records, with no device code behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

NEVER = 2**31 - 1
"""Layer of a pivot that is not made yet."""


@frozen(eq=False)
class Choice:
    """What each head runs, vertical-slash where neither flag is set.

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

    def of_whole(self, whole: Tensor) -> Choice:
        """The choice where of the dense heads only those count that were computed in full, bool ``[B, H]``."""
        dense = self.dense & whole
        return evolve(self, flags=torch.stack([self.share, dense, self.share | dense]))


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
            sizes_of(call),
            place_of(call),
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
        return evolve(self, at=place_of(call), made=layers, last=old_last, packed=old_packed)


def place_of(call: AttentionCall) -> tuple[int, int]:
    """Layer and first head."""
    return call.layer, call.first_head


def sizes_of(call: AttentionCall) -> tuple[int | None, ...]:
    """Sizes of the call, without its heads."""
    g = call.geometry
    return g.batch, g.q_len, g.kv_len, g.q_offset, g.window


def _pack(tiles: Tensor) -> Tensor:
    """uint8 ``[..., ceil(C / 8)]`` of bool ``[..., C]``."""
    bits = functional.pad(tiles, (0, -tiles.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=tiles.device)
    packed: Tensor = (bits * weights).sum(-1, dtype=torch.uint8)
    return packed
