"""The estimate in four launches: block scores, their softmax, top mass, tiles of the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.kernels.groups.launch import GroupTiles
from sparseprefill.kernels.settings import FUSED
from sparseprefill.statistics.select import top_mass

from . import kernels

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


def kept_tiles(
    call: AttentionCall, block: int, size: int, alpha: float, softcap: float | None, keep_mass: float, tile: int
) -> tuple[Tensor, Tensor]:
    """As `stages.kept_tiles`: bool ``[B, Hq, R, C]`` on tiles of `tile` tokens, and the masses of blocks, float32."""
    mass = block_scores(call, block, size)
    nonfinite = block_mass(call, mass, block, alpha, softcap)
    return block_tiles(call, top_mass(mass, keep_mass), nonfinite, block, tile), mass


def block_scores(call: AttentionCall, block: int, size: int) -> Tensor:
    """See `scores.block_scores`; only blocks that hold a causal pair are written."""
    geometry, tiles = call.geometry, GroupTiles.of(call, block, size)
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    scores = torch.empty(geometry.batch, geometry.heads, rows, columns, dtype=torch.float32, device=geometry.device)
    for part in tiles.parts(range(tiles.count)):
        kernels.block_scores_kernel[(part.programs,)](
            scores, *part.arguments, rows, columns, **part.flags, **tiles.settings.options
        )
    return scores


def block_mass(call: AttentionCall, scores: Tensor, block: int, alpha: float, softcap: float | None) -> Tensor:
    """Turns raw `scores` into masses, in place. Returns uint8 ``[B, Hq, R, L]``: blocks of a NaN or infinite score."""
    geometry, (batch, heads, rows, columns) = call.geometry, scores.shape
    nonfinite = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    kernels.block_mass_kernel[(rows, batch * heads)](
        scores, nonfinite, geometry.starts, geometry.lengths, alpha, softcap or 0.0,
        geometry.q_offset, geometry.q_len, geometry.kv_len, rows, columns, geometry.window or 0, heads,
        BLOCK=block, WIDTH=512, WINDOW=geometry.window is not None, SOFTCAP=softcap is not None, num_warps=4, **FUSED,
    )  # fmt: skip
    return nonfinite


def block_tiles(call: AttentionCall, top: Tensor, nonfinite: Tensor, block: int, tile: int) -> Tensor:
    """bool ``[B, Hq, R, C]`` on tiles of `tile` tokens: those of the blocks in `top` (bool) or `nonfinite` (uint8)."""
    geometry, (batch, heads, rows, columns) = call.geometry, top.shape
    tile_rows, tile_columns = geometry.tile_rows(tile), geometry.tile_columns(tile)
    keep = torch.empty(batch, heads, tile_rows, tile_columns, dtype=torch.bool, device=top.device)
    kernels.block_tiles_kernel[(tile_rows, batch * heads)](
        keep.view(torch.uint8), top.contiguous().view(torch.uint8), nonfinite, geometry.starts, geometry.q_offset,
        rows, columns, tile_rows, tile_columns, heads,
        BLOCK=block, TILE=tile, WIDTH=1024, num_warps=4, **FUSED,
    )  # fmt: skip
    return keep
