"""Layers that repeat what the first of a step came to: outputs, report and metrics are those of layers that all run."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.serving.attend import run
from sparseprefill.adapters.serving.layer import Layer
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.parts import Batch, Part
from sparseprefill.adapters.serving.requests import Row
from sparseprefill.adapters.serving.runtime import Runtime
from sparseprefill.adapters.serving.tally import Served, Tally
from sparseprefill.adapters.session import repeat as module
from sparseprefill.adapters.session.session import Prefill, Session
from sparseprefill.adapters.vllm.options import parse
from torch import Tensor

import sparseprefill as sp
from helpers.examples import few_of
from helpers.sessions import session
from kernels.device import CUDA, DEVICE
from sparseprefill import kernels
from sparseprefill.breakeven.table import Verdict
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.repeat import Step
from sparseprefill.pages import Pages
from sparseprefill.plan import Remark
from sparseprefill.profiles.identity import ModelIdentity

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HEADS, KV_HEADS, SIZE, PAGE, LAYERS = 2, 1, 64, 16, 4
HOSTS, SMALL = 7.0, "too small"
Asked = tuple[int, int, str]
"""A part of a step: its rows, the keys before them, and what runs it: "main", "other", or the host."""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do the work on a CPU too."""
    for name in ("serve", "serve_device"):
        monkeypatch.setattr(kernels, name, lambda _: True)


