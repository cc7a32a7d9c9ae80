"""What a caller has set around a call changes nothing: autocast, defaults of dtype and device, fake tensors, modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.share_prefill.clustering import similarity
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import sparseprefill as sp
from helpers.build import int32, make, random_mask
from helpers.examples import SCOPES
from sparseprefill.executors.dense import dense
from sparseprefill.metrics import watched_recall
from sparseprefill.refiners.recall import KeptWhole
from sparseprefill.statistics.by_tile import row_lse
from sparseprefill.statistics.grid import wide_products
from sparseprefill.statistics.pooled import key_tile_mean, products, tile_mean
from sparseprefill.statistics.sampled import last_mass, last_rows
from sparseprefill.testing import check_method, head_tensors, standard_calls, tensors

METHODS = sorted(sp.default_registry().methods())
REFERENCE = sp.ReferenceExecutor()
EXECUTORS: dict[str, Any] = {
    "reference": REFERENCE,
    "cpu": sp.CpuExecutor(),
    "auto": sp.AutoExecutor(),
}
REFINERS: dict[str, Any] = {
    "recall": sp.RecallFloor(target=0.99, rows=8),
    "recall of tiles": sp.RecallFloor(target=0.99, rows=8, speaks_for="tile"),
    "kept whole": KeptWhole(8),
    "floor": sp.BudgetFloor(share=0.7),
    "ceiling": sp.BudgetCeiling(tiles=2),
    "sink": sp.Sink(1),
    "band": sp.LocalBand(1),
    "stride": sp.StrideRescue(every=3),
    "random": sp.RandomRescue(share=0.3),
    "dense rows": sp.DenseRows(9),
    "union": sp.GqaUnion(),
    "skip": sp.SkipSoftmax(below=5.0, grain=None),
    "threshold": sp.RelativeThreshold(0.5),
    "values": sp.ValueWeights(1.0),
    "decay": sp.PositionDecay(tiles=3),
}
CORRECTORS: dict[str, Any] = {"proxy": sp.Proxy(), "delta": sp.Delta(gamma=16)}
CALLS: dict[str, sp.AttentionCall] = {
    "plain": make(150, heads=4, kv_heads=2, kind="stripes"),
    "softcap": make(150, heads=4, kv_heads=2, softcap=3.0),
    "starts": make(90, 150, batch=2, heads=4, kv_heads=2, starts=int32(0, 37)),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AUTOCAST: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "float16": partial(torch.autocast, "cpu", dtype=torch.float16),
}
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **AUTOCAST,
    "default float64": partial(default_dtype, torch.float64),
    "default bfloat16": partial(default_dtype, torch.bfloat16),
    "default device meta": partial(torch.device, "meta"),
    "a dispatch mode": partial(FlopCounterMode, display=False),
    "inference": torch.inference_mode,
}
around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


def tensors_of(found: Any) -> list[Tensor]:
    """What was computed, in a fixed order, whatever it came in."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, sp.Result):
        given = [found.out, found.lse, found.mask.to_dense(), found.probe, found.pairs()]
        return [x for x in given if x is not None]
    if isinstance(found, sp.Plan):
        of_carry = [] if found.carry is None else tensors_of(found.carry.state)
        worth = [] if found.priority is None else [found.mask.pairs()]
        notes = [x for x in found.notes.values() if isinstance(x, Tensor)]
        below = [] if found.skip_below is None else [found.skip_below]
        return [found.mask.to_dense(), *of_carry, *worth, *notes, *below]
    if isinstance(found, sp.SoftmaxState):
        return [found.m, found.l, found.acc]
    if isinstance(found, tuple | list):
        return [x for one in found for x in tensors_of(one)]
    assert found is None or isinstance(found, str | int | float), type(found)
    return []


def unchanged(run: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]]) -> None:
    """The same bits and types within, twice, and afterwards."""
    expected = tensors_of(run())
    with around():
        within = [tensors_of(run()) for _ in range(2)]
    for actual in (*within, tensors_of(run())):
        assert [x.dtype for x in expected] == [x.dtype for x in actual]
        assert [x.device for x in expected] == [x.device for x in actual]
        assert all(torch.equal(*(x.nan_to_num() for x in pair)) for pair in zip(expected, actual, strict=True))


