"""Algorithm 1's scores by two kernels, a part of the query tiles at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseprefill.kernels.groups.launch import GroupTiles
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.steps import LOG2E

from . import kernels
from .scores import PARTIALS

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


def tile_scores(call: AttentionCall, stride: int, block: int) -> Tensor:
    """float32 ``[B, Hq, R, C]``: see `scores.tile_scores`, all query tiles at once. Key tiles of the future get 0."""
    geometry, tiles = call.geometry, GroupTiles.of(call, block, stride)
    chosen, per = tiles.settings, block // stride
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    pairs, parts, step = geometry.batch * geometry.heads, chosen.block_n // per, chosen.block_m // per
    options: dict[str, Any] = {"dtype": torch.float32, "device": geometry.device}
    scores: Tensor = torch.empty(geometry.batch, geometry.heads, rows, columns, **options)
    most = pairs * chosen.block_m * tiles.reach(tiles.count - 1)
    size = min(max(1, PARTIALS // (most * parts)), tiles.count)
    sums = torch.empty(most * parts * size, **options)
    tops, totals = torch.empty(2, most * size, **options)
    flags = {"WINDOW": geometry.window is not None}
    cap = {"SOFTCAP": call.softcap is not None}
    scale, softcap, window = call.softmax_scale * LOG2E.value, call.softcap or 0.0, geometry.window or 0
    for first in range(0, tiles.count, size):
        some = range(first, min(first + size, tiles.count))
        height, reach = len(some) * chosen.block_m, tiles.reach(some[-1])
        place = (first * chosen.block_m, height, reach * parts, reach)
        for part in tiles.parts(some):
            kernels.partial_softmax_kernel[(part.programs,)](
                sums, tops, totals, *part.arguments, scale, softcap, window, *place,
                **part.flags, **flags, **cap, **chosen.options,
            )  # fmt: skip
        kernels.tile_scores_kernel[(min(rows, some.stop * step) - first * step, pairs)](
            scores, sums, tops, totals, geometry.starts, geometry.lengths,
            geometry.q_offset, geometry.q_len, geometry.kv_len, window, *place, geometry.heads, rows, columns,
            BLOCK=block, SIZE=stride, BLOCK_N=chosen.block_n, COLUMNS=256, PARTS=32, **flags, num_warps=4, **FUSED,
        )  # fmt: skip
    return scores
