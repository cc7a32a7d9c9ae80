"""The top-mass kernels against sorting, entry by entry: rows in registers and rows read piece by piece."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.device import CUDA, DEVICE
from sparseprefill.kernels.statistics import select
from sparseprefill.statistics.select import by_sorting, top_mass

SMALL = {"SIZES": ((4, 16, 1, 128), (8, 32, 1, 128)), "STREAM": (2, 64, 1, 128)}
"""Shapes in which the interpreter is quick: up to 64 and 256 entries in registers, 128 at a time."""


def made(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, columns, generator=source)
    if kind == "softmax":
        return (torch.randn(rows, columns, generator=source) * 4).softmax(-1)
    if kind == "ties":
        return torch.randint(0, 4, (rows, columns), generator=source).float()
    if kind == "wide":
        return torch.exp(torch.randn(rows, columns, generator=source) * 20)
    if kind == "huge":  # beyond what float32 can add up
        return x * 3e38
    if kind == "odd":  # denormal numbers, negative ones, zeros of both signs, NaN of both signs; a row of zeros
        x[0] *= 1e-40
        x[1, ::2] *= -1
        x[2, ::3], x[2, 1::3] = 0.0, -0.0
        x[3, ::2], x[3, -1] = torch.nan, -torch.nan
        x[4] = 0
    return x


def agree(scores: torch.Tensor, share: float, least: int, most: int | None) -> None:
    expected = by_sorting(scores, share, least, most)
    actual = select.top_mass_fwd(scores.to(DEVICE), share, least, most)
    assert torch.equal(expected, actual.cpu()), (share, least, most)


BOUNDS: tuple[tuple[int, int | None], ...] = ((0, None), (2, 4), (3, None), (7, 3), (0, 0))


@pytest.mark.parametrize("columns", [1, 63, 131, 300])
@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        *((kind, bounds) for kind in ("softmax", "odd") for bounds in BOUNDS),
        *((kind, bounds) for kind in ("ties", "wide", "huge") for bounds in BOUNDS[: 5 if CUDA else 2]),
    ],
    ids=str,
)
def test_entries_are_those_of_sorting(
    kind: str, columns: int, bounds: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(select, name, value)
    scores = made(kind, 5, columns)
    for share in (0.0, 0.9) if CUDA is False else (0.0, 0.3, 0.5, 0.9, 0.999, 1 - 2**-53):
        agree(scores, share, *bounds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32] + [torch.bfloat16] * CUDA, ids=str)
def test_other_types_and_strides(dtype: torch.dtype) -> None:
    scores = made("softmax", 6, 40).to(dtype).view(2, 3, 40).transpose(0, 1)[..., 1:39]
    agree(scores, 0.8, 0, None)
    agree(scores, 0.8, 2, 20)
    assert (0, 5) == tuple(select.top_mass_fwd(torch.zeros(0, 5, device=DEVICE), 0.5, 0, None).shape)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bounds", [(0, None), (3, None), (2, 4)], ids=str)
def test_no_share_of_infinity_is_kept(bounds: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    scores = made("softmax", 2, 100)
    scores[0, 50], scores[1, ::7] = torch.inf, torch.inf
    for sizes in (SMALL["SIZES"], ()):
        monkeypatch.setattr(select, "SIZES", sizes)
        agree(scores, 0.5, *bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softmax", "ties", "wide", "huge"])
@pytest.mark.parametrize("columns", [1, 127, 1024, 1025, 4096, 4097, 131_072, 1_048_576])
def test_long_rows_on_the_gpu(columns: int, kind: str) -> None:
    scores = made(kind, 3, columns).to(DEVICE)
    for share, least, most in ((0.5, 0, None), (0.9, 0, None), (0.99, 10, columns // 2 + 1), (0.0, 100, None)):
        assert torch.equal(by_sorting(scores, share, least, most), select.top_mass_fwd(scores, share, least, most))
    assert torch.equal(top_mass(scores.cpu(), 0.9), top_mass(scores, 0.9).cpu())


@pytest.mark.gpu
def test_lengths_within_a_size_share_one_compilation() -> None:
    compiled: list[Any] = []
    for columns in (32, 33, 500, 1000, 1024):
        select.top_mass_fwd(torch.rand(4, columns, device=DEVICE), 0.5 + columns * 1e-5, 0, None)
        compiled.append(sum(len(cache[0]) for cache in select.top_mass_rows_kernel.device_caches.values()))
    assert 1 == len(set(compiled))
