"""Stage 1: which query rows are sampled, and which query tiles each sample speaks for."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.kept import kept


@frozen(eq=False)
class Samples:
    """The chunks of a call, dealt in whole query tiles of each batch row's grid.

    part: int64 ``[B, R]``, the chunk of each query tile. rows: int64 ``[B, S, n]``, index of the sampled query rows of
    each chunk, the last ones of it. real: bool ``[B, S, n]``, which of them exist. until: for each chunk, a number of
    keys beyond which none of its rows looks. Not to be written to: without padding they serve every layer.
    """

    part: Tensor
    rows: Tensor
    real: Tensor
    until: tuple[int, ...]

    @classmethod
    def of(cls, geometry: Geometry, block: int, chunk_n: int) -> Samples:
        """T query tiles go to `chunk_n` chunks: tile t to chunk ``t * chunk_n // T``; empty chunks sample nothing."""
        chunks, count = min(chunk_n, geometry.tile_rows(block)), min(block, geometry.q_len)
        if geometry.starts is None and geometry.lengths is None:
            return _plain(geometry.batch, geometry.q_len, geometry.q_offset, block, chunk_n, geometry.device)
        at = geometry.first_position()
        begin = at.clamp(min=0)
        stop = torch.maximum(torch.minimum(at + geometry.q_len, geometry.key_counts()), begin)
        tile = torch.div(begin, block, rounding_mode="floor")
        tiles = (torch.div(stop - 1, block, rounding_mode="floor") - tile + 1).clamp(min=1)[:, None]
        within = (geometry.tiles(block) - tile[:, None]).clamp(min=0)
        part = torch.div(torch.minimum(within, tiles - 1) * chunks, tiles, rounding_mode="floor")
        edge = (tile[:, None] + _edges(chunks, tiles, geometry.device)) * block
        edge = torch.minimum(torch.maximum(edge, begin[:, None]), stop[:, None])
        return cls(part, *_last(edge, count, at[:, None, None], geometry.q_len), _reach(geometry, block, chunks))


@kept
def _plain(batch: int, q_len: int, q_offset: int, block: int, chunk_n: int, device: torch.device) -> Samples:
    """Without padding: every batch row alike, known on the host, and the same in every layer."""
    geometry = Geometry(batch, 1, q_len, q_offset + q_len, q_offset, device)
    rows = geometry.tile_rows(block)
    chunks = min(chunk_n, rows)
    part = torch.arange(rows, device=device) * chunks // rows
    edge = _edges(chunks, rows, device)[None] + q_offset // block
    index, real = _last((edge * block).clamp(q_offset, q_offset + q_len), min(block, q_len), q_offset, q_len)
    part, index, real = part.repeat(batch, 1), index.repeat(batch, 1, 1), real.repeat(batch, 1, 1)
    return Samples(part, index, real, _reach(geometry, block, chunks))


def _edges(chunks: int, tiles: Tensor | int, device: torch.device) -> Tensor:
    """First tile of each chunk, and the end of the last: chunk c holds the tiles from ``ceil(c * T / chunks)`` on."""
    number = torch.arange(chunks + 1, device=device) * tiles + chunks - 1
    return torch.div(number, chunks, rounding_mode="floor")


def _last(edge: Tensor, count: int, first: Tensor | int, q_len: int) -> tuple[Tensor, Tensor]:
    """The last `count` rows before each edge ``[B, S + 1]`` but the first: their index, and whether they exist."""
    position = edge[:, 1:, None] + torch.arange(-count, 0, device=edge.device)
    return (position - first).clamp(0, q_len - 1), position >= edge[:, :-1, None]


def _reach(geometry: Geometry, block: int, chunks: int) -> tuple[int, ...]:
    """What the host knows about the last key of each chunk: everything, where no batch row is padded."""
    if geometry.starts is not None or geometry.lengths is not None:
        return (geometry.kv_len,) * chunks
    tiles = geometry.tile_rows(block)
    end = geometry.q_offset + geometry.q_len
    return tuple(min((geometry.q_offset // block + -(-(c + 1) * tiles // chunks)) * block, end) for c in range(chunks))
