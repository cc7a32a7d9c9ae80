"""Stage 1: which query rows are sampled, and which query tiles each sample speaks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.geometry import Geometry


@frozen(eq=False)
class Samples:
    """The chunks of a call, dealt in whole query tiles of each batch row's grid.

    part: int64 ``[B, R]``, the chunk of each query tile. rows: int64 ``[B, S, n]``, index of the sampled query rows of
    each chunk, the last ones of it. real: bool ``[B, S, n]``, which of them exist. until: for each chunk, a number of
    keys beyond which none of its rows looks.
    """

    part: Tensor
    rows: Tensor
    real: Tensor
    until: tuple[int, ...]

    @classmethod
    def of(cls, geometry: Geometry, block: int, chunk_n: int) -> Samples:
        """T query tiles go to `chunk_n` chunks: tile t to chunk ``t * chunk_n // T``; empty chunks sample nothing."""
        chunks = min(chunk_n, geometry.tile_rows(block))
        first = geometry.first_position()
        begin = first.clamp(min=0)
        end = torch.maximum(torch.minimum(first + geometry.q_len, geometry.key_counts()), begin)
        tile = torch.div(begin, block, rounding_mode="floor")
        tiles = (torch.div(end - 1, block, rounding_mode="floor") - tile + 1).clamp(min=1)[:, None]
        within = (geometry.tiles(block) - tile[:, None]).clamp(min=0)
        part = torch.div(torch.minimum(within, tiles - 1) * chunks, tiles, rounding_mode="floor")
        # Chunk c holds the tiles from ceil(c * T / chunks) on.
        edge = torch.div(
            torch.arange(chunks + 1, device=geometry.device) * tiles + chunks - 1, chunks, rounding_mode="floor"
        )
        edge = torch.minimum(torch.maximum((tile[:, None] + edge) * block, begin[:, None]), end[:, None])
        count = min(block, geometry.q_len)
        position = edge[:, 1:, None] - count + torch.arange(count, device=geometry.device)
        real = (position >= edge[:, :-1, None]) & (position < edge[:, 1:, None])
        rows = (position - first[:, None, None]).clamp(0, geometry.q_len - 1)
        return cls(part, rows, real, _reach(geometry, block, chunks))


def _reach(geometry: Geometry, block: int, chunks: int) -> tuple[int, ...]:
    """What the host knows about the last key of each chunk: everything, where no batch row is padded."""
    if geometry.starts is not None or geometry.lengths is not None:
        return (geometry.kv_len,) * chunks
    tiles = geometry.tile_rows(block)
    end = geometry.q_offset + geometry.q_len
    return tuple(min((geometry.q_offset // block + -(-(c + 1) * tiles // chunks)) * block, end) for c in range(chunks))
