"""NaN and infinities in q, k and v: as dense attention for selected keys, nothing from the others."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attrs import evolve

from helpers.build import make
from sparseprefill.call import AttentionCall
from sparseprefill.executors.cpu import CpuExecutor
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Plan, Result

Run = Callable[[AttentionCall, SparseMask], Result]
CALL = make(24)
KEY = 9


@pytest.fixture(params=[ReferenceExecutor(), CpuExecutor()], ids=lambda one: type(one).__name__)
def run(request: pytest.FixtureRequest) -> Run:
    return lambda call, mask: request.param.execute(call, Plan(mask))


def with_key(name: str, value: float, channel: int = 3) -> AttentionCall:
    x = getattr(CALL, name).clone()
    x[:, :, KEY, channel] = value
    return evolve(CALL, **{name: x})


def leave_out() -> SparseMask:
    """Everything but column KEY, which stays on its diagonal."""
    keep = torch.ones(24, 24, dtype=torch.bool)
    keep[:, KEY] = False
    return SparseMask.from_tiles(CALL, keep, 1)


def dense(call: AttentionCall) -> torch.Tensor:
    """PyTorch's own attention of each row over the keys up to it (its causal mask lets NaN of later keys through)."""
    k, v = (x.expand(-1, 2, -1, -1) for x in (call.k, call.v))
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        rows = [attend(call.q[:, :, [i]], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(24)]
    return torch.cat(rows, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_reaches_the_rows_that_see_it_and_its_channel_alone(run: Run, value: float) -> None:
    call = with_key("v", value)
    out = run(call, SparseMask.full(CALL, 8)).out
    clean = run(CALL, SparseMask.full(CALL, 8)).out
    torch.testing.assert_close(out[..., :KEY, :], clean[..., :KEY, :])
    torch.testing.assert_close(out[..., KEY:, 3], torch.full((1, 2, 24 - KEY), value), equal_nan=True)
    torch.testing.assert_close(out[..., KEY:, 4], clean[..., KEY:, 4])


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unselected_key_reaches_no_row(run: Run, name: str, value: float) -> None:
    mask = leave_out()
    out, clean = run(with_key(name, value), mask), run(CALL, mask)
    others = [row for row in range(24) if row != KEY]
    torch.testing.assert_close(out.out[:, :, others], clean.out[:, :, others])
    torch.testing.assert_close(out.lse[:, :, others], clean.lse[:, :, others])


def test_nan_key_poisons_the_rows_that_see_it(run: Run) -> None:
    out = run(with_key("k", math.nan), SparseMask.full(CALL, 8)).out
    assert [row >= KEY for row in range(24)] == [bool(torch.isnan(out[0, 0, row]).all()) for row in range(24)]


def test_nan_query_poisons_its_own_row(run: Run) -> None:
    q = CALL.q.clone()
    q[0, 1, 5, 0] = math.nan
    out = run(evolve(CALL, q=q), SparseMask.full(CALL, 8)).out
    assert [[0, 1, 5]] == torch.nonzero(torch.isnan(out).any(-1)).tolist()


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_same_entries_are_finite_as_in_dense_attention(run: Run, name: str, value: float) -> None:
    call = with_key(name, value)
    expected, actual = dense(call), run(call, SparseMask.full(CALL, 8)).out
    assert torch.equal(torch.isnan(expected), torch.isnan(actual))
    rest = ~torch.isnan(expected)
    torch.testing.assert_close(actual[rest], expected[rest])


@pytest.mark.parametrize("window", [None, 5])
def test_products_that_overflow_stay_with_the_rows_that_see_them(run: Run, window: int | None) -> None:
    """q.k of the last key is beyond float32: rows before it are as without it."""
    k = CALL.k.clone()
    k[:, :, -1] = 1e30
    call = evolve(CALL, q=CALL.q.abs() * 1e9, k=k, window=window)
    out = run(call, SparseMask.full(call, 8)).out
    clean = run(evolve(CALL, q=call.q, window=window), SparseMask.full(evolve(CALL, window=window), 8)).out
    assert bool(torch.isfinite(out[:, :, :-1]).all())
    torch.testing.assert_close(out[:, :, :-1], clean[:, :, :-1])