def small(name: str) -> sp.Pipeline:
    method = sp.default_registry().get(name)
    return method.pipeline(**method.small)


def prefill(pipeline: sp.Pipeline, call: sp.AttentionCall) -> list[sp.Result]:
    """A prompt of two layers in two chunks, with one Memory; whole where rows have starts."""
    grain, found = pipeline.grain, []
    cut = call.q.shape[2] // 2 if grain is None else min(grain, call.q.shape[2] - 1)
    memory, offset = sp.Memory(), call.kv_len - call.q.shape[2]
    rows = (slice(0, cut), slice(cut, None)) if call.starts is None else (slice(None),)
    for some in rows:
        behind = call.kv_len if some.stop is None else offset + some.stop
        for layer in range(2):
            part = evolve(
                call, q=call.q[:, :, some], k=call.k[:, :, :behind], v=call.v[:, :, :behind], layer=layer,
                prompt_lengths=call.kv_len,
            )  # fmt: skip
            if not pipeline.unsupported(part):
                found.append(pipeline.run(part, memory))
    return found


FIRST = ("bfloat16", "default float64", "default device meta")


def cases() -> Iterator[Any]:
    """Every method within what makes the largest difference; a few within the rest, and with ``-m thorough`` all."""
    for name in METHODS:
        for word, entered in AROUND.items():
            later = word not in FIRST and name not in SCOPES.values()
            yield pytest.param(name, entered, id=f"{name}-{word}", marks=[pytest.mark.thorough] if later else [])


@pytest.mark.parametrize(("name", "around"), cases())
def test_a_prefill(name: str, around: Callable[[], AbstractContextManager[Any]]) -> None:
    pipeline = small(name)
    for word in ("plain", "starts"):
        unchanged(partial(prefill, pipeline, CALLS[word]), around)


@pytest.mark.parametrize(("name", "around"), cases())
def test_an_estimator_alone(name: str, around: Callable[[], AbstractContextManager[Any]]) -> None:
    pipeline = small(name)
    for call in CALLS.values():
        if not pipeline.unsupported(call):
            unchanged(partial(pipeline.estimator.estimate, call, sp.Memory()), around)


@around
@pytest.mark.parametrize("refiner", REFINERS.values(), ids=REFINERS)
def test_a_refiner_alone(refiner: sp.MaskRefiner, around: Callable[[], AbstractContextManager[Any]]) -> None:
    for call in CALLS.values():
        for name in ("anchor-attention", "flexprefill"):
            estimator = small(name).estimator
            plan = estimator.estimate(call, sp.Memory())
            unchanged(partial(refiner.refine, call, plan, sp.Memory()), around)


@around
@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
def test_a_corrector_alone(corrector: sp.Corrector, around: Callable[[], AbstractContextManager[Any]]) -> None:
    for call in CALLS.values():
        plan = sp.Plan(random_mask(call, "both", (16, 16), 2, seed=1))
        plan = plan.widen(sp.SparseMask.from_rules(call, 16, band=0))
        result = REFERENCE.execute(call, plan)
        unchanged(partial(corrector.correct, call, plan, result, sp.Memory()), around)


@around
@pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)
def test_an_executor_alone(executor: Any, around: Callable[[], AbstractContextManager[Any]]) -> None:
    for call in CALLS.values():
        mask = random_mask(call, "both", (16, 16), 2, seed=1) | sp.SparseMask.from_rules(call, 16, band=0)
        heads = torch.ones(call.q.shape[:2], dtype=torch.bool)
        below = torch.full(call.q.shape[:1], 0.05)
        out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3])
        for plan in (sp.Plan(mask, probe=heads), sp.Plan(mask, skip_below=below)):
            unchanged(partial(executor.execute, call, plan), around)
            unchanged(partial(executor.accumulate, call, plan), around)
            unchanged(partial(executor.execute_into, call, plan, out, lse), around)


