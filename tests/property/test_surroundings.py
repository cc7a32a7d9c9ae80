"""What a caller has set around a call changes nothing: autocast, defaults of dtype and device, fake tensors, modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.share_prefill.clustering import similarity
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import sparseprefill as sp
from helpers.build import int32, make, random_mask
from helpers.correctors import Blend
from helpers.examples import SCOPES
from helpers.stubs import Estimate
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
REFINERS: dict[str, sp.MaskRefiner] = {
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
CALLS: dict[str, sp.AttentionCall] = {
    "plain": make(150, heads=4, kv_heads=2, kind="stripes"),
    "starts": make(90, 150, batch=2, heads=4, kv_heads=2, starts=int32(0, 37), softcap=3.0),
}
SHORT: dict[str, sp.AttentionCall] = {
    "plain": make(40, heads=4, kv_heads=2, kind="stripes"),
    "starts": make(24, 40, batch=2, heads=2, kv_heads=1, starts=int32(0, 19), softcap=3.0),
}
"""For executors: three tiles of columns, and every tile costs the reference a step of Python."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Around = Callable[[], AbstractContextManager[Any]]
AROUND: dict[str, Around] = {
    "bfloat16": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "float16": partial(torch.autocast, "cpu", dtype=torch.float16),
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


@cache
def outside(run: Callable[..., Any], *names: str) -> list[Tensor]:
    """What a function gives where nothing is around it, once for all that may be."""
    return tensors_of(run(*names))


def unchanged(around: Around, run: Callable[..., Any], *names: str) -> None:
    """The same bits and types within, twice, and afterwards."""
    expected = outside(run, *names)
    with around():
        within = [tensors_of(run(*names)) for _ in range(2)]
    for actual in (*within, tensors_of(run(*names))):
        assert [x.dtype for x in expected] == [x.dtype for x in actual]
        assert [x.device for x in expected] == [x.device for x in actual]
        assert all(torch.equal(*(x.nan_to_num() for x in pair)) for pair in zip(expected, actual, strict=True))


def small(name: str) -> sp.Pipeline:
    method = sp.default_registry().get(name)
    return method.pipeline(**method.small)


def prefill(name: str, word: str) -> list[sp.Result]:
    """A prompt of two layers in two chunks, with one Memory; whole where rows have starts."""
    pipeline, call = small(name), CALLS[word]
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


def cases(names: Collection[str] = METHODS, few: Collection[str] = tuple(SCOPES.values())) -> Iterator[Any]:
    """Every name within what makes the largest difference; a few within the rest, and with ``-m thorough`` all."""
    for name in names:
        for word, entered in AROUND.items():
            later = word not in FIRST and name not in few
            yield pytest.param(name, entered, id=f"{name}-{word}", marks=[pytest.mark.thorough] if later else [])


@pytest.mark.parametrize(("name", "around"), cases())
def test_a_prefill(name: str, around: Around) -> None:
    for word in ("plain", "starts"):
        unchanged(around, prefill, name, word)


def estimated(name: str, word: str) -> sp.Plan:
    return small(name).estimator.estimate(CALLS[word], sp.Memory())


@pytest.mark.parametrize(("name", "around"), cases())
def test_an_estimator_alone(name: str, around: Around) -> None:
    for word, call in CALLS.items():
        if not small(name).unsupported(call):
            unchanged(around, estimated, name, word)


planned = cache(estimated)


def refined(refiner: str, name: str, word: str) -> sp.Plan:
    return REFINERS[refiner].refine(CALLS[word], planned(name, word), sp.Memory())


@pytest.mark.parametrize(("refiner", "around"), cases(REFINERS, ("recall", "decay")))
def test_a_refiner_alone(refiner: str, around: Around) -> None:
    """Of a plan with a carry and stripes, and of one of padded rows."""
    for name, word in (("anchor-attention", "plain"), ("flexprefill", "starts")):
        planned(name, word)  # not within
        unchanged(around, refined, refiner, name, word)


@cache
def masked(word: str) -> sp.Plan:
    """Tiles, stripes and the diagonal of a short call."""
    call = SHORT[word]
    return sp.Plan(random_mask(call, "both", (16, 16), 2, seed=1) | sp.SparseMask.from_rules(call, 16, band=0))


def corrected(word: str) -> sp.Result:
    return sp.Pipeline(Estimate(lambda *_: masked(word)), corrector=Blend()).run(SHORT[word])


@around
def test_a_corrector_in_a_pipeline(around: Around) -> None:
    for word in SHORT:
        masked(word)  # not within
        unchanged(around, corrected, word)


@cache
def plans(word: str) -> tuple[sp.Plan, sp.Plan]:
    """One that probes every head, and one that skips."""
    heads, below = torch.ones(SHORT[word].q.shape[:2], dtype=torch.bool), torch.full(SHORT[word].q.shape[:1], 0.05)
    return sp.Plan(masked(word).mask, probe=heads), sp.Plan(masked(word).mask, skip_below=below)


def run_by(executor: str, word: str) -> list[Any]:
    """Every way to run a plan."""
    by, call = EXECUTORS[executor], SHORT[word]
    out, lse = (torch.empty(shape, dtype=call.q.dtype, device="cpu") for shape in (call.q.shape, call.q.shape[:3]))
    probed, skipping = plans(word)
    return [
        *(by.execute(call, plan) for plan in (probed, skipping)),
        *(by.accumulate(call, plan) for plan in (probed, skipping)),
        by.execute_into(call, skipping, out, lse),
    ]


@pytest.mark.parametrize(("executor", "around"), cases(EXECUTORS, ("cpu",)))
def test_an_executor_alone(executor: str, around: Around) -> None:
    for word in SHORT:
        plans(word)
        unchanged(around, run_by, executor, word)


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


@cache
def run_before(word: str) -> tuple[sp.AttentionCall, sp.Result, sp.SoftmaxState]:
    call = CALLS[word]
    result = small("streaming").run(call)
    return call, result, REFERENCE.accumulate(call, result.plan)


def measured(word: str) -> list[Any]:
    return figures(*run_before(word))


@around
def test_what_is_measured(around: Around) -> None:
    for word in CALLS:
        run_before(word)
        unchanged(around, measured, word)


MAPS = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)).tril()