class Counts(Tally):
    """Metrics, kept as they are told."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)
        self.seen: Counter[tuple[str, ...]] = Counter()

    def _count(self, name: str, amount: int, *labels: str) -> None:
        self.seen[name, *labels] += amount


class Gate:
    """Keeps prompts of fewer tokens dense."""

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        return Verdict(call.kv_len >= 20, None, SMALL)


class Spy:
    """An estimator that counts what it is asked."""

    repeats = True

    def __init__(self, estimator: Any) -> None:
        self.inner, self.asked = estimator, 0

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        self.asked += 1
        plan: sp.Plan = self.inner.estimate(call, memory)
        return plan


def pipeline(name: str, spied: bool = False, **parameters: Any) -> sp.Pipeline:
    method = sp.default_registry().get(name)
    made = method.pipeline(**{**method.small, **parameters})
    made = made if CUDA else evolve(made, executor=TritonExecutor())
    return evolve(made, estimator=Spy(made.estimator)) if spied else made


class Reads(Spy):
    """One that does not repeat, since it reads a value. change: of its plan, by the layer."""

    repeats = False

    def __init__(self, estimator: Any, change: Callable[[sp.Plan, int], sp.Plan] = lambda plan, _: plan) -> None:
        super().__init__(estimator)
        self.change = change

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        plan = super().estimate(call, memory)
        return self.change(plan, call.layer) if float(call.q.abs().sum()) > 0 else plan


class Engine:
    """Layers of a server over made-up numbers, the same for each engine. repeats: hand slots over."""

    def __init__(self, repeats: bool, main: sp.Pipeline, other: sp.Pipeline | None = None, **options: Any) -> None:
        self.repeats, self.counts = repeats, (Counts(), Counts())
        options = {"min_query": 2, "tail": 8, "recall_every": 0, **options}
        whole = ModelIdentity(
            name="m", architecture="M", layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE, digest="d"
        )
        made = [
            session(one, told=counts.ran, **options)
            for one, counts in zip((main, other or main), self.counts, strict=True)
        ]
        profiles = {"other": Served(made[1], self.counts[1])}
        parsed = parse({"sparseprefill": {"method": "dense", "min_query": 2}})
        self.mine = Runtime(parsed, made[0], Model(whole, whole, "M", "STOCK", 0), self.counts[0], profiles)
        self.steps, self.stocks = 0, list[tuple[int, int]]()

    @property
    def session(self) -> Session:
        return self.mine.session

    def parts(self, asked: Sequence[Asked]) -> Iterator[Part]:
        begin = 0
        for i, (rows, before, who) in enumerate(asked):
            where = (i, i + 1, begin, begin + rows)
            begin += rows
            if who == "host":
                yield Part(*where)
                continue
            served = self.mine.main if who == "main" else self.mine.profiles[who]
            keys = before + rows
            chunk = served.tally.chunk(rows, keys)
            chunk.layers = LAYERS
            yield Part(*where, Row(before, keys, f"{self.steps}-{i}", keys), Prefill(), chunk, served)

    def step(self, *asked: Asked, layers: Sequence[int] = range(LAYERS)) -> tuple[list[Tensor], Batch]:
        """The output of each layer."""
        self.steps += 1
        parts = Batch(self.parts(asked))
        return [self.layer(parts, asked, index) for index in layers], parts

    def layer(self, parts: Batch, asked: Sequence[Asked], index: int) -> Tensor:
        source = torch.Generator().manual_seed(100 * self.steps + index)
        counts = [-(-(rows + before) // PAGE) for rows, before, _ in asked]
        query = 2 * torch.randn(parts[-1].end, HEADS, SIZE, generator=source).to(DEVICE)
        cache = torch.randn(sum(counts), PAGE, KV_HEADS, 2 * SIZE, generator=source).to(DEVICE)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        shuffled = torch.Generator().manual_seed(self.steps)
        for line, some in zip(table, torch.randperm(sum(counts), generator=shuffled).split(counts), strict=True):
            line[: len(some)] = some
        table, output = table.to(DEVICE), torch.full_like(query, torch.nan)

        def read(part: Part) -> Pages:
            assert part.row is not None
            k, v = cache.split(SIZE, -1)
            return Pages(k, v, table[part.first, : counts[part.first]], part.row.end)

        def stock(part: Part, rows: Tensor, out: Tensor) -> None:
            self.stocks.append((index, part.first))
            out.fill_(HOSTS)

        slots = (query, output, cache, table) if self.repeats else ()
        facts = Layer(index, SIZE**-0.5, None, None, None)
        if not run(self.mine, facts, parts, query, output, slots, read, stock, slow=False):
            output.fill_(HOSTS)
        return output

    def told(self) -> list[Any]:
        """All that is told of what ran."""
        reports = [one.session.report("M", "STOCK") for one in self.mine.every]
        return [*reports, *(counts.seen for counts in self.counts)]


def pair(make: Callable[[bool], Engine], *steps: Sequence[Asked]) -> tuple[Engine, Engine]:
    """Engines that ran the same steps, by repetition and without, and came to the same."""
    repeated, plain = make(True), make(False)
    for asked in steps:
        one, other = (engine.step(*asked) for engine in (repeated, plain))
        assert all(map(torch.equal, one[0], other[0]))
        for mine, its in zip(one[1], other[1], strict=True):
            if mine.chunk is not None and its.chunk is not None:
                assert (its.chunk.sparse, its.chunk.reasons, True) == (
                    mine.chunk.sparse,
                    mine.chunk.reasons,
                    mine.chunk.settled,
                )
    return repeated, plain


def same(repeated: Engine, plain: Engine) -> None:
    for one, other in zip(repeated.told(), plain.told(), strict=True):
        assert other == one


@pytest.fixture
def repetitions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that were repeated."""
    found: list[int] = []
    plain = Step.run

    def counted(self: Step, slots: Sequence[Tensor], layer: int) -> list[Tensor]:
        found.append(layer)
        return plain(self, slots, layer)

    monkeypatch.setattr(Step, "run", counted)
    return found


REPORTED: dict[str, Callable[[], sp.Pipeline]] = {
    "streaming": partial(pipeline, "streaming"),
    "rowmax": partial(pipeline, "rowmax"),
    "skip-softmax": partial(pipeline, "skip-softmax"),
    "bfla with a floor": partial(pipeline, "bfla", recall=0.8),
}


