"""The estimator of SampleAttention, and which query rows are sampled (stage 1). The executor is the shared one."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.geometry import Geometry, kept_by_sizes
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.sampled import sampled_mass
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import SampledPriority, slash_tiles

from . import SampleConfig
from .cra import SAMPLED, Sampled


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


@kept_by_sizes(lengths=True)
def dealt(geometry: Geometry, block: int, chunk_n: int) -> Samples:
    """T query tiles go to `chunk_n` chunks: tile t to chunk ``t * chunk_n // T``; empty chunks sample nothing."""
    chunks, count = min(chunk_n, geometry.tile_rows(block)), min(block, geometry.q_len)
    first, begin, stop = geometry.token_range()
    stop = torch.maximum(stop, begin)
    tile = (begin // block)[:, None]
    tiles = (((stop - 1) // block)[:, None] - tile + 1).clamp(min=1)
    within = (geometry.tiles(block) - tile).clamp(min=0)
    part = torch.minimum(within, tiles - 1) * chunks // tiles
    # Chunk c holds the tiles from ``ceil(c * T / chunks)`` on; the last edge is the end.
    number = torch.arange(chunks + 1, device=geometry.device) * tiles + chunks - 1
    edge = (tile + number // chunks) * block
    edge = torch.minimum(torch.maximum(edge, begin[:, None]), stop[:, None])
    position = edge[:, 1:, None] + torch.arange(-count, 0, device=edge.device)
    rows = (position - first[:, None, None]).clamp(0, geometry.q_len - 1)
    return Samples(part, rows, position >= edge[:, :-1, None], _reach(geometry, block, chunks))


def _reach(geometry: Geometry, block: int, chunks: int) -> tuple[int, ...]:
    """The host's knowledge of the last key of each chunk: everything, where no batch row is padded."""
    if geometry.starts is not None or geometry.lengths is not None:
        return (geometry.kv_len,) * chunks
    tiles = geometry.tile_rows(block)
    end = geometry.q_offset + geometry.q_len
    return tuple(min((geometry.q_offset // block + -(-(c + 1) * tiles // chunks)) * block, end) for c in range(chunks))


@frozen
class SampleEstimator:
    """Algorithm 1: sample each chunk's last rows, keep columns and diagonals up to both thresholds, merge them.

    It looks at the last rows of chunks of the call, so cutting a prompt changes the estimate: it has no grain.
    """

    config: SampleConfig
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.config.block)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of columns and diagonals; `Plan.notes` keeps what `cra` needs, the mass is left as priority."""
        config, block = self.config, self.config.block
        samples = dealt(call.geometry, block, config.chunk_n)
        mass = sampled_mass(call, samples.rows, samples.real, block, column=block, until=samples.until)
        columns, slashes = top_mass(mass.columns, config.alpha_c), top_mass(mass.slashes, config.alpha_s)
        part = samples.part
        speaks: Tensor | None = part
        if config.extend == "union":
            columns, slashes, part = columns.any(2, keepdim=True), slashes.any(2, keepdim=True), torch.zeros_like(part)
            speaks = None
        keep = slash_tiles(call.geometry, slashes, block, part, columns)
        notes = Sampled(samples.rows.flatten(1), samples.real.flatten(1), mass.lse.flatten(2))
        # The first tile of every row is kept as well as the diagonal one.
        tiles = TileMap(geometry=call.geometry, tile_q=block, tile_k=block, keep=keep, band=0, sink=1)
        priority = SampledPriority(mass, samples.real, block, column=block, part=speaks, by_column=True)
        mask = SparseMask(call.geometry, block, block, tiles)
        return Plan(mask, priority=priority, notes={SAMPLED: notes})


def pipeline(config: SampleConfig) -> Pipeline:
    """Build `sample-attention`."""
    return Pipeline(SampleEstimator(config), name="sample-attention")
