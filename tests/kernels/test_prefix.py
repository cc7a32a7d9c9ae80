"""Key means and value norms that are extended by chunks: the bits of those made afresh, and no row read twice."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.flashprefill.threshold import RelativeThreshold
from sparseprefill.plugins.stem.values import largest_norms
from torch import Tensor

from kernels.caches import STORED, in_fp8, paged, untouched
from kernels.device import CUDA, DEVICE, DTYPES
from sparseprefill import AttentionCall, Memory, ValueWeights, build, kernels
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.kernels import groups as group_keys
from sparseprefill.kernels.statistics.key_means import key_means
from sparseprefill.memory import PrefixTiles
from sparseprefill.pages import Pages
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import default_registry
from sparseprefill.testing import tensors

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Make = Callable[..., Tensor]
KINDS: dict[str, Make] = {"key means": key_means, "value norms": largest_norms}
CUTS = st.lists(st.integers(1, 70), min_size=2, max_size=4)


def whole(total: int, dtype: torch.dtype = torch.float16, seed: int = 0, width: int = 16) -> AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": total, "kv_len": total, "seed": seed}
    return AttentionCall(*tensors("random", head_dim=width, dtype=dtype, device=DEVICE, **sizes))


def chunk(of: AttentionCall, first: int, end: int, **fields: Any) -> AttentionCall:
    k, v = of.narrow(slice(0, 2), end)
    return evolve(of, q=of.q[:, :, first:end], k=k, v=v, q_offset=first, **fields)


@settings(max_examples=100 if CUDA else 20, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    lengths=CUTS,
    tile=st.sampled_from([1, 8, 12, 16, 100]),
    page=st.sampled_from([None, 16, 48]),
    stored=st.none() | st.sampled_from(sorted(STORED)),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from([16, 40]),
)
def test_chunks_have_the_bits_of_what_is_made_afresh(
    kind: str, lengths: list[int], tile: int, page: int | None, stored: str | None, dtype: torch.dtype, width: int
) -> None:
    make, made, prefix, first = KINDS[kind], whole(sum(lengths), dtype, width=width), PrefixTiles(), 0
    source = made
    if page is not None:
        source = paged(made, page) if stored is None else in_fp8(made, page, "LBNHC", *STORED[stored])
    for length in lengths:
        end = first + length
        call = chunk(source, first, end, prompt_lengths=sum(lengths) + 1)
        assert torch.equal(make(call, tile), prefix.get(call, kind, tile, partial(make, call, tile)))
        first = end
    assert prefix.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [None, 16])
def test_a_chunk_reads_its_own_rows_and_those_of_the_tile_that_it_goes_on_with(kind: str, page: int | None) -> None:
    """All that is before them is NaN by then, and whatever read it would say so."""
    make, made, prefix = KINDS[kind], whole(200), PrefixTiles()
    source = made if page is None else paged(made, page)
    for first, end in ((90, 150), (150, 171), (171, 200)):
        call = chunk(source, first, end)
        fresh = make(call, 16)
        assert bool(fresh.isfinite().all())
        if first > 90:
            forget(call, first // 16 * 16)
        assert torch.equal(fresh, prefix.get(call, kind, 16, partial(make, call, 16)))
        assert page is None or untouched(call)
        made = whole(200)
        source = moved(source, made)


def forget(call: AttentionCall, count: int) -> None:
    """The first `count` keys and values become NaN."""
    if call.pages is None:
        call.k[:, :, :count], call.v[:, :, :count] = torch.nan, torch.nan
        return
    for page in call.pages.table[: count // 16].tolist():
        call.pages.k[page], call.pages.v[page] = torch.nan, torch.nan


def moved(source: AttentionCall, made: AttentionCall) -> AttentionCall:
    """The call with its first keys and values again, in the same place."""
    if source.pages is None:
        source.k.copy_(made.k)
        source.v.copy_(made.v)
        return source
    fresh = paged(made, 16).pages
    assert fresh is not None
    source.pages.k.copy_(fresh.k)
    source.pages.v.copy_(fresh.v)
    pages = evolve(source.pages)
    return evolve(source, k=pages, v=pages)


@pytest.fixture
def _kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("serve", "serve_device"):
            patch.setattr(kernels, name, lambda _: True)
        patch.setattr(group_keys, "COPY", 0)
        yield


WEIGHTED = (ValueWeights(1.0, pool=4), RelativeThreshold(0.3, sink=0, local=0))
METHODS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...], int | None]] = {
    "flexprefill": ("flexprefill", {}, (), 16),
    "bfla, weighted": ("bfla", {}, WEIGHTED, 16),
    "xattention, weighted": ("xattention", {}, WEIGHTED, None),
}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("method", METHODS)
def test_masks_of_chunks_are_those_of_a_pipeline_that_keeps_nothing(method: str) -> None:
    name, parameters, refiners, page = METHODS[method]
    made = build(name, **{**default_registry().get(name).small, **parameters})
    assert isinstance(made, Pipeline)
    made = evolve(made, refiners=(*made.refiners, *refiners), executor=ReferenceExecutor())
    keeps, fresh = Memory(), Memory()
    source = whole(100, torch.float32, seed=3)
    source = source if page is None else paged(source, page)
    densities = set()
    for first, end in ((0, 40), (40, 71), (71, 100)):
        for layer in range(2 if made.observers else 1):
            call = chunk(source, first, end, layer=layer, prompt_lengths=100)
            found = made.run(call, keeps)
            expected = evolve(made, kept_bytes=0).run(call, fresh)
            assert torch.equal(expected.mask.to_dense(), found.mask.to_dense())
            densities.add(float(found.density))
    assert (0, True) == (fresh.nbytes, keeps.nbytes > 0)
    assert min(densities) < 1


def test_pages_of_another_cache_are_no_keys_of_the_same_layer() -> None:
    """Whoever numbers two layers alike has pages of each to tell them apart."""
    prefix = PrefixTiles()
    both = [paged(whole(100, seed=seed), 16) for seed in range(2)]
    for first, end in ((20, 50), (50, 100)):
        for one in both:
            call = chunk(one, first, end)
            assert torch.equal(key_means(call, 16), prefix.get(call, "mean", 16, partial(key_means, call, 16)))
    assert isinstance(both[0].pages, Pages)
