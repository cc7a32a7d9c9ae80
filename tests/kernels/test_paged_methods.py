"""Every method on the pages of a cache: the mask and the output that a copy gives, and no copy is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.anchor_attention.stages import AnchorEstimator

from kernels.caches import STORED, copied, in_fp8, paged, untouched
from kernels.device import BOUNDS, CUDA, DEVICE
from sparseprefill import AttentionCall, Memory, Pipeline, Result, default_registry, kernels, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels import groups as group_keys
from sparseprefill.testing import tensors

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "rowmax, union": ("rowmax", {"union": "group"}),
    "rowmax, tiles": ("rowmax", {"width": None}),
    "rowmax, columns": ("rowmax", {"union": "head", "block": 32, "width": 16}),
    "star-attention, inner": ("star-attention", {"inner": "streaming"}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in default_registry().methods() if name != "dense"
} | MORE


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Kernels do the work on a CPU too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("serve", "serve_device"):
            patch.setattr(kernels, name, lambda _: True)
        patch.setattr(group_keys, "COPY", 0)  # or whole prompts would be copied where that is faster
        yield


def pipeline(case: str) -> Pipeline:
    """A method with its small parameters; on a CPU by the kernels, in the interpreter."""
    name, parameters = CASES[case]
    method = default_registry().get(name)
    made = method.pipeline(**{**method.small, **parameters})
    if CUDA:
        return made
    estimator = made.estimator
    if isinstance(estimator, AnchorEstimator):
        estimator = evolve(estimator, executor=TritonExecutor())
    return evolve(made, estimator=estimator, executor=TritonExecutor())


def make(size: tuple[int, int], dtype: torch.dtype) -> AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": size[0], "kv_len": size[1]}
    return AttentionCall(*tensors("sink", head_dim=64, dtype=dtype, device=DEVICE, **sizes))


def same(expected: Result, found: Result) -> None:
    assert torch.equal(expected.mask.to_dense(), found.mask.to_dense())
    assert torch.equal(expected.out, found.out)
    assert torch.equal(expected.lse, found.lse)


SIZES = [(353, 353), (290, 353), (1000, 4099)] if CUDA else [(50, 99)]
CACHES = ((16, "LBNHC"), (128, "LBHNC")) if CUDA else ((16, "LBNHC"),)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_pages_give_what_their_copy_gives(case: str, size: tuple[int, int]) -> None:
    for page, layout in CACHES:
        call, made = paged(make(size, torch.float16), page, layout), pipeline(case)
        found = made.run(call)
        assert untouched(call)
        same(made.run(copied(call)), found)


# On a GPU AnchorAttention's estimate begins with attention, by whichever kernel is fastest: from a copy, or not.
@pytest.mark.parametrize("case", [case for case in CASES if not CUDA or case != "anchor-attention"])
def test_an_estimate_over_an_fp8_cache_is_that_over_its_copy(case: str) -> None:
    """Bit for bit, and nothing is copied."""
    call, made = in_fp8(make(SIZES[0], torch.float16), 16, "LBNHC", *STORED["e4m3, uneven"]), pipeline(case)
    found = made.estimator.estimate(call, Memory())
    assert untouched(call)
    expected = made.estimator.estimate(copied(call), Memory())
    assert torch.equal(expected.mask.to_dense(), found.mask.to_dense())


@pytest.mark.parametrize("case", CASES if CUDA else ["share-prefill", "bfla", "anchor-attention"])
def test_an_fp8_cache_gives_what_its_copy_gives(case: str) -> None:
    """Estimates choose alike; the kernels of attention may sum in another order."""
    call, made = in_fp8(make(SIZES[0], torch.float16), 16), pipeline(case)
    expected, found = made.run(copied(call)), made.run(call)
    differ = int((expected.mask.to_dense() ^ found.mask.to_dense()).sum())
    close = 1e-3 * int(expected.mask.to_dense().sum()) if case == "anchor-attention" else 0  # after its own pass
    assert differ <= close
    if differ == 0:
        assert output_error(found.out, expected.out) <= BOUNDS[torch.float16]
