"""The portable kernels on the pages of a cache, against the reference on a copy: nothing is copied for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.families import only
from kernels.caches import LAYOUTS, copied, in_fp8, paged, untouched
from kernels.device import BOUNDS, CUDA, DEVICE, DTYPES
from kernels.requests import mask_of
from sparseprefill import AttentionCall, Carry, Pipeline, Plan, ReferenceExecutor, SparseMask, build, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import calls, masks, tensors

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON, REFERENCE = TritonExecutor(), ReferenceExecutor()
PAGES = (1, 16, 32, 48, 64, 128)
LENGTHS = [(1, 1), (127, 127), (20, 128), (129, 129), (33, 131), (7, 211)]
TILE = (32, 16)
KINDS = ("full", "both", "tiles", "stripes", "wide")


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        only(patch)
        yield


def make(size: tuple[int, int], dtype: torch.dtype = torch.float16, width: int = 64, **fields: Any) -> AttentionCall:
    q_len, kv_len = size
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len, "seed": kv_len}
    return AttentionCall(*tensors("random", head_dim=width, dtype=dtype, device=DEVICE, **sizes), **fields)


def some(call: AttentionCall, kind: str) -> SparseMask:
    """See `mask_of`."""
    return mask_of(call, kind, TILE, seed=call.kv_len)


def check(call: AttentionCall, plan: Plan) -> None:
    """As the reference on a copy, from the pages alone."""
    expected, actual = REFERENCE.execute(copied(call), plan), TRITON.execute(call, plan)
    assert untouched(call)
    if float(expected.out.double().norm()) > 0:
        assert output_error(actual.out, expected.out) <= BOUNDS[call.q.dtype]
    assert not bool(actual.out.isnan().any())
    assert torch.equal(expected.lse == -torch.inf, actual.lse == -torch.inf)
    assert torch.allclose(expected.lse, actual.lse, atol=2e-3)
    if plan.probe is not None:
        assert expected.probe is not None
        assert actual.probe is not None
        assert torch.allclose(expected.probe, actual.probe, atol=2e-3)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_of_any_size_and_layout(dtype: torch.dtype, layout: str, page: int) -> None:
    turn = PAGES.index(page) + len(layout) + DTYPES.index(dtype)
    for number, lengths in enumerate(LENGTHS):
        if not CUDA and number % 3 != turn % 3:  # in the interpreter each takes a third of the lengths by turns
            continue
        call = paged(make(lengths, dtype), page, layout)
        kinds = KINDS if CUDA else (KINDS[number % len(KINDS)],)
        for kind in kinds:
            check(call, Plan(some(call, kind)))


@pytest.mark.parametrize("width", [64, 80, 128, 256] if CUDA else [80])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask(kind: str, width: int) -> None:
    call = paged(make((61, 137), width=width), 16)
    check(call, Plan(some(call, kind)))


@pytest.mark.parametrize(
    "features",
    [
        {"q_offset": 30},
        {"window": 40},
        {"softcap": 8.0, "scale": 0.3},
        {"starts": [17]},
        {"lengths": [90]},
        {"sinks": [-1.0, 0.0, 1.0, 3.0], "q_offset": 0},
    ],
    ids=str,
)
def test_every_feature_of_a_call(features: dict[str, Any]) -> None:
    for name, dtype in (("starts", torch.int32), ("lengths", torch.int32), ("sinks", torch.float32)):
        if name in features:
            features = {**features, name: torch.tensor(features[name], dtype=dtype, device=DEVICE)}
    call = paged(make((50, 131), **features), 32, "LBHNC")
    for kind in ("full", "both"):
        check(call, Plan(some(call, kind)))


def test_the_mass_of_probed_tiles() -> None:
    call = paged(make((70, 129)), 16)
    probe = torch.tensor([[True, False, True, True]], device=DEVICE)
    check(call, Plan(some(call, "both"), probe=probe))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_resumed(layout: str) -> None:
    call = paged(make((65, 131)), 32, layout)
    first = some(call, "tiles")
    rest = SparseMask.from_tiles(call, ~first.tile_map(), TILE, diagonal=False)
    carry = Carry(TRITON.accumulate(call, Plan(first)), first)
    out, lse = TRITON.accumulate(call, Plan(rest, carry)).finish()
    resumed = TRITON.execute(call, Plan(rest, carry))
    assert untouched(call)
    whole = REFERENCE.execute(copied(call), Plan(SparseMask.full(call, TILE)))
    for found in (out, resumed.out):
        assert output_error(found, whole.out) <= BOUNDS[call.q.dtype]
    assert torch.allclose(lse, whole.lse, atol=2e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_only_rows_that_see_them(value: float) -> None:
    plain = make((100, 100))
    plain.v[:, :, 60] = value
    call = paged(plain, 16)
    for kind in ("full", "stripes"):
        mask = some(call, kind)
        assert torch.equal(~torch.isfinite(TRITON.execute(call, Plan(mask)).out).all(-1), mask.to_dense()[..., 60])
    assert untouched(call)


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp8_cache_is_scaled_as_it_is_read(layout: str, page: int) -> None:
    call = in_fp8(make((61, 131)), page, layout)
    probe = torch.ones(1, 4, dtype=torch.bool, device=DEVICE)
    for kind in ("full", "both"):
        check(call, Plan(some(call, kind), probe=probe))


@settings(max_examples=40 if CUDA else 8)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    plain = data.draw(
        calls(max_batch=1, max_heads=4, head_dims=(64,), max_len=200 if CUDA else 60, dtypes=DTYPES, device=DEVICE)
    )
    page, layout = data.draw(st.sampled_from(PAGES)), data.draw(st.sampled_from(sorted(LAYOUTS)))
    call = paged(plain, page, layout, seed=data.draw(st.integers(0, 99)))
    check(call, Plan(data.draw(masks(call, tiles=(16, 32)))))


def test_parts_of_a_long_call_read_their_own_pages() -> None:
    made = build("streaming", sink=16, window=40, block=16)
    cut = Pipeline(made.estimator, executor=TRITON, workspace=1)
    call = paged(make((2100, 2150) if CUDA else (80, 90)), 16)
    result = cut.run(call)
    assert untouched(call)
    whole = evolve(cut, executor=REFERENCE, workspace=None).run(copied(call))
    assert output_error(result.out, whole.out) <= BOUNDS[call.q.dtype]
