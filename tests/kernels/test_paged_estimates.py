"""Estimators' kernels on the pages of a cache find what they find on a copy, to the last bit, and copy nothing.

Not of an fp8 cache either, whose numbers they convert as they read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.anchor_attention import kernels as anchor
from sparseprefill.plugins.anchor_attention.layout import Regions

from helpers.build import among
from helpers.examples import few_of
from kernels.caches import LAYOUTS, STORED, copied, in_fp8, paged, untouched
from kernels.device import CUDA, DEVICE, DTYPES
from sparseprefill import AttentionCall, Memory, build, kernels
from sparseprefill.kernels import source
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.samples import KeptKeys
from sparseprefill.parts.split import Part
from sparseprefill.statistics.by_tile import lse_by_tile
from sparseprefill.statistics.pooled import tile_mean
from sparseprefill.statistics.sampled import last_rows, sampled_mass, spread_rows
from sparseprefill.testing import calls, tensors

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PAGES = (1, 16, 48, 128)
LENGTHS = [(1, 1), (1, 129), (127, 127), (20, 128), (129, 129), (33, 251)]
FEATURES: list[dict[str, Any]] = [
    {},
    {"q_offset": 60},
    {"window": 40},
    {"softcap": 8.0, "scale": 0.3},
    {"starts": 17},
    {"lengths": 110},
    {"starts": 17, "lengths": 90, "window": 31},
]
REGIONS = Regions(32, 1, 8)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Kernels do the sampling on a CPU too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "serve", lambda _: True)
        yield


def make(size: tuple[int, int], dtype: torch.dtype = torch.float16, **fields: Any) -> AttentionCall:
    q_len, kv_len = size
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len, "seed": kv_len}
    heads, width = fields.pop("heads", 4), fields.pop("width", 64)
    rows: dict[str, Any] = {
        name: torch.tensor([fields.pop(name)], dtype=torch.int32, device=DEVICE)
        for name in ("starts", "lengths")
        if name in fields
    }
    made = tensors("random", heads=heads, head_dim=width, dtype=dtype, device=DEVICE, **sizes)
    return AttentionCall(*made, **among(kv_len, fields | rows))


def check(call: AttentionCall) -> int:
    """All estimates, from the pages alone; how many stripes there are."""
    check_samples(call)
    check_rows(call)
    count = check_stripes(call)
    assert untouched(call)
    return count


def check_samples(call: AttentionCall, slash: int = 16) -> None:
    rows, real = last_rows(call, 40)
    expected, actual = (sampled_mass(x, rows, real, slash) for x in (copied(call), call))
    assert bool((expected.columns.sum(-1) > 0).all()) == bool(real.any())
    for name in ("columns", "slashes", "lse"):
        assert torch.equal(getattr(expected, name), getattr(actual, name)), name


def check_rows(call: AttentionCall, tile: int = 32) -> None:
    rows, real = spread_rows(call, 5)
    keys = KeptKeys(torch.ones(1, call.q.shape[1], 1, call.kv_len, dtype=torch.bool, device=DEVICE), 0 * rows)
    for expected, actual in zip(*(lse_by_tile(x, rows, real, tile, keys) for x in (copied(call), call)), strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)


def check_stripes(call: AttentionCall, theta: float = 0.5) -> int:
    there = copied(call)
    m = maxima(there, theta)
    expected, actual = (IndexLists(*anchor.stripes(x, REGIONS, m, theta)) for x in (there, call))
    assert torch.equal(expected.counts, actual.counts)
    assert torch.equal(expected.to_map(call.kv_len), actual.to_map(call.kv_len))
    return int(expected.counts.sum())


def maxima(call: AttentionCall, theta: float) -> torch.Tensor:
    """Row maxima with which about half of a block's keys are selected, and one is too close for 16 bits to tell."""
    geometry, block = call.geometry, REGIONS.block
    mean = tile_mean(call.q, geometry, block).double()
    logits = mean @ call.k.repeat_interleave(call.group, 1).double().transpose(-1, -2) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    key, first = geometry.key_positions()[:, None], geometry.tiles(block)[:, :, None] * block
    candidate = (key >= REGIONS.init_tokens) & (key < first)
    middle = logits.masked_fill(~candidate[:, None], torch.nan).nanmedian(-1).values.nan_to_num(0)
    side = 1 - 2 * (torch.arange(middle.shape[-1], device=middle.device) % 2)
    row = (torch.div(geometry.query_positions(), block, rounding_mode="floor") - geometry.first_tile(block)[:, None])[0]
    return (middle + theta + 2e-5 * side)[:, :, row].float()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_any_size_and_layout(layout: str, page: int) -> None:
    number = PAGES.index(page) + 3 * (layout == "LBHNC")
    for lengths in LENGTHS if CUDA else [LENGTHS[number % len(LENGTHS)]]:
        for dtype in DTYPES if CUDA else [DTYPES[number % 2]]:
            check(paged(make(lengths, dtype), page, layout))


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_every_feature_of_a_call(features: dict[str, Any]) -> None:
    assert check(paged(make((30, 131), **features), 48, "LBHNC")) > 0