def made_up() -> list[Any]:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 9, "kv_len": 12, "head_dim": 8}
    return [
        head_tensors(q_len=300, heads=2, kv_heads=1, head_dim=64),
        *(tensors(kind, **sizes) for kind in ("random", "sink", "local", "stripes")),  # type: ignore[arg-type]
        *([call.q, call.k, call.v, call.sinks, call.starts] for call in standard_calls()),
        similarity(MAPS),
    ]


@around
def test_what_is_made_up_for_tests(around: Around) -> None:
    unchanged(around, made_up)


@around
def test_contracts_hold_within(around: Around) -> None:
    with around():
        check_method("flexprefill", calls=[CALLS["plain"]])


def faked(call: sp.AttentionCall, mode: FakeTensorMode) -> sp.AttentionCall:
    made: dict[str, Any] = {name: mode.from_tensor(getattr(call, name)) for name in ("q", "k", "v")}
    return evolve(call, **made)


def corrected_or_not() -> Iterator[Any]:
    """Every method alone; a method of each head scope with a corrector, and with ``-m thorough`` all."""
    for name in METHODS:
        yield name, None
        marks = [] if name in SCOPES.values() else [pytest.mark.thorough]
        yield pytest.param(name, Blend(), marks=marks)


@pytest.mark.parametrize(("name", "corrector"), corrected_or_not())
def test_a_call_of_fake_tensors_leaves_nothing_behind(name: str, corrector: sp.Corrector | None) -> None:
    """Of sizes that no call had before it, and of sizes that one had: real calls of them come out the same."""
    pipeline = small(name).with_corrector(corrector).with_recall(0.9)
    length = 151 + 2 * METHODS.index(name) + (corrector is not None)
    call = make(length, heads=4, kv_heads=2, kind="stripes")
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


class Wrapped(Tensor):
    """What a mode of functions may make of every tensor."""


class Wrapping(TorchFunctionMode):
    """Wraps whatever a function of torch gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.as_subclass(Wrapped) if type(found) is Tensor else found


def jvp(run: Callable[[], Any]) -> None:
    torch.func.jvp(lambda x: (run(), x)[1], (torch.ones(2),), (torch.ones(2),))


def linearized(run: Callable[[], Any]) -> None:
    torch.func.linearize(lambda x: (run(), x)[1], torch.ones(2))


def dual(run: Callable[[], Any]) -> None:
    with forward_ad.dual_level():
        run()


def wrapping(run: Callable[[], Any]) -> None:
    with Wrapping():
        run()


TRANSFORMS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "jvp": jvp,
    "linearize": linearized,
    "dual level": dual,
    "vmap": lambda run: torch.func.vmap(lambda x: (run(), x)[1])(torch.ones(2)),
    "grad": lambda run: torch.func.grad(lambda x: (run(), x)[1])(torch.tensor(1.0)),
    "functionalize": lambda run: torch.func.functionalize(lambda x: (run(), x)[1])(torch.ones(2)),
    "make_fx": lambda run: make_fx(lambda x: (run(), x)[1])(torch.ones(2)),
    "a mode of functions": wrapping,
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")  # torch's, of what it folds in `linearize`
@pytest.mark.parametrize("within", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("name", sorted(SCOPES.values()))
def test_a_call_within_a_transform_leaves_nothing_behind(name: str, within: Callable[[Callable[[], Any]], Any]) -> None:
    """Tensors of sizes alone are wrapped there, too; whatever comes of the call, later ones of its sizes are sound."""
    number = [*TRANSFORMS.values()].index(within)
    pipeline, call = small(name), make(211 + 5 * METHODS.index(name) + number, heads=4, kv_heads=2, kind="stripes")

    def run() -> None:
        with suppress(Exception):
            pipeline.run(call)

    within(run)
    actual = tensors_of(pipeline.run(call))
    with FlopCounterMode(display=False):
        expected = tensors_of(pipeline.run(call))  # by nothing that is kept
    assert all(type(x) is Tensor for x in actual)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


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
