"""Kernels of sampled rows against plain PyTorch: LSE, columns, diagonals, and tile maps from both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.build import among
from kernels.device import CUDA, DEVICE, DTYPES
from sparseprefill import AttentionCall, build
from sparseprefill.kernels.sampled import diagonals
from sparseprefill.kernels.sampled import mass as sampled
from sparseprefill.statistics.sampled import SampledMass, last_rows, sampled_mass
from sparseprefill.statistics.slashes import slash_tiles

LENGTHS = (1, 16, 127, 128, 129, 251)


def rows_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call_of(
    q_len: int,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    width: int = 64,
    **fields: Any,
) -> AttentionCall:
    """On the CPU, two batch rows; logits spread over a few units, so that rows differ."""
    generator = torch.Generator().manual_seed(q_len + kv_len)
    q, k = (torch.randn(2, h, n, width, generator=generator) for h, n in ((heads[0], q_len), (heads[1], kv_len)))
    return AttentionCall((q * 2).to(dtype), k.to(dtype), k.to(dtype), **among(kv_len, fields))


def moved(call: AttentionCall) -> AttentionCall:
    here = {name: getattr(call, name) for name in ("q", "k", "v", "starts", "lengths")}
    there: dict[str, Any] = {name: x if x is None else x.to(DEVICE) for name, x in here.items()}
    return evolve(call, **there)


def by_kernel(call: AttentionCall, rows: Tensor, real: Tensor, slash: int, column: int) -> SampledMass:
    """rows, real ``[B, S, n]``."""
    found = sampled.sampled_mass(moved(call), rows.to(DEVICE), real.to(DEVICE), slash, column)
    return SampledMass(*(x.cpu() for x in found))


def check(call: AttentionCall, rows: Tensor, real: Tensor, slash: int, column: int) -> None:
    expected = sampled_mass(call, rows, real, slash, column=column)
    actual = by_kernel(call, rows, real, slash, column)
    for name in ("columns", "slashes", "lse"):
        torch.testing.assert_close(getattr(expected, name), getattr(actual, name), rtol=2e-5, atol=2e-5)


FIELDS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0},
    {"window": 50},
    {"starts": rows_of(0, 40)},
    {"lengths": rows_of(90, 7)},
    {"starts": rows_of(3, 0), "lengths": rows_of(60, 100), "window": 31},
]


SIZES = ((128, 128, 1), (16, 16, 16), (5, 7, 1), (64, 16, 1), (200, 200, 200), (40, 3, 9), (3, 1, 2))
"""Rows, tokens per diagonal, tokens per column."""


@settings(max_examples=100 if CUDA else 5)
@given(
    lengths=st.tuples(st.sampled_from(LENGTHS), st.sampled_from([0, 1, 77, 300])),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (4, 1), (8, 1), (4, 2)]),
    fields=st.sampled_from(FIELDS),
    sizes=st.sampled_from(SIZES),
)
@example(lengths=(700, 500), dtype=DTYPES[0], heads=(1, 1), fields={}, sizes=SIZES[0])
@example(lengths=(700, 1), dtype=DTYPES[1], heads=(2, 1), fields=FIELDS[-1], sizes=SIZES[5])
def test_last_rows_by_column_and_diagonal(
    lengths: tuple[int, int],
    dtype: torch.dtype,
    heads: tuple[int, int],
    fields: dict[str, Any],
    sizes: tuple[int, int, int],
) -> None:
    call = call_of(lengths[0], sum(lengths), dtype, heads, **fields)
    rows, real = last_rows(call, sizes[0])
    check(call, rows[:, None], real[:, None], sizes[1], sizes[2])


@pytest.mark.parametrize("width", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dimensions(dtype: torch.dtype, width: int) -> None:
    call = call_of(70, 200, dtype, width=width)
    rows, real = last_rows(call, 64)
    check(call, rows[:, None], real[:, None], 64, 1)


@pytest.mark.parametrize(("fields", "shares"), [({}, 1), ({}, 1 << 29), ({"starts": rows_of(0, 40)}, 1 << 29)])
def test_samples_along_the_call(fields: dict[str, Any], shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample sees other keys; one has no real row; a call behind a prefix, keys behind its rows."""
    monkeypatch.setattr(sampled, "SHARES", shares)
    call = call_of(150, 300, q_offset=90, **fields)
    rows = torch.stack([torch.arange(first, first + 16) for first in (0, 50, 134)]).expand(2, -1, -1)
    real = torch.gather(call.geometry.real_queries(), 1, rows.flatten(1)).view(rows.shape).clone()
    real[1, 1] = False
    check(call, rows, real, 16, 16)
    assert not by_kernel(call, rows, real, 16, 16).columns[1, :, 1].any()


def test_a_row_of_another_chunk_of_keys_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of keys, some of which a window hides, and one with no key at all."""
    monkeypatch.setattr(sampled, "PROGRAMS", 1 << 20)
    windows: list[dict[str, Any]] = [{}, {"window": 300}]
    for fields in windows:
        call = call_of(20, 1300, heads=(2, 1), q_offset=1000, **fields)
        rows, real = last_rows(call, 20)
        check(call, rows[:, None], real[:, None], 128, 1)


def test_nan_in_a_key_of_the_future_does_not_show() -> None:
    call = call_of(40, 200, q_offset=100)
    call.k[:, :, 140:] = torch.nan
    rows, real = last_rows(call, 16)
    assert all(
        bool(x.isfinite().all())
        for x in sampled.sampled_mass(moved(call), rows[:, None].to(DEVICE), real[:, None].to(DEVICE), 16, 1)
    )


@pytest.mark.parametrize("block", [16, 128, 7])
@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("fields", [{}, {"starts": rows_of(0, 60)}, {"q_offset": 30}])
def test_tiles_of_columns_and_diagonals(block: int, parts: int | None, fields: dict[str, Any]) -> None:
    geometry = call_of(500, 630, width=8, **fields).geometry
    there = moved(call_of(500, 630, width=8, **fields)).geometry
    generator = torch.Generator().manual_seed(block)
    shape = (2, 4, parts or 1, geometry.tile_columns(block))
    slashes, columns = (torch.rand(shape, generator=generator) < 0.1 for _ in range(2))
    part = None if parts is None else torch.randint(parts, (2, geometry.tile_rows(block)), generator=generator)
    own = None if part is None else part.to(DEVICE)
    for some in (None, columns):
        flat = [x if x is None or parts else x[:, :, 0] for x in (slashes, some)]
        expected = slash_tiles(geometry, flat[0], block, part, flat[1])  # type: ignore[arg-type]
        moved_columns = None if some is None else some.to(DEVICE)
        actual = diagonals.diagonal_tiles(there, slashes.to(DEVICE), block, own, moved_columns)
        assert torch.equal(expected, actual.cpu())


@pytest.mark.gpu
def test_nothing_recompiles_when_only_the_length_changes() -> None:
    from sparseprefill.kernels.sampled import mass as device_code

    kernels = (
        device_code.sampled_lse_kernel, device_code.sampled_merge_kernel, device_code.sampled_mass_kernel,
        device_code.sampled_fold_kernel, diagonals.diagonal_tiles_kernel,
    )  # fmt: skip
    compiled = []
    for length in (4096, 4097, 5000, 6144, 40000, 1):
        q, k, v = (torch.randn(1, h, length, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
        for name in ("sample-attention", "vertical-slash"):
            build(name)(q, k, v)
        compiled.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert len(set(compiled)) == 1, compiled
