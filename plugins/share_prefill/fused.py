"""The launches of SharePrefill's kernels: two of the estimate, two of the observer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.kernels.sampled.strips import COLUMNS, ROWS
from sparseprefill.kernels.settings import cdiv, power_of_two

from . import kernels
from .decide import Choice
from .heads import index
from .pivots import NEVER

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

    from .config import ShareConfig
    from .heads import LayerHeads
    from .pivots import Pivots

CELLS = 2048
"""Scores of all heads in registers at once."""
PIVOT_ROWS = 8
"""Rows of a pivot's pattern that a program packs."""


def choose(
    geometry: Geometry, blocks: Tensor, count: int, heads: LayerHeads, pivots: Pivots | None, layer: int,
    config: ShareConfig, *, sums: bool,
) -> Choice:  # fmt: skip
    """`decide.choose` from float32 `blocks` ``[B, H, C]``; with `sums` those are mass that does not add up to 1 yet.

    count: sampled queries.
    """
    batch, number, columns = blocks.shape
    blocks = blocks.contiguous()
    own = torch.empty_like(blocks) if sums else blocks
    choice = torch.empty(3, batch, number, dtype=torch.bool, device=blocks.device)
    block_h = max(2, power_of_two(number))
    made, last = (None, None) if pivots is None else (pivots.made, pivots.last)
    kernels.choose_kernel[(batch,)](
        blocks, own, choice.view(torch.uint8), heads.codes(blocks.device), made, last,
        geometry.starts, geometry.lengths, float(config.tau), float(config.delta),
        geometry.q_offset, geometry.q_len, geometry.kv_len, count, geometry.window or 0,
        layer, batch, number, 1 if made is None else made.shape[1], columns,
        BLOCK=config.block, BLOCK_H=block_h, BLOCK_C=max(16, CELLS // block_h), NEVER=NEVER, SUMS=sums,
        HAS_PIVOTS=pivots is not None, HAS_STARTS=geometry.starts is not None,
        HAS_LENGTHS=geometry.lengths is not None, WINDOW=geometry.window is not None, num_warps=8,
    )  # fmt: skip
    return Choice(choice, own)


def pattern_tiles(
    geometry: Geometry, slashes: Tensor, block: int, choice: Choice, heads: LayerHeads, pivots: Pivots | None
) -> Tensor:
    """`decide.pattern_tiles`: bool ``[B, H, R, C]``."""
    batch, number, bins = slashes.shape
    rows, width = geometry.tile_rows(block), geometry.tile_columns(block)
    keep = torch.empty(batch, number, rows, width, dtype=torch.bool, device=slashes.device)
    packed = None if pivots is None else pivots.packed
    kernels.pattern_tiles_kernel[cdiv(width, COLUMNS), cdiv(rows, ROWS), batch * number](
        slashes.contiguous().view(torch.uint8), choice.flags.view(torch.uint8), heads.codes(slashes.device), packed,
        geometry.starts, keep.view(torch.uint8), geometry.q_offset, batch, number,
        1 if packed is None else packed.shape[1], bins, rows, width,
        BLOCK=block, BLOCK_R=ROWS, BLOCK_C=COLUMNS, HAS_PIVOTS=packed is not None,
        HAS_STARTS=geometry.starts is not None, num_warps=8,
    )  # fmt: skip
    return keep


def maker_maps(probe: Tensor, dense: Tensor, heads: LayerHeads) -> Tensor:
    """float32 ``[B, S, R, C]``: of a probe ``[B, H, R, C]`` the heads that run dense, by open cluster; 0 for none."""
    batch, number, rows, columns = probe.shape
    probe = probe if probe.stride(-1) == 1 else probe.contiguous()
    maps = torch.empty(batch, len(heads.open), rows, columns, dtype=probe.dtype, device=probe.device)
    kernels.pivot_maps_kernel[rows, len(heads.open), batch](
        probe, dense.view(torch.uint8), heads.codes(probe.device), index(heads.open, probe.device), maps,
        *probe.stride()[:3], number, rows, columns,
        BLOCK_H=power_of_two(number), BLOCK_C=1024, num_warps=4,
    )  # fmt: skip
    return maps


def updated(
    old: Pivots | None, layer: int, clusters: int, heads: LayerHeads, dense: Tensor, own: Tensor, tiles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """made, last and packed of `Pivots.updated`, from nothing where `old` is None. tiles: bool ``[B, S, R, C]``."""
    batch, slots, rows, columns = tiles.shape
    device = tiles.device
    made = torch.empty(batch, clusters, dtype=torch.int32, device=device)
    last = torch.empty(batch, clusters, columns, dtype=own.dtype, device=device)
    packed = torch.empty(batch, clusters, rows, cdiv(columns, 8), dtype=torch.uint8, device=device)
    before = (None, None, None) if old is None else (old.made, old.last, old.packed)
    kernels.pivot_update_kernel[cdiv(rows, PIVOT_ROWS), batch * clusters](
        dense.view(torch.uint8), heads.codes(device), index(heads.open, device), own,
        tiles.contiguous().view(torch.uint8), *before, made, last, packed, layer,
        own.shape[1], clusters, slots, rows, columns,
        BLOCK_H=power_of_two(own.shape[1]), BLOCK_S=power_of_two(slots), BLOCK_R=PIVOT_ROWS,
        BLOCK_W=64, NEVER=NEVER, HAS_OLD=old is not None, num_warps=4,
    )  # fmt: skip
    return made, last, packed