@pytest.mark.parametrize(("heads", "width"), [(2, 80), (8, 64), (16, 256)] if CUDA else [(2, 80), (8, 64)])
def test_any_sharing_of_heads_and_any_width(heads: int, width: int) -> None:
    check(paged(make((20, 99), heads=heads, width=width), 16))


@pytest.mark.parametrize("page", few_of([16, 128], [16]))
@pytest.mark.parametrize("stored", STORED)
def test_an_fp8_cache_is_converted_as_it_is_read(stored: str, page: int) -> None:
    """In the interpreter each takes one length, layout and dtype by turns."""
    turn = list(STORED).index(stored) + page // 16
    lengths = [(1, 1), (1, 127), (40, 129), (33, 131)]
    for size in lengths if CUDA else [lengths[turn % 4]]:
        for dtype in DTYPES if CUDA else [DTYPES[turn // 4 % 2]]:
            check(in_fp8(make(size, dtype), page, sorted(LAYOUTS)[turn % 2], *STORED[stored]))


@pytest.mark.parametrize("features", FEATURES if CUDA else [FEATURES[0], FEATURES[-1]], ids=str)
def test_every_feature_of_a_call_on_an_fp8_cache(features: dict[str, Any]) -> None:
    assert check(in_fp8(make((30, 131), **features), 48, "LBNHC", *STORED["e4m3, uneven"])) > 0


def test_keys_that_are_gone_over_too_often_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have to be converted, by sampled rows, which go over them twice; others read them where they stand."""
    monkeypatch.setattr(source, "PASSES", 1)
    call, plain = in_fp8(make((40, 99)), 16), paged(make((40, 99)), 16)
    assert call.pages is not None
    check_stripes(call)
    check_rows(call)
    assert untouched(call)
    check_samples(call)
    assert call.pages.gathered == {"k"}
    check_rows(call)
    check(plain)


def test_a_part_reads_its_own_pages() -> None:
    whole = paged(make((60, 129)), 16)
    for part in (Part((2, 4), (0, 60)), Part((0, 2), (16, 40)), Part((3, 4), (40, 60))):
        check(part.of(whole))
    assert untouched(whole)


@settings(max_examples=40 if CUDA else 5)
@given(st.data())
def test_equals_the_copy(data: st.DataObject) -> None:
    plain = data.draw(
        calls(max_batch=1, max_heads=4, head_dims=(64,), max_len=251 if CUDA else 100, dtypes=DTYPES, device=DEVICE)
    )
    page, layout = data.draw(st.sampled_from(PAGES)), data.draw(st.sampled_from(sorted(LAYOUTS)))
    stored = data.draw(st.none() | st.sampled_from(sorted(STORED)))
    check(paged(plain, page, layout) if stored is None else in_fp8(plain, page, layout, *STORED[stored]))


@pytest.mark.parametrize("name", ["sample-attention", "vertical-slash"])
def test_an_estimate_copies_nothing(name: str) -> None:
    for cache in (paged, in_fp8):
        call = cache(make((100, 131)), 16)
        build(name).estimator.estimate(call, Memory())
        assert untouched(call)


@pytest.mark.gpu
def test_one_that_computes_attention_copies_nothing_unless_that_is_faster() -> None:
    for cache in (paged, in_fp8):
        made = cache(make((100, 131)), 16)
        assert made.pages is not None
        pages = evolve(made.pages, copies=False)
        call = evolve(made, k=pages, v=pages)
        build("anchor-attention").estimator.estimate(call, Memory())
        assert untouched(call)
