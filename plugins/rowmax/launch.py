"""Columns that sampled rows keep, by kernels: some query tiles at a time, no host synchronisation."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from sparseprefill.call import AttentionCall
from sparseprefill.errors import frameless
from sparseprefill.kernels.family.chips import NONE, Chip, chip, multiprocessors
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import (
    FUSED,
    HALVES_ALONE,
    Settings,
    block,
    cdiv,
    power_of_two,
)
from sparseprefill.kernels.source import Keys, strides
from sparseprefill.kernels.steps import LOG2E

from . import RowMaxConfig, kernels
from .maxima import LINES, MAXIMA, Sampling, sampling

H100 = 132
"""Its multiprocessors."""
FEWEST, MOST_PARTS, ENDS = 8, 64, 12
"""Of programs that share the keys of their rows: key tiles of one at least, programs of a row at most, and the time
that each takes at its ends, in tiles (H200: at 8,192 tokens 46 us in 4 parts, 63 in 5, docs/performance.md)."""
ENTRIES, WIDEST = 8192, 512
"""Maxima that a program chooses from at once, and columns of one row."""
CHOOSERS = 2048
"""Programs that choose, of a launch that has columns for more: each reads its rows' sums once."""
FAILED: list[Exception] = []
"""Errors for which the kernel for Hopper does not work here; empty while it does."""


@cache
def settings(chip: Chip, block_d: int, itemsize: int) -> Settings:
    """By a chip's facts, head dimension, rounded up to a power of two, and bytes per element of a product's two
    sides. block_m: sampled rows, block_n: keys."""
    wide = block_d > 128
    if itemsize == 4:
        return Settings(32, 16, warps=8, stages=2)
    if block_d > HALVES_ALONE:
        return Settings(64, 64, warps=4, stages=2) if chip.large else Settings(32, 32, warps=4, stages=2)
    if not chip.large:
        return Settings(64 if wide else 128, 64, warps=4, stages=2)
    # Two programs share a Hopper multiprocessor: one's maxima overlap the other's products.
    cap = chip.registers if itemsize == 1 else None
    return Settings(128, 64 if wide else 128, warps=8, stages=4 - itemsize, maxnreg=cap)


def in_8_bits(call: AttentionCall, precision: str) -> bool:
    """True if products are of e4m3: where that is not ruled out, and the device, the type and the size allow it."""
    fits = call.q.element_size() == 2 and block(call.q.shape[3]) >= 32
    return precision != "exact" and fits and chip(call.q.device).e4m3


def remark(call: AttentionCall, config: RowMaxConfig) -> str:
    """Reason for which the portable kernel chooses where the one for Hopper would; empty elsewhere."""
    return _unserved(config) if _for_hopper(call, config) else ""


def _unserved(config: RowMaxConfig) -> str:
    """Reason for which the kernel for Hopper does not serve calls that it could serve; empty where it does."""
    if config.column < kernels.NARROWEST:
        served = f"columns of {kernels.NARROWEST} keys or more"
        return f"rowmax's kernel for Hopper takes {served}: the portable one serves width={config.column}"
    if not FAILED:
        return ""
    error = FAILED[0]
    return f"rowmax's kernel for Hopper does not work here, the portable one serves: {type(error).__name__}: {error}"


def kept_tiles(call: AttentionCall, config: RowMaxConfig, *, apart: bool = False) -> Tensor:
    """bool ``[B, h, R, C]``: see `stages.RowMaxEstimator.kept`."""
    return _chosen(call, config, torch.bool, apart=apart)


def tile_shares(call: AttentionCall, config: RowMaxConfig) -> Tensor:
    """float32 ``[B, h, R, C]``: see `stages.RowMaxEstimator.shares`."""
    return _chosen(call, config, torch.float32)


