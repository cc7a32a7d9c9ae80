"""Which calls the Hopper kernel takes; no GPU is needed to say so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attrs import evolve
from triton.errors import TritonError

from helpers.families import Made, chosen, only, refused
from kernels.requests import mask_of, step_of
from kernels.test_order import told
from sparseprefill import AttentionCall, Plan, ReferenceExecutor, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.attention.together import Together
from sparseprefill.kernels.family import choose as choosing
from sparseprefill.kernels.family.chips import row
from sparseprefill.kernels.family.known import known
from sparseprefill.kernels.hopper.record import HOPPER
from sparseprefill.kernels.settings import settings
from sparseprefill.plan import Kernel
from sparseprefill.testing import tensors

launch = pytest.importorskip("sparseprefill.kernels.hopper.launch")


def call(dtype: torch.dtype = torch.bfloat16, width: int = 128, **more: Any) -> AttentionCall:
    q, k, v = tensors("random", batch=1, heads=2, kv_heads=1, q_len=200, kv_len=200, head_dim=width, dtype=dtype)
    return AttentionCall(q, k, v, **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (256, 256)])
def test_takes_half_precision_and_large_tiles(dtype: torch.dtype, width: int, tile: tuple[int, int]) -> None:
    given = call(dtype, width)
    assert refused(HOPPER, given, SparseMask.full(given, tile)) is None


@pytest.mark.parametrize(
    ("given", "tile", "reason"),
    [
        (call(torch.float32), 128, "float32"),
        (call(width=96), 128, "head dimension 96"),
        (call(), 64, "tiles of 64 x 64"),
        (call(), (128, 32), "tiles of 128 x 32"),
        (call(window=50), 128, "window"),
        (call(softcap=30.0), 128, "softcap"),
    ],
)
def test_leaves_the_rest_to_the_portable_kernel(given: AttentionCall, tile: Any, reason: str) -> None:
    assert reason in refused(HOPPER, given, SparseMask.full(given, tile))


def test_rows_must_be_aligned() -> None:
    q, k, v = (torch.zeros(1, 2, 200, 130, dtype=torch.bfloat16)[..., :128] for _ in range(3))
    given = AttentionCall(q, k, v)
    assert "16 bytes" in refused(HOPPER, given, SparseMask.full(given))


def test_stripes_need_strides_that_the_compiler_is_told_of() -> None:
    """Of a stride of 136 it learns nothing, and the kernel for stripes does not compile; that for tiles does."""
    q = torch.zeros(1, 2, 200, 128, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 2, 200, 136, dtype=torch.bfloat16)[..., :128] for _ in range(2))
    given = AttentionCall(q, k, v)
    stripes = SparseMask.from_stripes(given, torch.ones(200, dtype=torch.bool), diagonal=False)
    assert refused(HOPPER, given, SparseMask.full(given)) is None
    assert "multiples of 16" in refused(HOPPER, given, stripes)


@pytest.mark.parametrize("width", sorted(launch.STAGES))
@pytest.mark.parametrize("tile_q", [128, 256])
def test_its_flags_are_of_the_blocks_that_are_computed_again(width: int, tile_q: int) -> None:
    """Another number of them would be no answer of the kernel, which would be left out."""
    assert launch.BLOCK_M == settings(row((9, 0)), width, 2, tile_q, 128).block_m  # noqa: SIM300 - expected == actual


def test_a_variant_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, given = Made(RuntimeError("PassManager::run failed")), call(torch.float16, 64)
    only(monkeypatch, broken.family)
    stripes = SparseMask.from_stripes(given, torch.ones(200, dtype=torch.bool), diagonal=False)
    TritonExecutor().execute(given, Plan(stripes))
    assert chosen(given, stripes).family.name == "portable"
    assert chosen(given, SparseMask.full(given)).family.name == "made-up"


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), TritonError("no layout"), KeyError("x")])
def test_what_does_not_compile_is_said_once_and_the_next_in_line_serves(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Made(error)
    only(monkeypatch, broken.family)
    for _ in range(2):
        given = call(torch.float16, 64)
        result = TritonExecutor().execute(given, Plan(SparseMask.full(given)))
        (kernel,) = result.kernels
        assert kernel.name == "portable"
        assert kernel.reason.startswith("made-up: does not work here for (torch.float16, 64, 128, 128")
        assert kernel.reason.endswith(f"{type(error).__name__}: {error}")
        assert output_error(result.out, ReferenceExecutor().execute(given, Plan(SparseMask.full(given))).out) <= 2e-3
    assert len(broken.jobs) == 1
    assert [str(error) in record.message for record in caplog.records] == [True]


def test_the_last_in_line_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given = call(torch.float16, 64)
    only(monkeypatch)
    monkeypatch.setattr(attention, "forward", Made(KeyError("a bug")).launch)
    with pytest.raises(KeyError, match="a bug"):
        TritonExecutor().execute(given, Plan(SparseMask.full(given)))
    assert choosing.FAILED == {}


def test_running_out_of_memory_is_no_reason_to_give_the_kernel_up(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Made(torch.OutOfMemoryError("full")).family)
    given = call(torch.float16, 64)
    with pytest.raises(torch.OutOfMemoryError):
        TritonExecutor().execute(given, Plan(SparseMask.full(given)))
    assert choosing.FAILED == {}


def test_what_it_declines_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    only(monkeypatch, HOPPER)
    choosing._declined.cache_clear()
    choosing._SAID.clear()
    with caplog.at_level(logging.INFO):
        for given in (call(), call(softcap=30.0), call(softcap=20.0)):
            choice = chosen(given, SparseMask.full(given, 128))
            assert choice.call is given
            plain = given.softcap is None
            assert (choice.family.name == "hopper") == plain == (choice.reason == "")
    assert ["softcap" in record.message for record in caplog.records] == [True]


def test_a_length_makes_no_other_reason(caplog: pytest.LogCaptureFixture) -> None:
    choosing._SAID.clear()
    with caplog.at_level(logging.INFO):
        for length in range(1000, 1010):
            choosing._declined("hopper-int8", f"{length:,} keys; 8 bits pay from 65,536 on")
    assert len(caplog.records) == 1


def test_a_failure_that_is_kept_holds_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Made(RuntimeError("too many registers")).family)
    given = call(torch.float16, 64)
    TritonExecutor().execute(given, Plan(SparseMask.full(given)))
    assert [error.__traceback__ for error in choosing.FAILED.values()] == [None]


def test_a_result_says_which_kernel_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Made().family)
    found: list[Kernel] = []
    for given in (call(torch.float16, 64), call(torch.float16, 64, softcap=30.0)):
        found += TritonExecutor().execute(given, Plan(SparseMask.full(given))).kernels
    assert found == [Kernel("made-up"), Kernel("portable", "made-up: a sliding window or softcap")]


def test_in_the_interpreter_kernels_of_chips_have_nothing_to_say() -> None:
    given = call()
    choice = chosen(given, SparseMask.full(given))
    assert (choice.family.name, choice.reason) == ("portable", "")
    assert choice.call is given


def test_the_decision_is_taken_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionCall] = []
    made = Made().family
    only(monkeypatch, evolve(made, objection=lambda call, mask, wanted: asked.append(call)))
    given = call(torch.float16, 64)
    TritonExecutor().execute(given, Plan(SparseMask.full(given)))
    assert asked == [given]


@pytest.mark.parametrize("state", [False, True])
def test_an_empty_mask_leaves_zeros(state: bool) -> None:
    given = call(torch.float16, 64)
    plan = Plan(SparseMask.empty(given))
    if state:
        out, lse = TritonExecutor().accumulate(given, plan).finish()
    else:
        result = TritonExecutor().execute(given, plan)
        out, lse = result.out, result.lse
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("tile_q", [128, 256])
@pytest.mark.parametrize("starts", [None, (0, 333)])
def test_of_few_rows_behind_many_keys_the_longest_blocks_are_drawn_first(
    tile_q: int, starts: tuple[int, int] | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 3)
    monkeypatch.setattr(launch, "LEAST_STEPS", 1)
    q, k, v = tensors("random", batch=2, heads=4, kv_heads=2, q_len=600, kv_len=2000, head_dim=64)
    given = AttentionCall(q, k, v, starts=None if starts is None else torch.tensor(starts, dtype=torch.int32))
    g, source = given.geometry, torch.Generator().manual_seed(tile_q)
    share = torch.rand(2, 4, 1, 1, generator=source)  # heads differ
    tiles = torch.rand(2, 4, g.tile_rows(tile_q), g.tile_columns(128), generator=source) < share
    columns = torch.rand(2, 4, g.tile_rows(2 * tile_q), 2000 // width, generator=source) < share
    mask = SparseMask.from_tiles(given, tiles, (tile_q, 128)) | SparseMask.from_stripes(
        given, columns, 2, (tile_q, 128), width=width, diagonal=False
    )
    tiles_of, stripes_of = mask.tiles, mask.stripes
    assert tiles_of is not None
    assert stripes_of is not None
    blocks, length = g.tile_rows(tile_q) * (tile_q // 128), []
    for b in range(2):
        first = (1400 - (0 if starts is None else starts[b])) // tile_q
        for h in range(4):
            for block in reversed(range(blocks)):
                tile = block // (tile_q // 128)
                group = (first + tile) // 2 - first // 2
                keys = int(tiles_of.counts[b, h, tile]) * 128 + int(stripes_of.counts[b, h, group]) * width
                length.append(keys)
    made = launch._draws(given, mask, blocks)
    assert made is not None
    assert not made.room.any()
    drawn = told(made.words)
    items = [item for item, number, _ in drawn if number == 0]
    assert sorted(items) == list(range(2 * 4 * blocks))
    assert [length[item] for item in items] == sorted(length, reverse=True)


def _half(given: AttentionCall) -> torch.Tensor:
    g = given.geometry
    return torch.rand(1, 4, g.tile_rows(128), g.tile_columns(128)) < 0.5


def test_blocks_that_are_short_or_too_many_follow_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 3)
    monkeypatch.setattr(launch, "LEAST_STEPS", 4)
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=600, kv_len=2000, head_dim=64)
    behind, whole = AttentionCall(q, k, v), AttentionCall(q, k[:, :, :600], v[:, :, :600])
    some, few = (SparseMask.from_tiles(one, _half(one)) for one in (behind, whole))
    for one, mask in ((behind, some), (whole, few), (behind, SparseMask.full(behind))):
        assert launch._draws(one, mask, 6) is not None
    assert launch._draws(behind, SparseMask.empty(behind), 6) is None
    monkeypatch.setattr(launch, "LEAST_STEPS", 16)
    assert launch._draws(behind, some, 6) is None  # 16 steps
    monkeypatch.setattr(launch, "LEAST_STEPS", 4)
    monkeypatch.setattr(launch, "MOST", 23)
    assert launch._draws(behind, some, 6) is None


@pytest.mark.parametrize("kept", ["tiles", "lists", "columns", "window"])
def test_the_last_rows_of_a_whole_prompt_come_first_in_pieces(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 12)
    monkeypatch.setattr(launch, "LEAST_STEPS", 2)
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=1800, kv_len=1800, head_dim=64)
    given = AttentionCall(q, k, v)
    few = torch.zeros(1, 4, 15, 15, dtype=torch.bool)
    if kept == "window":
        mask = SparseMask.from_rules(given, band=1)
    elif kept == "columns":
        columns = torch.zeros(1, 4, 15, 113, dtype=torch.bool)
        columns[..., ::40] = True
        mask = SparseMask.from_stripes(given, columns, width=16)
    else:
        mask = SparseMask.from_tiles(given, few) if kept == "tiles" else SparseMask.from_tiles(given, few).listed()
    made = launch._draws(given, mask.with_dense_rows((14, 15)), 15)
    assert made is not None
    drawn = told(made.words)
    cut = [item for item, number, count in drawn if count > 1 and number == 0]
    assert cut == [0, 15, 30, 45]
    assert [item for item, number, _ in drawn if number == 0][:4] == cut


@pytest.mark.parametrize("least", [4, 40])
@pytest.mark.parametrize("cached", [0, 2000])
def test_blocks_of_several_requests_are_those_that_there_are(
    cached: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest lists first, where all are short request by request; each block once, and no others."""
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 3)
    calls = step_of([(600, 600 + cached), (130, 130 + cached), (257, 300 + cached)], heads=4)
    masks = [mask_of(one, "tiles", (128, 128), seed=seed) for seed, one in enumerate(calls)]
    requests = Together.of(calls, masks)
    own = requests.blocks(launch.BLOCK_M)
    blocks = max(own)
    monkeypatch.setattr(launch, "LEAST_STEPS", least)
    order, made = launch._draws_together(requests, blocks)
    items = order.tolist() if made is None else [item for item, number, _ in told(made.words) if number == 0]
    length = {}
    for i, mask in enumerate(masks):
        assert mask.tiles is not None
        for h in range(4):
            for block in range(own[i]):
                item = (i * 4 + h) * blocks + blocks - 1 - block  # as `work.query_block` reads it
                length[item] = int(mask.tiles.counts[0, h, block])
    assert sorted(items) == sorted(length)
    assert (made is not None) == (least == 4)
    if made is not None:
        assert [length[item] for item in items] == sorted(length.values(), reverse=True)
    else:
        assert [item // (4 * blocks) for item in items] == [i for i in range(3) for _ in range(4 * own[i])]


def test_a_kernel_is_told_of_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    only(monkeypatch, made.family)
    calls = step_of([(200, 200), (100, 150)], heads=2)
    results = TritonExecutor().execute_many(calls, [Plan(SparseMask.full(one)) for one in calls])
    assert [isinstance(job.requests, Together) for job in made.jobs] == [True]
    assert {kernel.name for one in results for kernel in one.kernels} == {"made-up"}


def test_a_kernel_of_single_requests_gets_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank comes before the launch that others would share."""
    made = Made()
    only(monkeypatch, evolve(made.family, features=evolve(made.family.features, requests=False)))
    calls = step_of([(200, 200), (100, 150)], heads=2)
    results = TritonExecutor().execute_many(calls, [Plan(SparseMask.full(one)) for one in calls])
    assert [job.requests for job in made.jobs] == [None, None]
    assert {kernel.name for one in results for kernel in one.kernels} == {"made-up"}


def test_what_fails_for_several_requests_says_nothing_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Made(RuntimeError("PassManager::run failed"))
    only(monkeypatch, broken.family)
    calls = step_of([(60, 60), (40, 90)], heads=2)
    plans = [Plan(SparseMask.full(one)) for one in calls]
    results = TritonExecutor().execute_many(calls, plans)
    assert {kernel.name for one in results for kernel in one.kernels} == {"portable"}
    assert all("several requests" in kernel.reason for one in results for kernel in one.kernels)
    assert chosen(calls[0], plans[0].mask).family.name == "made-up"
    for one, plan, result in zip(calls, plans, results, strict=True):
        assert output_error(result.out, ReferenceExecutor().execute(one, plan).out) <= 2e-3


def test_pages_that_are_copied_for_it_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, HOPPER)
    small, good = (step_of([(200, 200), (100, 150)], heads=2, page=page) for page in (8, 16))
    assert not attention.shares(small[0], SparseMask.full(small[0]), known())
    assert attention.shares(good[0], SparseMask.full(good[0]), known())
    read = attention.shares(small[0], SparseMask.full(small[0], 32), known())
    assert read, "the portable kernel reads them as they are"
