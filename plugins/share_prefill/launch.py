"""The launches of SharePrefill's kernels: two of the estimate, two of the observer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.kernels.sampled.diagonals import COLUMNS, ROWS
from sparseprefill.kernels.settings import FUSED, cdiv, power_of_two

from . import kernels
from .heads import NEVER

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

CELLS = 2048
"""Scores of all heads in registers at once."""
PIVOT_ROWS = 8
"""Rows of a pivot's pattern that a program packs."""


def choose(
    geometry: Geometry, blocks: Tensor, count: int, codes: Tensor, pivots: tuple[Tensor, Tensor] | None, layer: int,
    block: int, tau: float, delta: float, *, sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Flags and own of `pivots.choose`'s `Choice`, from float32 `blocks` ``[B, H, C]``.

    count: sampled queries. codes: of `LayerHeads`. pivots: `made` and `last` of `Pivots`. sums: whether `blocks` are
    mass that does not add up to 1 yet.
    """
    batch, number, columns = blocks.shape
    blocks = blocks.contiguous()
    own = torch.empty_like(blocks) if sums else blocks
    flags = torch.empty(3, batch, number, dtype=torch.bool, device=blocks.device)
    block_h = max(2, power_of_two(number))
    made, last = pivots or (None, None)
    kernels.choose_kernel[(batch,)](
        blocks, own, flags.view(torch.uint8), codes, made, last,
        geometry.starts, geometry.lengths, float(tau), float(delta),
        geometry.q_offset, geometry.q_len, geometry.kv_len, count, geometry.window or 0,
        layer, batch, number, 1 if made is None else made.shape[1], columns,
        BLOCK=block, BLOCK_H=block_h, BLOCK_C=max(16, CELLS // block_h), NEVER=NEVER, SUMS=sums,
        WINDOW=geometry.window is not None, num_warps=8, **FUSED,
    )  # fmt: skip
    return flags, own


def pattern_tiles(
    geometry: Geometry, slashes: Tensor, block: int, flags: Tensor, codes: Tensor, packed: Tensor | None
) -> Tensor:
    """`pivots.pattern_tiles`: bool ``[B, H, R, C]``. flags: of `Choice`. packed: of `Pivots`."""
    batch, number, bins = slashes.shape
    rows, width = geometry.tile_rows(block), geometry.tile_columns(block)
    keep = torch.empty(batch, number, rows, width, dtype=torch.bool, device=slashes.device)
    kernels.pattern_tiles_kernel[cdiv(width, COLUMNS), cdiv(rows, ROWS), batch * number](
        slashes.contiguous().view(torch.uint8), flags.view(torch.uint8), codes, packed,
        geometry.starts, keep.view(torch.uint8), geometry.q_offset, batch, number,
        1 if packed is None else packed.shape[1], bins, rows, width,
        BLOCK=block, BLOCK_R=ROWS, BLOCK_C=COLUMNS, num_warps=8, **FUSED,
    )  # fmt: skip
    return keep


def maker_maps(probe: Tensor, dense: Tensor, codes: Tensor, which: Tensor) -> Tensor:
    """``[B, S, R, C]``: of a probe ``[B, H, R, C]`` the heads that run dense, by open cluster `which`; 0 for none."""
    batch, number, rows, columns = probe.shape
    probe = probe if probe.stride(-1) == 1 else probe.contiguous()
    slots = which.shape[0]
    maps = torch.empty(batch, slots, rows, columns, dtype=probe.dtype, device=probe.device)
    kernels.pivot_maps_kernel[rows, slots, batch](
        probe, dense.view(torch.uint8), codes, which, maps, *probe.stride()[:3], number, rows, columns,
        BLOCK_H=power_of_two(number), BLOCK_C=1024, num_warps=4, **FUSED,
    )  # fmt: skip
    return maps


def updated(
    old: tuple[Tensor, Tensor, Tensor] | None, layer: int, clusters: int, codes: Tensor, which: Tensor, dense: Tensor,
    own: Tensor, tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """made, last and packed of `pivots.renewed`, from `old` ones or nothing. tiles: bool ``[B, S, R, C]``."""
    batch, slots, rows, columns = tiles.shape
    device = tiles.device
    made = torch.empty(batch, clusters, dtype=torch.int32, device=device)
    last = torch.empty(batch, clusters, columns, dtype=own.dtype, device=device)
    packed = torch.empty(batch, clusters, rows, cdiv(columns, 8), dtype=torch.uint8, device=device)
    kernels.pivot_update_kernel[cdiv(rows, PIVOT_ROWS), batch * clusters](
        dense.view(torch.uint8), codes, which, own,
        tiles.contiguous().view(torch.uint8), *(old or (None, None, None)), made, last, packed, layer,
        own.shape[1], clusters, slots, rows, columns,
        BLOCK_H=power_of_two(own.shape[1]), BLOCK_S=power_of_two(slots), BLOCK_R=PIVOT_ROWS,
        BLOCK_W=64, NEVER=NEVER, num_warps=4, **FUSED,
    )  # fmt: skip
    return made, last, packed
