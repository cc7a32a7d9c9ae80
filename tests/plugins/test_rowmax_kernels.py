"""rowmax's kernels against its plain-PyTorch path: shares and kept tiles, in any launch shape; 8 bits to rounding."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Prefill, Session
from sparseprefill.plugins.rowmax import RowMaxConfig, kernels, launch, maxima, stages
from sparseprefill.plugins.rowmax.maxima import MAXIMA
from sparseprefill.plugins.rowmax.stages import RowMaxEstimator
from torch import Tensor

import sparseprefill as sp
from helpers.examples import few_of
from kernels.caches import copied, in_fp8, paged, untouched
from kernels.device import CUDA, DEVICE, DTYPES
from kernels.groups import make
from sparseprefill import AttentionCall
from sparseprefill import kernels as core_kernels
from sparseprefill.kernels.family.chips import capability, row
from sparseprefill.kernels.settings import Settings
from sparseprefill.kernels.source import Keys

# numpy, which the interpreter computes with, warns of the infinities that belong here
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FEW = settings(max_examples=60 if CUDA else 8, deadline=None)
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (16, 1)])
LENGTHS = st.sampled_from([1, 127, 128, 129, 131, 149]) | st.integers(1, 150)
SIZES = st.sampled_from([(1, 16), (2, 32), (4, 32), (4, 128), (3, 48), (5, 20), (16, 64)])
"""every, block"""
SHAPES = st.sampled_from([(16, 16), (16, 32), (32, 16), (64, 64)])


@st.composite
def sampled_calls(draw: st.DrawFn) -> AttentionCall:
    """Calls of any length, offset and head number, GQA to 16, padded batches, softcap, window, sinks."""
    heads, q_len, before = draw(HEADS), draw(LENGTHS), draw(st.integers(0, 90))
    after = draw(st.integers(0, 20))
    options: dict[str, Any] = {
        "softcap": draw(st.sampled_from([None, 3.0])),
        "window": draw(st.none() | st.integers(1, 150)),
        "width": draw(st.sampled_from([16, 24])),
        "strided": draw(st.booleans()),
        "first_head": draw(st.integers(0, 5)),
    }
    total = before + q_len + after
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, total - 1), min_size=2, max_size=2))
        options["lengths"] = [draw(st.integers(1, total - start)) for start in starts]
        options["starts"] = starts
    one = make(draw(st.sampled_from(DTYPES)), heads, q_len, before, after, **options)
    sinks = torch.linspace(-3, 5, heads[0], device=DEVICE) if draw(st.booleans()) else None
    return evolve(one, q=2 * one.q, sinks=sinks)


def settled(
    every: int = 4, block: int = 32, union: str = "head", precision: str = "exact", width: int | None = None
) -> RowMaxConfig:
    return RowMaxConfig(
        eps=0.02,
        times=1e9,
        every=every,
        block=block,
        sink=False,
        union=union,
        precision=precision,
        width=width,
        strong=1.0,
    )


def plain(call: AttentionCall, config: RowMaxConfig) -> Tensor:
    """By PyTorch, whatever there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_kernels, "serve", lambda _: False)
        found: Tensor = RowMaxEstimator(config).shares(call)
        return found


def same(call: AttentionCall, config: RowMaxConfig, bound: float = 1e-4) -> None:
    expected, actual = plain(call, config), launch.tile_shares(call, config)
    torch.testing.assert_close(actual, expected.float(), rtol=bound, atol=bound)
    kept = launch.kept_tiles(call, config)
    assert torch.bool == kept.dtype
    assert torch.equal(actual >= config.eps, kept) or bool(
        ((actual - config.eps).abs() < bound)[kept != (actual >= config.eps)].all()
    )
    assert bool((kept == (expected >= config.eps))[(expected - config.eps).abs() > bound].all())
    by_mean(call, config, bound)


