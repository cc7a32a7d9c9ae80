"""Launcher of the kernels that sum the attention of sampled rows: four launches, no host synchronisation."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor

from sparseprefill.kernels.sampled.kernels import (
    sampled_fold_kernel,
    sampled_lse_kernel,
    sampled_mass_kernel,
    sampled_merge_kernel,
)
from sparseprefill.kernels.settings import FUSED, Settings, cdiv, power_of_two
from sparseprefill.kernels.source import Keys, strides
from sparseprefill.kernels.steps import LOG2E

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

WIDEST = 256
"""Largest head dimension."""
PROGRAMS = 1024
"""Programs that a launch should have, so that no multiprocessor waits long for the last."""

SHARES = 512 << 20
"""Bytes of the sums by key that samples of one round may hold."""


@lru_cache
def settings(capability: tuple[int, int], block_d: int, itemsize: int) -> tuple[Settings, Settings]:
    """By compute capability, head dimension, rounded up to a power of two, and bytes per element.

    Of the pass that sums exponentials and of the other, with the same rows (block_m) and keys (block_n) of a product.
    Two to three programs share a Hopper multiprocessor: one's exponentials overlap the other's products.
    """
    wide = block_d > 128
    if itemsize == 4:
        plain = Settings(32, 16 if wide else 32, warps=8, stages=2)
        return plain, plain
    few = Settings(64 if wide else 128, 64, warps=4, stages=2)
    # Three programs of four warps have 168 registers a thread.
    return few, evolve(few, maxnreg=168 if capability[0] == 9 and not wide else None)


def fits(call: AttentionCall) -> bool:
    """Whether the kernels can run this call; its device is for the caller to look at."""
    return call.q.dtype != torch.float64 and call.q.shape[-1] <= WIDEST


def sampled_mass(
    call: AttentionCall, rows: Tensor, real: Tensor, slash: int, column: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns ``[B, Hq, S, ceil(Nkv / column)]``, slashes ``[B, Hq, S, ceil(Nkv / slash)]``, lse ``[B, Hq, S, n]``.

    rows: int64 ``[B, S, n]``, real: bool ``[B, S, n]``; see `sparseprefill.statistics.sampled.sampled_mass`. All samples in one
    round of launches, or as many at a time as `SHARES` allows.
    """
    geometry = call.geometry
    chosen = settings(capability(call.q.device), block(call.q.shape[-1]), call.q.element_size())
    part = min(chosen[0].block_m, slash)
    one = geometry.batch * geometry.heads * cdiv(rows.shape[2], part) * 2 * geometry.kv_len * 4
    size = max(1, SHARES // one)
    if rows.shape[1] <= size:
        return _round(call, rows, real, slash, column, chosen, part)
    rounds = zip(rows.split(size, 1), real.split(size, 1), strict=True)
    found = [_round(call, some, exist, slash, column, chosen, part) for some, exist in rounds]
    columns, slashes, lse = (torch.cat(pieces, 2) for pieces in zip(*found, strict=True))
    return columns, slashes, lse


def _round(
    call: AttentionCall, rows: Tensor, real: Tensor, slash: int, column: int, chosen: tuple[Settings, Settings],
    part: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    geometry, (for_lse, for_mass) = call.geometry, chosen
    batch, samples, count = rows.shape
    heads, width, size = geometry.heads, call.q.shape[-1], geometry.kv_len
    q, keys = call.q if call.q.stride(-1) == 1 else call.q.contiguous(), Keys.of(call, passes=2)
    rows, real = rows.contiguous(), real.contiguous().view(torch.uint8)
    parts = cdiv(count, part)
    programs = batch * samples * heads * parts
    chunk = _chunk(size, programs, for_lse.block_n)
    chunks = cdiv(size, chunk)
    options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty(batch * samples * heads * chunks * count, **options)
    lse = torch.empty(batch, heads, samples, count, **options)
    shares = torch.empty(programs * 2 * chunks * chunk, **options)
    columns = torch.empty(batch, heads, samples, cdiv(size, column), **options)
    slashes = torch.empty(batch, heads, samples, cdiv(size, slash), **options)
    numbers = (
        *strides(q), *keys.strides, call.softmax_scale * LOG2E.value, call.softcap or 0.0,
        geometry.q_offset, size, count, heads, call.group, samples, parts, chunk, call.window or 0,
    )  # fmt: skip
    flags = {
        "ROWS": part, "BLOCK_R": block(part), "BLOCK_N": for_lse.block_n, "D": width, "BLOCK_D": block(width),
        "WINDOW": call.window is not None,
        "SOFTCAP": call.softcap is not None, "PAGE": keys.page, "PRECISION": "ieee",
    }  # fmt: skip
    grid = (programs, chunks)
    sampled_lse_kernel[grid](
        q, keys.k, keys.table, keys.scale, rows, real, geometry.starts, partial, *numbers, **flags, **for_lse.options
    )
    sampled_merge_kernel[batch * samples * heads, cdiv(count, 128)](
        partial, lse, count, chunks, heads, samples, BLOCK_C=32, BLOCK_R=128, **FUSED
    )
    sampled_mass_kernel[grid](
        q, keys.k, keys.table, keys.scale, rows, real, geometry.starts, lse, shares, *numbers,
        SLASH=slash, **flags, **for_mass.options,
    )  # fmt: skip
    runs = {f"{name}_{key}": x for name, run in (("COLUMN", column), ("SLASH", slash)) for key, x in _run(run)}
    blocks = cdiv(columns.shape[3], runs["COLUMN_BINS"]) + cdiv(slashes.shape[3], runs["SLASH_BINS"])
    sampled_fold_kernel[batch * samples * heads, blocks](
        shares, rows, geometry.starts, columns, slashes,
        geometry.q_offset, count, heads, samples, parts, chunks * chunk, columns.shape[3], slashes.shape[3],
        COLUMN=column, SLASH=slash, **runs, ROWS=part, **FUSED,
    )  # fmt: skip
    return columns, slashes, lse


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) in the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def block(size: int) -> int:
    """What a product needs to hold `size` rows or dimensions."""
    return max(16, power_of_two(size))


def _chunk(size: int, programs: int, keys: int) -> int:
    """Keys per program: long, as each begins with loading its rows, but no longer than gives `PROGRAMS` of them."""
    chunk = 2048
    while chunk > 4 * keys and cdiv(size, chunk) * programs < PROGRAMS:
        chunk //= 2
    return chunk


def _run(size: int) -> tuple[tuple[str, int], ...]:
    """Entries of a run that are loaded at once, and runs per program."""
    width = min(power_of_two(size), 1024)
    return ("WIDTH", width), ("BINS", 1024 // width)