@pytest.mark.parametrize("case", few_of(REPORTED, ("streaming", "skip-softmax", "bfla with a floor")))
def test_report_and_metrics_are_those_of_layers_that_all_run(case: str, repetitions: list[int]) -> None:
    method = REPORTED[case]()
    engines = pair(lambda repeats: Engine(repeats, method), [(24, 16, "main")], [(24, 16, "main")], [(9, 40, "main")])
    same(*engines)
    assert [1, 2, 3, 0, 1, 2, 3, 1, 2, 3] == repetitions
    (found, *_) = engines[0].told()
    assert {(layer, 3) for layer in range(LAYERS)} == {(one.layer, one.sparse_calls) for one in found.layers}
    assert all(one.density is not None and 0 < one.density <= 1 for one in found.layers)


def reading(name: str, change: Callable[[sp.Plan, int], sp.Plan] | None = None, **parameters: Any) -> sp.Pipeline:
    made = pipeline(name, **parameters)
    return evolve(made, estimator=Reads(made.estimator, *(() if change is None else (change,))))


ASKED: dict[str, tuple[str, float | None]] = {
    "streaming": ("streaming", None),
    "rowmax": ("rowmax", None),
    "bfla, floor": ("bfla", 0.8),
    "anchor-attention": ("anchor-attention", None),
}


@pytest.mark.parametrize("case", few_of(ASKED, ("rowmax",)))
def test_a_stage_that_does_not_repeat_is_asked_in_each_layer_and_the_rest_is_repeated(
    case: str, repetitions: list[int]
) -> None:
    name, recall = ASKED[case]
    methods = [reading(name, recall=recall) for _ in range(2)]
    steps = [(24, 16, "main")], [(20, 17, "main"), (33, 0, "main"), (1, 40, "main")]
    same(*pair(lambda repeats: Engine(repeats, methods[repeats]), *steps))
    assert {1, 2, 3} == set(repetitions)
    spies: list[Any] = [one.estimator for one in methods]
    assert spies[0].asked == spies[1].asked == LAYERS * 4


def test_plans_that_differ_in_each_layer_are_not_recorded_for_ever(
    monkeypatch: pytest.MonkeyPatch, repetitions: list[int]
) -> None:
    monkeypatch.setattr(module, "MOST", 6)
    seen = Counter[bool]()

    def other(repeats: bool, plan: sp.Plan, _: int) -> sp.Plan:
        seen[repeats] += 1
        return plan.keep(sink=seen[repeats])

    methods = [reading("streaming", partial(other, repeats)) for repeats in (False, True)]
    repeated, plain = pair(
        lambda repeats: Engine(repeats, methods[repeats]), *[[(24, 16 + i, "main")] for i in range(4)]
    )
    same(repeated, plain)
    assert ([], True) == (repetitions, repeated.session._varying.varied)
    assert 4 * LAYERS == methods[True].estimator.asked  # type: ignore[attr-defined]


def test_a_plan_without_a_value_runs_plainly(repetitions: list[int]) -> None:
    def late(plan: sp.Plan, _: int) -> sp.Plan:
        mask = plan.mask
        return sp.Plan(lambda: mask)

    methods = [reading("streaming", late) for _ in range(2)]
    same(*pair(lambda repeats: Engine(repeats, methods[repeats]), [(24, 16, "main")]))
    spies: list[Any] = [one.estimator for one in methods]
    assert ([], LAYERS, LAYERS) == (repetitions, spies[0].asked, spies[1].asked)


def test_a_remark_is_of_its_own_layer() -> None:
    def remarking(plan: sp.Plan, layer: int) -> sp.Plan:
        return plan if layer % 2 else evolve(plan, notes={"why": Remark(f"layer {layer}")})

    methods = [reading("streaming", remarking) for _ in range(2)]
    repeated, plain = pair(lambda repeats: Engine(repeats, methods[repeats]), [(24, 16, "main")], [(24, 16, "main")])
    same(repeated, plain)
    assert {"layer 0 to 2": 4} == dict(repeated.session.report("M", "STOCK").notes)


