"""Which calls the Hopper kernel takes; no GPU is needed to say so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from triton.errors import TritonError

from kernels.requests import mask_of, step_of
from sparseprefill import AttentionCall, Plan, ReferenceExecutor, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.attention.together import Together
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
    assert launch.objection(given, SparseMask.full(given, tile)) is None


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
    assert reason in launch.objection(given, SparseMask.full(given, tile))


def test_rows_must_be_aligned() -> None:
    q, k, v = (torch.zeros(1, 2, 200, 130, dtype=torch.bfloat16)[..., :128] for _ in range(3))
    given = AttentionCall(q, k, v)
    assert "16 bytes" in launch.objection(given, SparseMask.full(given))


def test_stripes_need_strides_that_the_compiler_is_told_of() -> None:
    """Of a stride of 136 it learns nothing, and the kernel for stripes does not compile; that for tiles does."""
    q = torch.zeros(1, 2, 200, 128, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 2, 200, 136, dtype=torch.bfloat16)[..., :128] for _ in range(2))
    given = AttentionCall(q, k, v)
    stripes = SparseMask.from_stripes(given, torch.ones(200, dtype=torch.bool), diagonal=False)
    assert launch.objection(given, SparseMask.full(given)) is None
    assert "multiples of 16" in launch.objection(given, stripes)


def test_a_variant_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, given = Broken(RuntimeError("PassManager::run failed")), call(torch.float16, 64)
    monkeypatch.setattr(attention, "FAILED", {})
    monkeypatch.setattr(attention, "hopper_of", lambda _: broken)
    stripes = SparseMask.from_stripes(given, torch.ones(200, dtype=torch.bool), diagonal=False)
    TritonExecutor().execute(given, Plan(stripes))
    assert attention.choose(given, stripes).hopper is None
    assert attention.choose(given, SparseMask.full(given)).hopper is broken


class Broken:
    """A module whose kernel does not compile."""

    def __init__(self, error: Exception) -> None:
        self.error, self.tried = error, 0

    def objection(self, *_: object, **__: object) -> None:
        """Takes every call."""

    features = objection

    def better_copied(self, *_: object) -> bool:
        return False

    def launch(self, *_: object) -> torch.Tensor:
        self.tried += 1
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), TritonError("no such layout")])
def test_what_does_not_compile_is_said_once_and_the_portable_kernel_serves(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(error)
    monkeypatch.setattr(attention, "FAILED", {})
    monkeypatch.setattr(attention, "hopper_of", lambda _: broken)
    for _ in range(2):
        given = call(torch.float16, 64)
        result = TritonExecutor().execute(given, Plan(SparseMask.full(given)))
        (kernel,) = result.kernels
        assert kernel.name == "portable"
        assert "does not work here for (torch.float16, 64, 128, 128" in kernel.reason
        assert kernel.reason.endswith(f"{type(error).__name__}: {error}")
        assert output_error(result.out, ReferenceExecutor().execute(given, Plan(SparseMask.full(given))).out) <= 2e-3
    assert broken.tried == 1
    assert [str(error) in record.message for record in caplog.records] == [True]


def test_running_out_of_memory_is_no_reason_to_give_the_kernel_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FAILED", {})
    monkeypatch.setattr(attention, "hopper_of", lambda _: Broken(torch.OutOfMemoryError("full")))
    given = call(torch.float16, 64)
    with pytest.raises(torch.OutOfMemoryError):
        TritonExecutor().execute(given, Plan(SparseMask.full(given)))
    assert attention.FAILED == {}


def test_what_it_declines_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attention, "hopper_of", lambda _: launch)
    attention._declined.cache_clear()
    with caplog.at_level(logging.INFO):
        for given in (call(), call(softcap=30.0), call(softcap=20.0)):
            choice = attention.choose(given, SparseMask.full(given, 128))
            assert choice.call is given
            assert (choice.hopper is None) == (given.softcap is not None) == (choice.reason is not None)
    assert ["softcap" in record.message for record in caplog.records] == [True]


class Works:
    """A module whose kernel takes every call, and here computes nothing."""

    def objection(self, call: AttentionCall, mask: SparseMask, *, skips: bool = False) -> str | None:
        return "a softcap" if call.softcap is not None else None

    def features(self, call: AttentionCall, mask: SparseMask) -> str | None:
        return self.objection(call, mask)

    def better_copied(self, *_: object) -> bool:
        return False

    def launch(self, given: AttentionCall, mask: SparseMask, *_: object) -> torch.Tensor:
        blocks = mask.geometry.tile_rows(mask.tile_q) * (mask.tile_q // 64)
        return torch.zeros(given.q.shape[0] * given.q.shape[1] * blocks, dtype=torch.int8)


def test_a_result_says_which_kernel_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "hopper_of", lambda _: Works())
    found: list[Kernel] = []
    for given in (call(torch.float16, 64), call(torch.float16, 64, softcap=30.0)):
        found += TritonExecutor().execute(given, Plan(SparseMask.full(given))).kernels
    assert [(one.name, one.reason) for one in found] == [("hopper", ""), ("portable", "a softcap")]


def test_a_cpu_has_no_hopper_kernel() -> None:
    given = call()
    choice = attention.choose(given, SparseMask.full(given))
    assert (choice.hopper, choice.reason) == (None, None)
    assert choice.call is given


def test_the_decision_is_taken_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionCall] = []
    monkeypatch.setattr(attention, "hopper_of", asked.append)
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
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 3)
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
    order = launch._order(given, mask, blocks)
    assert sorted(order.tolist()) == list(range(2 * 4 * blocks))
    drawn = [length[item] for item in order.tolist()]
    assert drawn == sorted(length, reverse=True)


def _half(given: AttentionCall) -> torch.Tensor:
    g = given.geometry
    return torch.rand(1, 4, g.tile_rows(128), g.tile_columns(128)) < 0.5


def test_other_calls_draw_their_blocks_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 3)
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=600, kv_len=2000, head_dim=64)
    behind, whole = AttentionCall(q, k, v), AttentionCall(q, k[:, :, :600], v[:, :, :600])
    some, none = (SparseMask.from_tiles(one, _half(one)) for one in (behind, whole))
    assert launch._order(behind, some, 6) is not None
    assert launch._order(whole, none, 6) is None
    assert launch._order(behind, SparseMask.full(behind), 6) is None  # all heads alike
    monkeypatch.setattr(launch, "FEW_BLOCKS", 5)
    assert launch._order(behind, some, 6) is None
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 132)
    assert launch._order(behind, some, 5) is None  # all run at once


@pytest.mark.parametrize("cached", [0, 2000])
def test_blocks_of_several_requests_are_those_that_there_are(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest lists first behind cached keys, else request by request; each block once, and no others."""
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 3)
    calls = step_of([(600, 600 + cached), (130, 130 + cached), (257, 300 + cached)], heads=4)
    masks = [mask_of(one, "tiles", (128, 128), seed=seed) for seed, one in enumerate(calls)]
    requests = Together.of(calls, masks)
    own = requests.blocks(launch.BLOCK_M)
    blocks = max(own)
    order = launch._order_together(requests, blocks).tolist()
    length = {}
    for i, mask in enumerate(masks):
        assert mask.tiles is not None
        for h in range(4):
            for block in range(own[i]):
                item = (i * 4 + h) * blocks + blocks - 1 - block  # as `work.query_block` reads it
                length[item] = int(mask.tiles.counts[0, h, block])
    assert sorted(order) == sorted(length)
    if cached:
        assert [length[item] for item in order] == sorted(length.values(), reverse=True)
    else:
        assert [item // (4 * blocks) for item in order] == [i for i in range(3) for _ in range(4 * own[i])]


def test_the_hopper_kernel_is_told_of_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    works, seen = Works(), []

    def note(*given: object) -> torch.Tensor:
        seen.append(given[-1])
        return torch.zeros(2 * 2 * 2, dtype=torch.int8)

    monkeypatch.setattr(works, "launch", note, raising=False)
    monkeypatch.setattr(attention, "FAILED", {})
    monkeypatch.setattr(attention, "hopper_of", lambda _: works)
    calls = step_of([(200, 200), (100, 150)], heads=2)
    results = TritonExecutor().execute_many(calls, [Plan(SparseMask.full(one)) for one in calls])
    assert [isinstance(one, Together) for one in seen] == [True]
    assert {kernel.name for one in results for kernel in one.kernels} == {"hopper"}


def test_what_fails_for_several_requests_says_nothing_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(RuntimeError("PassManager::run failed"))
    monkeypatch.setattr(attention, "FAILED", {})
    monkeypatch.setattr(attention, "hopper_of", lambda _: broken)
    calls = step_of([(60, 60), (40, 90)], heads=2)
    plans = [Plan(SparseMask.full(one)) for one in calls]
    results = TritonExecutor().execute_many(calls, plans)
    assert {kernel.name for one in results for kernel in one.kernels} == {"portable"}
    assert all("several requests" in kernel.reason for one in results for kernel in one.kernels)
    assert attention.choose(calls[0], plans[0].mask).hopper is broken
    for one, plan, result in zip(calls, plans, results, strict=True):
        assert output_error(result.out, ReferenceExecutor().execute(one, plan).out) <= 2e-3


def test_pages_that_are_copied_for_it_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "hopper_of", lambda _: launch)
    small, good = (step_of([(200, 200), (100, 150)], heads=2, page=page) for page in (8, 16))
    assert not attention.shares(small[0], SparseMask.full(small[0]))
    assert attention.shares(good[0], SparseMask.full(good[0]))
    assert attention.shares(small[0], SparseMask.full(small[0], 32)), "the portable kernel reads them as they are"