def figures(call: sp.AttentionCall, result: sp.Result, state: sp.SoftmaxState) -> list[Any]:
    """What metrics, statistics and states of a softmax work out."""
    rows, mass = last_rows(call, 5), last_mass(call, 5)[0]
    return [
        *(sp.recall(call, result, some) for some in (None, 7, [3, 5])),
        watched_recall(call, result).kept,
        state.merge(state),
        state.finish(),
        sp.output_error(result.out, call.q),
        torch.tensor(result.density, dtype=torch.float64, device="cpu"),
        row_lse(call, *rows),
        [mass.columns, mass.slashes, mass.lse],
        products(call.q, call.k),
        wide_products(call.q, call.k),
        key_tile_mean(call, 16),
        tile_mean(call.q, call.geometry, 16),
        dense(call, REFERENCE),
        result.mask.shade(5),
    ]


@around
def test_what_is_measured(around: Callable[[], AbstractContextManager[Any]]) -> None:
    for call in CALLS.values():
        result = small("streaming").run(call)
        unchanged(partial(figures, call, result, REFERENCE.accumulate(call, result.plan)), around)


@around
def test_what_is_made_up_for_tests(around: Callable[[], AbstractContextManager[Any]]) -> None:
    unchanged(lambda: head_tensors(q_len=300, heads=2, kv_heads=1, head_dim=64), around)
    for kind in ("random", "sink", "local", "stripes"):
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 9, "kv_len": 12, "head_dim": 8}
        unchanged(partial(tensors, kind, **sizes), around)  # type: ignore[arg-type]
    unchanged(lambda: [[call.q, call.k, call.v, call.sinks, call.starts] for call in standard_calls()], around)
    maps = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)).tril()
    unchanged(lambda: similarity(maps), around)


@around
def test_contracts_hold_within(around: Callable[[], AbstractContextManager[Any]]) -> None:
    with around():
        check_method("flexprefill", calls=[CALLS["plain"]])


def faked(call: sp.AttentionCall, mode: FakeTensorMode) -> sp.AttentionCall:
    made: dict[str, Any] = {name: mode.from_tensor(getattr(call, name)) for name in ("q", "k", "v")}
    return evolve(call, **made)


@pytest.mark.parametrize("name", METHODS)
def test_a_call_of_fake_tensors_leaves_nothing_behind(name: str) -> None:
    """Of sizes that no call had before it, and of sizes that one had: real calls of them come out the same."""
    for number, corrector in enumerate((None, *CORRECTORS.values())):
        pipeline = small(name).with_corrector(corrector).with_recall(0.9)
        call = make(151 + 3 * METHODS.index(name) + number, heads=4, kv_heads=2, kind="stripes")
        found = []
        for _ in range(2):
            with FakeTensorMode() as mode, suppress(sp.StageError):  # most methods read values on a CPU
                pipeline.run(faked(call, mode))
            found.append(tensors_of(pipeline.run(call)))
        with FlopCounterMode(display=False):
            expected = tensors_of(pipeline.run(call))  # by nothing that is kept
        for actual in found:
            assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


def test_sizes_alone_can_be_asked_of_fake_tensors() -> None:
    """Where no value is read, a call of them gives a fake tensor before and after a real one of its sizes."""
    call = make(143, heads=4, kv_heads=2)
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = faked(call, mode)
            assert sp.SparseMask.full(fake, 16).pairs().shape == (1, 4)
            assert isinstance(last_rows(fake, 5)[0], FakeTensor)
        assert not isinstance(last_rows(call, 5)[0], FakeTensor)
        assert sp.SparseMask.full(call, 16).density == 1.0


def test_another_thread_in_a_mode_spoils_nothing() -> None:
    """The mode of one thread is none of another's: what is made there is real, and may be kept."""
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with FakeTensorMode():
            entered.set()
            leave.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait)
        entered.wait()
        assert last_rows(make(139), 5)[0] is last_rows(make(139), 5)[0]
        leave.set()
