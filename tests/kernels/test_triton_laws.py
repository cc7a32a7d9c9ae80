"""The Triton executor by hypothesis: the same as the reference for any call and mask, chunk by chunk, key by key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.device import BOUNDS, CUDA, DEVICE, DTYPES
from sparseprefill import AttentionCall, Carry, Plan, ReferenceExecutor, SparseMask, UnsupportedCallError, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import calls, masks, tensors
from sparseprefill.testing.kernels import paged

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON, REFERENCE = TritonExecutor(), ReferenceExecutor()
FEW = settings(max_examples=40 if CUDA else 6)
SIZES = (16, 32, 64) if CUDA else (16, 32)
some_calls = calls(
    max_batch=2, max_heads=4, head_dims=(64,), max_len=200 if CUDA else 40, dtypes=DTYPES, device=DEVICE
)  # fmt: skip


@FEW
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    call = data.draw(some_calls)
    mask = data.draw(masks(call, tiles=SIZES))
    probe = torch.ones(call.q.shape[:2], dtype=torch.bool, device=DEVICE)
    probe[0, 0] = False
    expected, actual = (executor.execute(call, Plan(mask, probe=probe)) for executor in (REFERENCE, TRITON))
    if float(expected.out.double().norm()) > 0:
        assert output_error(actual.out, expected.out) <= 2 * BOUNDS[call.q.dtype]
    assert torch.equal(expected.lse == -torch.inf, actual.lse == -torch.inf)
    assert torch.allclose(expected.lse, actual.lse, atol=2e-3)
    assert expected.probe is not None
    assert actual.probe is not None
    assert torch.allclose(expected.probe, actual.probe, atol=2e-3)


DIMS = ((192, 128), (192, 192), (512, 512))


@FEW
@given(st.data())
def test_values_of_another_size_and_wide_heads_equal_the_reference(data: st.DataObject) -> None:
    """Whatever the call has: output and LSE, cut in two by a carry, and left unnormalised."""
    call = data.draw(calls(max_batch=2, max_heads=2, head_dims=DIMS, max_len=40, dtypes=[torch.float16], device=DEVICE))
    mask = data.draw(masks(call, tiles=SIZES))
    below = torch.zeros(call.q.shape[0], device=DEVICE) if data.draw(st.booleans(), label="votes") else None
    expected = REFERENCE.execute(call, Plan(mask))
    first = SparseMask.from_rules(call.geometry, (mask.tile_q, mask.tile_k), sink=1)
    state = TRITON.accumulate(call, Plan(first))
    whole = REFERENCE.execute(call, Plan(first | mask))
    for want, made in (
        (expected, TRITON.execute(call, Plan(mask, skip_below=below))),
        (whole, TRITON.execute(call, Plan(mask - first, Carry(state, first)))),
    ):
        assert made.out.shape == (*call.q.shape[:3], call.value_dim)
        if float(want.out.double().norm()) > 0:
            assert output_error(made.out, want.out) <= 2 * BOUNDS[torch.float16]
        assert torch.equal(want.lse == -torch.inf, made.lse == -torch.inf)
        assert torch.allclose(want.lse, made.lse, atol=4e-3)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_pages_hold_values_of_another_size(dims: tuple[int, int]) -> None:
    """Alone, and two requests of one launch."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 40, "kv_len": 90, "device": DEVICE}
    q, k, _ = tensors("random", head_dim=dims[0], dtype=torch.float16, **sizes)
    _, _, v = tensors("random", head_dim=dims[1], dtype=torch.float16, **sizes)
    call = AttentionCall(q, k, v)
    mask = SparseMask.full(call, 32)
    wanted = REFERENCE.execute(call, Plan(mask))
    of_pages = paged(call)
    rows = torch.cat([q, q], 2).transpose(1, 2).contiguous().transpose(1, 2)
    two = [evolve(of_pages, q=part) for part in rows.split(40, 2)]
    for made in (TRITON.execute(of_pages, Plan(mask)), *TRITON.execute_many(two, [Plan(mask)] * 2)):
        assert output_error(made.out, wanted.out) <= 2 * BOUNDS[torch.float16]


@FEW
@given(st.data())
def test_cutting_queries_anywhere_changes_nothing(data: st.DataObject) -> None:
    call = data.draw(calls(max_batch=1, max_heads=2, head_dims=(64,), max_len=60, min_len=2, device=DEVICE))
    q_len, offset = call.q.shape[2], call.geometry.q_offset
    cut = data.draw(st.integers(0, q_len))
    whole = TRITON.execute(call, Plan(SparseMask.full(call, 16)))
    for first, last in ((0, cut), (cut, q_len)):
        if first == last:
            continue
        part = evolve(call, q=call.q[:, :, first:last], q_offset=offset + first)
        result = TRITON.execute(part, Plan(SparseMask.full(part, 16)))
        assert torch.allclose(whole.out[:, :, first:last], result.out, atol=1e-5)
        assert torch.allclose(whole.lse[:, :, first:last], result.lse, atol=1e-5)


def test_nan_and_infinity_reach_only_rows_that_see_them() -> None:
    q, k, v = (torch.randn(1, h, 100, 64, device=DEVICE) for h in (2, 1, 1))
    k[:, :, 60], v[:, :, 50], v[:, :, 70, 3], v[:, :, 20, 1] = math.nan, math.nan, math.inf, -math.inf
    call = AttentionCall(q, k, v)
    keep = torch.zeros(1, 1, call.geometry.tile_rows(32), 100, dtype=torch.bool, device=DEVICE)
    keep[..., 3], keep[..., 20] = True, True
    for mask in (SparseMask.full(call, 32), SparseMask.from_stripes(call, keep, tile=32)):
        expected, actual = (executor.execute(call, Plan(mask)).out for executor in (REFERENCE, TRITON))
        assert torch.allclose(expected, actual, atol=1e-4, equal_nan=True)
        state = TRITON.accumulate(call, Plan(mask))
        assert torch.allclose(expected, state.finish()[0], atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("head dimension", lambda: AttentionCall(*(torch.randn(1, 1, 20, 48, device=DEVICE),) * 3)),
        ("float64", lambda: AttentionCall(*(torch.randn(1, 1, 20, 64, device=DEVICE, dtype=torch.float64),) * 3)),
        ("power of two", lambda: AttentionCall(*(torch.randn(1, 1, 20, 64, device=DEVICE),) * 3)),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(field: str, make: object) -> None:
    call = make()  # type: ignore[operator]
    with pytest.raises(UnsupportedCallError, match=field):
        TRITON.execute(call, Plan(SparseMask.full(call, 24)))


@pytest.mark.skipif(CUDA, reason="the interpreter's limit")
def test_bfloat16_is_refused_in_the_interpreter() -> None:
    call = AttentionCall(*(torch.randn(1, 1, 20, 64, dtype=torch.bfloat16),) * 3)
    with pytest.raises(UnsupportedCallError, match="interpreter"):
        TRITON.execute(call, Plan(SparseMask.full(call, 16)))