def by_mean(call: AttentionCall, config: RowMaxConfig, bound: float) -> None:
    """What the kernels keep by the mean share lies between what PyTorch keeps a little above and a little below it."""
    for strong in (1.0, 0.2, 0.0):
        found = launch.kept_tiles(call, evolve(config, eps=0.1, times=2.0, strong=strong))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_kernels, "serve", lambda _: False)
            less, more = 1 - 20 * bound, 1 + 20 * bound
            many, few = (
                RowMaxEstimator(
                    evolve(config, eps=0.1 * x, times=2.0 * x, strong=strong if strong == 1.0 else strong * x)
                ).kept(call)
                for x in (less, more)
            )
        assert not bool((few & ~found).any())
        assert not bool((found & ~many).any())


def small(patch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Shapes that a short call has many of; on a GPU this replaces the settings that production takes."""
    patch.setattr(launch, "settings", lambda *_: Settings(*shape, 4, 2))


@FEW
@given(
    call=sampled_calls(),
    sizes=SIZES,
    shape=SHAPES,
    most=st.sampled_from([1, 1 << 14, MAXIMA]),
    union=st.sampled_from(["head", "group"]),
    programs=st.sampled_from([(1, 1), (512, 1), (512, 8)]),
    width=st.sampled_from([None, None, 1, 4, 8, 16, 32]),
)
def test_equal_plain_pytorch(
    call: AttentionCall,
    sizes: tuple[int, int],
    shape: tuple[int, int],
    most: int,
    union: str,
    programs: tuple[int, int],
    width: int | None,
) -> None:
    """Some or all query tiles at a time, and the keys of a row in one program or in many."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch, shape)
        patch.setattr(launch, "MAXIMA", most)
        patch.setattr(launch, "_parts", lambda seen, *_: max(1, min(programs[0], max(seen) // programs[1])))
        same(call, settled(*sizes, union=union, width=None if width and sizes[1] % width else width))


@given(
    rows=st.integers(1, 1100),
    before=st.integers(0, 1100),
    room=st.sampled_from([0, 1, 100, 5000, 1 << 18, 1 << 24]),
    unit=st.sampled_from([1, 8]),
)
def test_launches_of_maxima_share_a_scratch(rows: int, before: int, room: int, unit: int) -> None:
    keys = before + rows - 1
    goes = list(launch._goes(rows, before, keys, room, unit))
    assert [first for first, *_ in goes] == [sum(count for _, count, _ in goes[:i]) for i in range(len(goes))]
    assert sum(count for _, count, _ in goes) == rows
    for first, count, behind in goes:
        assert behind == min(before + first + count, keys)
        assert count * behind <= room or count <= unit
        last = first + count == rows
        assert last or (count % unit == 0 and (count + unit) * (before + first + count + unit) > room)


def test_a_long_prompt_takes_few_launches() -> None:
    """131,072 tokens of 12 heads, columns of 16 keys, maxima in 16 bits."""
    assert len(list(launch._goes(1024, 0, 1024, 2 * MAXIMA // (12 * 8 * 16), 8))) == 4


def _seen(rows: int, keys: int) -> tuple[int, ...]:
    """Key tiles of each two blocks of 128 rows, of which each stands for 8."""
    return tuple(min((keys - rows) // 128 + 16 * (i + 1), keys // 128) for i in range(-(-rows // 2048)))


@pytest.mark.parametrize("heads", [1, 2, 12, 32, 64])
@pytest.mark.parametrize("seen", [(1,), (7,), _seen(512, 32768), _seen(2048, 32768), _seen(8192, 8192)])
def test_parts_are_no_shorter_than_pays(seen: tuple[int, ...], heads: int) -> None:
    parts = launch._parts(seen, heads, 132)
    assert 1 <= parts <= max(1, max(seen) // launch.FEWEST)


@pytest.mark.parametrize(("rows", "keys", "parts"), [(8192, 8192, 4), (8192, 16384, 3), (2048, 32768, 11)])
def test_programs_that_see_keys_all_run_at_once(rows: int, keys: int, parts: int) -> None:
    """Of 12 heads, where these were the fastest of all that were tried on an H200."""
    seen = _seen(rows, keys)
    assert launch._parts(seen, 12, 132) == parts
    each = -(-max(seen) // parts)
    assert 108 < 12 * sum(-(-tiles // each) for tiles in seen) <= 132


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "wide window": {"window": 97, "first_head": 3},
    "softcap": {"softcap": 3.0, "window": 33},
    "padded": {"starts": [17, 0], "lengths": [101, 150]},
    "padded, window": {"starts": [60, 3], "lengths": [90, 170], "window": 21},
}


UNIONS = ("head", "group")
FEATURED = [(name, union) for name in FEATURES for union in UNIONS]
BY_TURNS = [(name, UNIONS[i % 2]) for i, name in enumerate(FEATURES)]


@pytest.mark.parametrize("featured", few_of(FEATURED, BY_TURNS), ids="-".join)
def test_each_feature(featured: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three query heads of a KV head, so that a program of a union has room for one that is not there."""
    name, union = featured
    small(monkeypatch, (32, 16))
    call = make(torch.float32, (6, 2), 140, 43, 9, **FEATURES[name])
    call = evolve(call, q=3 * call.q, sinks=torch.linspace(-2, 4, 6, device=DEVICE))
    sizes = ((2, 32), (3, 24))
    turn = list(FEATURES).index(name) + len(union)
    for every, block in sizes if CUDA else [sizes[turn % 2]]:  # in the interpreter by turns
        same(call, settled(every, block, union=union))


@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256, 512])
def test_head_dimensions(width: int) -> None:
    same(make(DTYPES[1], (2, 1), 140, 30, 3, width=width), settled())


@pytest.mark.parametrize("page", few_of([16, 48], [48]))
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"starts": [17], "lengths": [120]}], ids=str)
def test_of_pages_it_is_the_same_to_the_bit(
    page: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, (16, 16))
    rows = {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in options.items() if name != "window"}
    one = evolve(make(torch.float16, (4, 2), 101, 43, 9, width=64), **(options | rows))
    cases = (paged(one, page), False), (in_fp8(one, page), True), (in_fp8(one, page, stored=torch.float8_e5m2), True)
    for call, in_8 in cases:
        there = copied(call)
        for union in ("head", "group"):
            config = settled(union=union)
            # A GPU adds products in another order where numbers were eight bits wide.
            rtol, atol = (1e-4, 1e-5) if CUDA and in_8 else (0.0, 0.0)
            found = launch.tile_shares(call, config)
            torch.testing.assert_close(found, launch.tile_shares(there, config), rtol=rtol, atol=atol)
        assert untouched(call)


@pytest.fixture
def in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of e4m3 on any device; the interpreter knows them."""
    monkeypatch.setattr(launch, "in_8_bits", lambda *_: True)


OUTLIERS = [1.0, 3000.0, 1e-4]
"""Far beyond e4m3, within float16."""


@pytest.mark.usefixtures("in_8_bits")
@pytest.mark.parametrize("outlier", OUTLIERS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"softcap": 30.0}, {"starts": [17, 0], "lengths": [80, 140]}], ids=str
)
def test_in_8_bits_logits_differ_by_rounding(
    outlier: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numbers of any size, each row of queries and each tile of keys has a power of two of its own."""
    small(monkeypatch, (16, 16))
    call = make(torch.float16, (4, 2), 101, 43, 9, width=32, **options)
    call = evolve(call, q=call.q / outlier, k=call.k * outlier, sinks=torch.zeros(4, device=DEVICE))
    config = settled()
    expected, actual = plain(call, config), launch.tile_shares(call, config)
    # Two rounded numbers: 2^-3 of a product at most, and sums are off by far less. The interpreter rounds some worse.
    assert torch.equal(expected > 0, actual > 0)
    assert float((expected.log() - actual.log())[expected > 0].abs().max()) < 0.8
    assert float((expected - actual).abs().mean()) < 0.03
    assert not torch.equal(expected, actual)


@triton.jit
def smallest_kernel(out_ptr, lse_ptr, enough_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, kernels._smallest(tl.load(lse_ptr + at), tl.load(enough_ptr + at)))


def test_one_comparison_in_float16_says_what_a_subtraction_in_float32_would() -> None:
    """Also where many numbers of float16 lie within a rounding of lse, and at both ends."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    numbers = numbers[~numbers.isnan()].to(DEVICE)
    ends = [0.0, 15.3, -7.25, 65504.0, -65504.0, 1e9, -1e9, math.inf]
    lse = torch.tensor([*ends, *torch.linspace(-140, 140, 120).tolist()], device=DEVICE)
    near = [x - lse for x in (1e-7, -3e-5, 0.25, 11.0)]
    for least in (*near, *(torch.full_like(lse, x) for x in (0.0, -7.643856, -15.4, -1e9, -math.inf))):
        found = torch.empty_like(lse, dtype=torch.float16)
        smallest_kernel[(1,)](found, lse, least, N=128)  # pyright: ignore[reportArgumentType]
        expected = ~(numbers.float()[:, None] - lse < least)
        assert torch.equal(expected, numbers[:, None] >= found)


@pytest.mark.usefixtures("in_8_bits")
@pytest.mark.parametrize("union", ["head", "group"])
def test_programs_that_choose_from_few_columns_or_many_agree(union: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, (16, 16))
    call = make(torch.float16, (6, 2), 101, 43, 9, width=32)  # products of e4m3 take 32 at least
    config = evolve(settled(width=2, union=union), strong=0.1)
    monkeypatch.setattr(launch, "ENTRIES", 1)
    expected = launch.kept_tiles(call, config), launch.tile_shares(call, config)
    assert 0 < int(expected[0].sum()) < expected[0].numel()
    for programs in (1, 1 << 20):
        monkeypatch.setattr(launch, "CHOOSERS", programs)
        assert torch.equal(expected[0], launch.kept_tiles(call, config))
        assert torch.equal(expected[1], launch.tile_shares(call, config))


@pytest.mark.usefixtures("in_8_bits")
def test_keys_are_rounded_by_tile_on_the_rows_grid() -> None:
    call = make(torch.float16, (2, 1), 60, 20, 13, width=32, starts=[5, 30], lengths=[88, 40])
    operand, factors = launch._rounded(call, 32)
    rounded = operand.k
    assert factors is not None
    assert (2, 1, 96, 32) == tuple(rounded.shape)
    for b, (start, end) in enumerate([(5, 80), (30, 70)]):
        keys = torch.zeros(96, 32, device=DEVICE)
        keys[: end - start] = call.k[b, 0, start:end].float()  # of the future there is none
        back = rounded[b, 0].float() * factors[b, 0].repeat_interleave(32)[:, None]
        # The interpreter halves what is rounded up to a power of two.
        known = torch.ones_like(keys, dtype=torch.bool) if CUDA else torch.frexp(keys).mantissa.abs() < 31 / 32
        torch.testing.assert_close(back[known], keys[known], rtol=0.13, atol=float(keys.abs().max()) * 2**-14)
        for tile in range(3):
            largest = float(rounded[b, 0, tile * 32 : tile * 32 + 32].float().norm(dim=-1).max())
            assert largest == 0 or 110 < largest <= 255
            assert 0.5 == math.frexp(float(factors[b, 0, tile]))[0]


@pytest.mark.usefixtures("in_8_bits")
def test_of_fp8_pages_in_8_bits_it_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, (16, 16))
    one = make(torch.float16, (4, 2), 101, 43, 9, width=64)
    for call in (paged(one, 16), in_fp8(one, 16)):
        assert torch.equal(launch.tile_shares(copied(call), settled()), launch.tile_shares(call, settled()))
        assert untouched(call)


def test_which_calls_go_by_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    halves, floats, narrow = (
        make(t, (1, 1), 9, 0, 0, width=w) for t, w in ((torch.float16, 64), (torch.float32, 64), (torch.float16, 16))
    )
    for has, able in (((0, 0), False), ((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(launch, "chip", lambda _, has=has: row(has))
        assert [able, able, False] == [launch.in_8_bits(halves, word) for word in ("auto", "fp8", "exact")]
        assert not launch.in_8_bits(floats, "auto")
        assert not launch.in_8_bits(narrow, "fp8")
        monkeypatch.setattr(core_kernels, "serve", lambda _: True)
        unsupported = RowMaxEstimator(settled(precision="fp8")).unsupported
        assert able == (unsupported(halves) is None)
        assert "not torch.float32" in str(unsupported(floats))


def test_the_estimator_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are the same by kernels and without, the union on fewer heads; keys are read where they stand."""
    read = []
    of = Keys.of

    def counted(*given: Any, **options: Any) -> Keys:
        read.append(1)
        return of(*given, **options)

    monkeypatch.setattr(Keys, "of", counted)
    one = make(torch.float32, (4, 2), 150, 30, 0, window=100)
    for union in ("head", "group"):
        pipeline = sp.build("rowmax", eps=0.03, every=4, block=32, union=union)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_kernels, "serve", lambda _: False)
            expected = pipeline.plan(one, sp.Memory()).mask.tile_map()
            assert not read
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_kernels, "serve", lambda _: True)
            plan = pipeline.plan(one, sp.Memory())
            assert 1 == len(read)
            actual = plan.mask.tile_map()
            read.clear()
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("most", [1, MAXIMA])
def test_what_it_allocates_is_within_the_bound(most: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "in_8_bits", lambda *_: bits == 8)
    monkeypatch.setattr(maxima, "MAXIMA", most)
    monkeypatch.setattr(launch, "MAXIMA", most)
    taken, empty = [], torch.empty

    def counted(*given: Any, **options: Any) -> Tensor:
        made: Tensor = empty(*given, **options)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    for sizes in ((4, 32), (1, 16), (3, 48), (5, 20)):
        call = make(torch.float16, (6, 2), 150, 43, 9, width=64)
        taken.clear()
        launch.tile_shares(call, settled(*sizes))
        bound = maxima.workspace(call, sizes[1], sizes[1], sizes[0], by_kernels=True)
        assert sum(taken) <= bound < 60 * sum(taken)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "before"), [(4096, 0), (3001, 1095), (1000, 64)])
def test_equal_plain_pytorch_in_production_settings(dtype: torch.dtype, width: int, q_len: int, before: int) -> None:
    for config in (
        settled(4, 128, precision="exact"),
        settled(8, 128, union="group", precision="exact"),
        settled(4, 128, precision="exact", width=16),
    ):
        same(make(dtype, (8, 2), q_len, before, 0, width=width), config, 1e-3)
        same(
            make(dtype, (8, 2), q_len, before, 0, width=width, starts=[0, 77], lengths=[999, 900], strided=True),
            config,
            1e-3,
        )
        same(make(dtype, (8, 2), q_len, before, 0, width=width, window=777, softcap=20.0), config, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("keys", [None, 16])
def test_products_of_e4m3_in_production_settings(width: int, keys: int | None) -> None:
    call = make(torch.bfloat16, (8, 2), 4096, 0, 0, width=width)
    config = settled(4, 128, precision="fp8", width=keys)
    if not launch.in_8_bits(call, "fp8"):
        pytest.skip("no products of e4m3 here")
    expected, actual = plain(call, config), launch.tile_shares(call, config)
    assert torch.equal(expected > 0, actual > 0)
    assert float((expected - actual).abs().mean()) < 0.01


HOPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0},
    "padded": {"starts": [0, 77], "lengths": [999, 900]},
    "strided, head 3": {"strided": True, "first_head": 3},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOPPERS)
@pytest.mark.parametrize("width", [64, 80, 96, 128])
@pytest.mark.parametrize(
    ("q_len", "before", "every"), [(4096, 0, 8), (3001, 1095, 4), (129, 3967, 1), (1, 700, 8), (1000, 64, 32)]
)
@pytest.mark.parametrize("keys", [None, 64, 32, 16])
def test_the_kernel_for_hopper_finds_what_the_portable_one_does(
    name: str, width: int, q_len: int, before: int, every: int, keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers in 8 bits, multiplied by the same instructions."""
    call = make(torch.bfloat16, (6, 2), q_len, before, 0, width=width, **HOPPERS[name])
    call = evolve(call, sinks=torch.linspace(-3, 5, 6, device=DEVICE))
    if capability(call.q.device) != (9, 0):
        pytest.skip("no Hopper here")
    for most in (1, MAXIMA):
        monkeypatch.setattr(launch, "MAXIMA", most)
        for union in ("head", "group"):
            config = settled(every, 128, union=union, precision="fp8", width=keys)
            assert not launch.remark(call, config)
            actual = launch.tile_shares(call, config)
            assert not launch.FAILED
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "_for_hopper", lambda *_: False)
                expected = launch.tile_shares(call, config)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
            assert bool((actual > 0).any()) or q_len == 1 or "padded" in name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["exact", "auto"])
@pytest.mark.parametrize("width", [None, 16])
def test_nothing_recompiles_when_only_the_length_changes(precision: str, width: int | None) -> None:
    compiled = []
    for length in (8192, 10240, 12288, 8320):
        config = settled(4, 128, precision=precision, width=width)
        launch.kept_tiles(make(torch.bfloat16, (8, 2), length, 0, 0, width=128), config)
        used = (kernels.round_keys_kernel, kernels.maxima_kernel, kernels.choose_kernel)
        compiled.append([len(cache[0]) for kernel in used for cache in kernel.device_caches.values()])
    assert all(some == compiled[0] for some in compiled), compiled


def test_a_report_says_why_the_portable_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel for Hopper would serve: on other devices and for other tiles there is nothing to say."""
    call = make(torch.float32, (1, 1), 256, 0, 0, width=64)
    monkeypatch.setattr(launch, "FAILED", [AttributeError("no such name")])
    monkeypatch.setattr(launch, "in_8_bits", lambda *_: True)
    monkeypatch.setattr(stages, "kernels", SimpleNamespace(serve_rows=lambda _: True))
    monkeypatch.setattr(
        stages.RowMaxEstimator, "kept", lambda *_: torch.ones(1, 1, 2, 2, dtype=torch.bool, device=DEVICE)
    )
    config = RowMaxConfig(every=1, width=None)
    for known, said in (((9, 0), True), ((8, 9), False)):
        monkeypatch.setattr(launch, "chip", lambda _, found=known: row(found))
        session = Session(sp.Pipeline(stages.RowMaxEstimator(config), name="rowmax"), HostOptions(tail=0))
        session.run(call, Prefill())
        notes = session.report("h", "i").notes
        assert said == any("portable one serves: AttributeError: no such name" in note for note in notes)
    monkeypatch.setattr(launch, "chip", lambda _: row((9, 0)))
    assert launch.remark(call, RowMaxConfig(block=64)) == ""
    monkeypatch.setattr(launch, "FAILED", [])
    assert launch.remark(call, config) == ""


def test_columns_of_few_keys_are_left_to_the_portable_kernel_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_for_hopper", lambda *_: True)
    monkeypatch.setattr(launch, "_module", lambda: pytest.fail("no such columns there"))
    call = make(torch.float32, (2, 1), 140, 30, 3, width=64)
    narrow = settled(4, 128, width=8)
    same(call, narrow)
    said = "rowmax's kernel for Hopper takes columns of 16 keys or more: the portable one serves width=8"
    assert said == launch.remark(call, narrow)
    for width in (16, 32, 64, None):
        assert "" == launch.remark(call, settled(4, 128, width=width))