def _chosen(call: AttentionCall, config: RowMaxConfig, dtype: torch.dtype, *, apart: bool = False) -> Tensor:
    geometry, tile, which = call.geometry, config.block, sampling(config, call.group)
    width, each = config.column, tile // config.column
    rows, columns, per = geometry.tile_rows(tile), geometry.tile_columns(width), tile // which.stride
    union, group, pairs = config.union == "group", call.group, geometry.batch * geometry.heads
    q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
    keys, factors = _rounded(call, tile) if in_8_bits(call, config.precision) else (Keys.of(call), None)
    used = settings(chip(q.device), block(q.shape[3]), q.element_size() if factors is None else 1)
    height = used.block_m
    shared = config.shares_strong and dtype == torch.bool
    members, lines = power_of_two(group) if union or shared else 1, power_of_two(per)
    units = geometry.batch * (call.kv_heads if union or shared else geometry.heads)
    heads = call.kv_heads if union else geometry.heads
    chosen = torch.empty(geometry.batch, heads, rows, columns, dtype=dtype, device=q.device)
    least, times, strong = (math.log2(x) if x > 0.0 else -math.inf for x in (config.eps, config.times, config.strong))
    before, unit = geometry.q_offset // tile, math.lcm(per, height) // per
    kind = torch.float32 if factors is None else torch.float16
    room = 4 * MAXIMA // kind.itemsize // (pairs * each * per)  # of query tiles by key tiles
    goes = list(_goes(rows, before, geometry.tile_columns(tile), room, unit))
    most = max(cdiv(count * per, height) * height * behind for _, count, behind in goes)
    maxima = torch.empty(pairs * most * each, dtype=kind, device=q.device)
    sizes = (geometry.q_offset, geometry.q_len, geometry.kv_len, geometry.window or 0)
    at_once = max(16, min(WIDEST, ENTRIES // (members * lines)))
    for first, count, behind in goes:
        blocks = cdiv(count * per, height)
        seen = tuple(min(before + first + cdiv(end * height, per), behind) for end in range(2, blocks + 2, 2))
        parts = _parts(seen, pairs, _at_once(q.device))
        place = (geometry.heads, group, call.first_head, first, blocks, behind * each)
        sums = torch.empty(pairs * blocks * parts * height, dtype=torch.float32, device=q.device)
        numbers = (*sizes, *place, geometry.tile_columns(tile), cdiv(behind, parts))
        _find(call, config, which, used, q, keys, factors, maxima, sums, numbers, parts)
        enqueue(kernels.choose_kernel, (count, units, min(cdiv(columns, at_once), cdiv(CHOOSERS, count * units))),
            chosen.view(torch.int8) if dtype == torch.bool else chosen, maxima, sums, call.sinks, geometry.starts,
            geometry.lengths, least, times, strong, *sizes, *place, rows, columns, each * int(config.sink), parts,
            APART=apart, MEMBERS=members, UNION=union, SHARED=shared, ROWS=lines, COLUMNS=at_once, BLOCK=tile,
            WIDTH=width, EVERY=which.stride, SHIFT=which.shift, BLOCK_M=height, WINDOW=geometry.window is not None,
            PACKED=factors is not None and chip(q.device).capability != NONE, num_warps=4, **FUSED,
        )  # fmt: skip
    return chosen


def _goes(rows: int, before: int, keys: int, room: int, unit: int) -> Iterator[tuple[int, int, int]]:
    """The query tiles of one launch after another: the first, how many, and the key tiles that they may see, of `keys`.

    before: key tiles before the first one. room: of a launch, query tiles by key tiles; at least `unit` query tiles.
    """
    first = 0
    while first < rows:
        seen = before + first
        count = (math.isqrt(seen * seen + 4 * room) - seen) // 2  # count * (seen + count) <= room
        count = min(max(count // unit, 1) * unit, rows - first)
        yield first, count, min(seen + count, keys)
        first += count


def _at_once(device: torch.device) -> int:
    """Programs that run at once; in Triton's interpreter one after another, of which as many are made."""
    return multiprocessors(device) if device.type == "cuda" else H100


@cache
def _parts(seen: tuple[int, ...], heads: int, programs: int) -> int:
    """Programs among which the key tiles of the same rows are shared, so that the launch is over soonest.

    seen: key tiles of each two blocks of a head, which are a program's. programs: that run at once.
    """
    behind = max(seen)

    def length(parts: int) -> float:
        """Key tiles that pass until the last program is done, what each takes at its ends among them."""
        each = cdiv(behind, parts)
        made = heads * sum(cdiv(tiles, each) for tiles in seen)  # others see no key
        if made <= programs:
            return each + ENDS
        return (heads * sum(seen) + made * ENDS) / programs + (each + ENDS) / 2  # half of the last round idles

    return min(range(1, max(1, min(MOST_PARTS, behind // FEWEST)) + 1), key=length)


def _find(
    call: AttentionCall, config: RowMaxConfig, which: Sampling, used: Settings, q: Tensor, keys: Keys,
    factors: Tensor | None, maxima: Tensor, sums: Tensor, sizes: tuple[int, ...], parts: int,
) -> None:  # fmt: skip
    """Fill `maxima` and `sums` of some query tiles.

    used: by the portable kernel. factors: by key tile, of rounded keys; else None. sizes: what kernels are told of the
    tiles, see `kernels.RUNTIME`.
    """
    geometry, size = call.geometry, q.shape[3]
    pairs, blocks = geometry.batch * geometry.heads, sizes[8]
    numbers = (call.softmax_scale * LOG2E.value, call.softcap or 0.0, *sizes)
    flags = {
        "EVERY": which.stride,
        "SHIFT": which.shift,
        "D": size,
        "BLOCK_D": block(size),
        "SOFTCAP": call.softcap is not None,
    }
    hopper = _module() if _for_hopper(call, config) and not _unserved(config) else None
    if hopper is not None:
        try:
            enqueue(hopper.hopper_maxima_kernel, (pairs * cdiv(blocks, 2), parts),
                maxima, sums, q, factors, hopper.descriptor(keys.k), geometry.starts, geometry.lengths,
                *strides(q), *numbers, **hopper.layouts(config.column), **flags, **hopper.OPTIONS,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError) as error:
            _fail(error)
        else:
            return
    enqueue(kernels.maxima_kernel, (pairs * blocks, parts),
        maxima, sums, q, keys.k, keys.table, keys.scale, factors, geometry.starts, geometry.lengths,
        *strides(q), *keys.strides, *numbers,
        BLOCK=config.block, WIDTH=config.column, BLOCK_M=used.block_m,
        BLOCK_N=min(used.block_n, block(config.block)),
        WINDOW=geometry.window is not None, PRECISION="ieee",
        PACKED=factors is not None and chip(q.device).capability != NONE, **flags, **keys.flags, **used.options,
    )  # fmt: skip


def _for_hopper(call: AttentionCall, config: RowMaxConfig) -> bool:
    """True if the kernel for Hopper can serve a call."""
    narrow = block(call.q.shape[3]) <= 128 and call.q.shape[3] >= 64
    plain = call.geometry.window is None and config.block == kernels.HOPPER_TILE and narrow
    return plain and chip(call.q.device).wgmma and in_8_bits(call, config.precision)


@cache
def _module() -> Any:
    """The module of the kernel for Hopper; None where it cannot be imported."""
    # Gluon is experimental: names come and go with Triton's versions.
    try:
        from . import hopper
    except (ImportError, AttributeError) as error:
        return _fail(error)
    return hopper


def _fail(error: Exception) -> None:
    """From now on the portable kernel serves, which one warning says."""
    FAILED.append(frameless(error))
    text = "rowmax's kernel for Hopper does not work with triton %s; the portable one serves instead: %s"
    logging.getLogger(__name__).warning(text, triton.__version__, error)


def _rounded(call: AttentionCall, tile: int) -> tuple[Keys, Tensor]:
    """A copy of the keys in e4m3, by position on each batch row's grid, and the factors of its tiles."""
    geometry, keys = call.geometry, Keys.of(call, passes=2)
    batch, columns, size = geometry.batch, geometry.tile_columns(tile), call.q.shape[3]
    rounded = torch.empty(batch, call.kv_heads, columns * tile, size, dtype=torch.float8_e4m3fn, device=call.q.device)
    factors = torch.empty(batch, call.kv_heads, columns, dtype=torch.float32, device=call.q.device)
    enqueue(kernels.round_keys_kernel, (columns, batch * call.kv_heads),
        rounded, factors, keys.k, keys.table, keys.scale, geometry.starts, geometry.lengths, *keys.strides,
        geometry.q_offset, geometry.q_len, geometry.kv_len, call.kv_heads, columns,
        BLOCK=tile, BLOCK_N=min(LINES // cdiv(block(size), 128), block(tile)), D=size, BLOCK_D=block(size),
        **keys.flags, num_warps=8, **FUSED,
    )  # fmt: skip
    return Keys(rounded), factors