def test_a_stage_that_fails_or_objects_in_a_later_layer_falls_back_as_it_would(repetitions: list[int]) -> None:
    def fails(plan: sp.Plan, layer: int) -> sp.Plan:
        if layer == 2:
            raise sp.UnsupportedCallError(["no such layer"])
        if layer == 3:
            raise ValueError("no such plan")
        return plan

    methods = [reading("streaming", fails) for _ in range(2)]
    repeated, plain = (Engine(repeats, methods[repeats]) for repeats in (True, False))
    outputs = [one.step((24, 16, "main"))[0] for one in (repeated, plain)]
    assert all(map(torch.equal, *outputs))
    assert [2, 3] == [layer for layer, _ in repeated.stocks]
    assert repeated.counts[0].seen == plain.counts[0].seen
    reports = [one.session.report("M", "STOCK") for one in (repeated, plain)]
    assert reports[0].layers == reports[1].layers
    assert [1] == repetitions


def test_the_next_step_of_its_sizes_asks_no_stage(repetitions: list[int]) -> None:
    engine = Engine(True, pipeline("streaming", spied=True))
    spy: Any = engine.session.route.known[0].estimator
    for expected in (1, 1, 2):
        engine.step((24, 16 if expected == 1 else 17, "main"))
        assert expected == spy.asked


def test_several_requests_share_a_launch_and_keep_their_own_records(repetitions: list[int]) -> None:
    method = pipeline("streaming")
    asked = [(20, 17, "main"), (33, 0, "main"), (1, 40, "main")]
    same(*pair(lambda repeats: Engine(repeats, method), asked, asked))
    assert [1, 2, 3, 0, 1, 2, 3] == repetitions


def test_wishes_dense_parts_and_small_prompts_in_one_batch(repetitions: list[int]) -> None:
    methods, gate = (pipeline("streaming"), pipeline("bfla")), Gate()
    asked = [(20, 20, "main"), (5, 4, "main"), (11, 0, "host"), (30, 3, "other"), (25, 30, "main"), (7, 7, "other")]
    repeated, plain = pair(lambda repeats: Engine(repeats, *methods, gate=gate), asked, asked)
    same(repeated, plain)
    assert 2 * 2 * LAYERS - 2 == len(repetitions)
    assert sorted(plain.stocks) == sorted(repeated.stocks)
    report = repeated.session.report("M", "STOCK")
    assert (4, 2) == (report.layers[3].sparse_calls, report.layers[3].dense_calls)


def test_two_methods_of_one_session_keep_to_their_own_requests(
    monkeypatch: pytest.MonkeyPatch, repetitions: list[int]
) -> None:
    """As a profile by length gives them; where one of them fails, its own requests are computed anew."""
    one, other = pipeline("streaming").with_tail(8), pipeline("bfla").with_tail(8)

    def choose(self: Session, call: sp.AttentionCall, prefill: Prefill) -> sp.Pipeline:
        return one if call.q.shape[2] % 2 else other

    monkeypatch.setattr(Session, "_choose", choose)
    asked = [(21, 16, "main"), (30, 3, "main"), (25, 8, "main"), (18, 2, "main")]
    same(*pair(lambda repeats: Engine(repeats, one), asked))
    assert [1, 1, 2, 2, 3, 3] == repetitions
    repeated, plain = Engine(True, one), Engine(False, one)
    counted, calls = Step.run, list[int]()

    def fails(self: Step, slots: Sequence[Tensor], layer: int) -> list[Tensor]:
        calls.append(layer)
        if calls.count(2) == 2 and layer == 2:
            raise RuntimeError("no such launch")
        return counted(self, slots, layer)

    monkeypatch.setattr(Step, "run", fails)
    outputs = [engine.step(*asked)[0] for engine in (repeated, plain)]
    assert all(map(torch.equal, *outputs))
    assert plain.counts[0].seen == repeated.counts[0].seen


