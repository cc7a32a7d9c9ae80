"""XAttention's kernels against its plain-PyTorch path: the scores of tiles, in any launch shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.xattention import kernels
from sparseprefill.plugins.xattention.scores import PARTIALS, tile_scores

from kernels.groups import CUDA, DTYPES, SMALL, TMA, grouped_calls, make, small_settings
from sparseprefill import AttentionCall

# numpy, which the interpreter computes with, warns of the infinities and NaNs that belong here
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FEW = settings(max_examples=60 if CUDA else 8, deadline=None)
SIZES = st.sampled_from([(4, 16), (8, 32), (5, 20), (3, 48), (16, 16)])


def same(call: AttentionCall, stride: int, block: int, bound: float = 1e-4) -> None:
    torch.testing.assert_close(
        kernels.tile_scores(call, stride, block), tile_scores(call, stride, block), rtol=bound, atol=bound
    )


@FEW
@given(
    call=grouped_calls(),
    sizes=SIZES,
    tile=SMALL,
    tma=st.sampled_from(TMA),
    partials=st.sampled_from([1, 1 << 15, PARTIALS]),
)
def test_equal_plain_pytorch(
    call: AttentionCall, sizes: tuple[int, int], tile: tuple[int, int], tma: bool, partials: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_settings(patch, tile, tma)
        patch.setattr(kernels, "PARTIALS", partials)
        same(call, *sizes)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_stays_in_the_rows_that_see_it(value: float, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's in every later query tile, a query's in its own; what the diagonal leaves out does not count."""
    small_settings(monkeypatch, (16, 32), tma)
    for place in (40, 47):
        call = make(torch.float32, (2, 1), 150, 20, 3)
        call.k[:, :, place, 3], call.q[:, 1, 130, 5] = value, value
        expected, actual = tile_scores(call, 8, 32), kernels.tile_scores(call, 8, 32)
        nonfinite = expected.isnan().any(-1)
        assert bool(nonfinite.any())
        assert not bool(nonfinite[:, 0, 0].any())
        assert torch.equal(nonfinite, actual.isnan().any(-1))
        torch.testing.assert_close(actual[~nonfinite], expected[~nonfinite], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "before"), [(4096, 0), (3001, 1095), (1000, 64)])
def test_equal_plain_pytorch_in_production_settings(dtype: torch.dtype, width: int, q_len: int, before: int) -> None:
    same(make(dtype, (8, 2), q_len, before, 0, width=width), 16, 128, 1e-3)
    same(make(dtype, (8, 2), q_len, before, 0, width=width, starts=[0, 77], strided=True), 8, 128, 1e-3)


@pytest.mark.gpu
def test_nothing_recompiles_when_only_the_length_changes() -> None:
    compiled = []
    for length in (8192, 10240, 12288, 8320):
        kernels.tile_scores(make(torch.bfloat16, (8, 2), length, 0, 0, width=128), 16, 128)
        used = (kernels.partial_softmax_kernel, kernels.tile_scores_kernel)
        compiled.append([len(cache[0]) for kernel in used for cache in kernel.device_caches.values()])
    assert all(some == compiled[0] for some in compiled), compiled