@pytest.mark.parametrize("failing", [{2}, {1, 2, 3}, {3}], ids=str)
@pytest.mark.parametrize("parts", [1, 2], ids=["one service", "two services"])
def test_a_launch_that_fails_in_a_later_layer_is_computed_anew_with_a_note(
    failing: set[int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it has been written, and nothing of it is recorded."""
    methods = pipeline("streaming"), pipeline("bfla")
    asked = [(20, 17, "main"), (30, 3, "other")][:parts]
    repeated, plain = Engine(True, *methods), Engine(False, *methods)
    works = Step.run

    def fails(self: Step, slots: Sequence[Tensor], layer: int) -> list[Tensor]:
        if layer not in failing:
            return works(self, slots, layer)
        works(evolve(self, work=self.work[: len(self.work) // 2], results=()), slots, layer)
        raise RuntimeError("no such launch")

    monkeypatch.setattr(Step, "run", fails)
    outputs = [engine.step(*asked)[0] for engine in (repeated, plain)]
    assert all(map(torch.equal, *outputs))
    assert all(a.seen == b.seen for a, b in zip(repeated.counts, plain.counts, strict=True))
    for mine, its in zip(repeated.mine.every[:parts], plain.mine.every, strict=False):
        found, expected = (one.session.report("M", "STOCK") for one in (mine, its))
        assert [one.sparse_calls for one in expected.layers] == [one.sparse_calls for one in found.layers]
        assert expected.layers == found.layers
        (note,) = found.notes
        assert "could not be repeated in the next, which ran it anew: RuntimeError: no such launch" in note


def test_what_fails_while_it_is_recorded_is_not_tried_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.kernels import recording

    engine, plain = (Engine(repeats, pipeline("streaming")) for repeats in (True, False))
    tries: list[int] = []

    def record(run: Callable[[], Any], slots: Sequence[Tensor], room: int) -> Any:
        tries.append(len(slots))
        run()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recording, "record", record)
    outputs = [one.step((24, 16, "main"))[0] for one in (engine, plain)]
    assert all(map(torch.equal, *outputs))
    same(engine, plain)
    assert [4] == tries


def test_a_call_of_tensors_that_are_no_slots_is_not_repeated(repetitions: list[int]) -> None:
    """Other layers have others, and nobody would see it."""
    made, prefill = session(pipeline("streaming"), tail=0, recall_every=0), Prefill()
    q, k, out = (torch.randn(1, HEADS, 24, SIZE, device=DEVICE) for _ in range(3))
    for slots, expected in (((q, out), 0), ((q, k), 0), ((q, k, out), 1)):
        repeats: list[module.Repeat] = []
        made.run_many([(sp.AttentionCall(q, k, k), prefill, None)], [out], slots, repeats)
        assert expected == len(repeats)


def test_watched_requests_and_strict_records_run_plainly(repetitions: list[int]) -> None:
    ways: tuple[dict[str, Any], ...] = ({"measure": True}, {"recall_every": 1}, {"observe": lambda call, result: None})
    for options in ways:
        method = pipeline("streaming")
        same(*pair(lambda repeats: Engine(repeats, method, **options), [(24, 16, "main")]))  # noqa: B023
    assert [] == repetitions


def test_layers_that_are_not_chosen_stay_dense(repetitions: list[int]) -> None:
    method = pipeline("streaming")
    repeated, plain = pair(lambda repeats: Engine(repeats, method, layers=(0, 3)), [(24, 16, "main")])
    same(repeated, plain)
    assert [3] == repetitions


def test_chunks_of_a_longer_prompt_find_the_recording() -> None:
    """Where the prompt ends beyond reach does not matter; where it ends within the tail does."""
    call = sp.AttentionCall(*torch.randn(3, 1, HEADS, 24, SIZE))
    method = pipeline("streaming").with_tail(8)
    ends = [
        module.shortened(method, evolve(call, prompt_lengths=24 + more)).prompt_lengths
        for more in (0, 100, 1 << 17, 1 << 20)
    ]
    assert [24, 124, 24 + (1 << 16) + 8, 24 + (1 << 16) + 8] == ends


@pytest.mark.gpu
def test_threads_repeat_their_own_layers() -> None:
    method = pipeline("rowmax")
    plain = Engine(False, method).step((240, 160, "main"))[0]
    engines = [Engine(True, method) for _ in range(4)]
    found: dict[int, list[Tensor]] = {}

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[n] = engines[n].step((240, 160, "main"))[0]
            torch.cuda.current_stream().synchronize()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    for n in range(4):
        assert all(map(torch.equal, plain, found[n]))
