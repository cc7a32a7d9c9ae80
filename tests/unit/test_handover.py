"""What stages are given and hand over: nothing is written to, every field fits, and the error names who is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.mask.lists import IndexLists
from sparseprefill.memory import Memory
from sparseprefill.plan import Kernel, Parts, Rounding, Skipped
from sparseprefill.testing import check_laws
from sparseprefill.testing.contracts import LAWS

NAME = "third"


@frozen(eq=False)
class Mine:
    """An estimator made of a function; also a refiner, a corrector and an observer that do something first."""

    plan: Callable[[sp.AttentionCall], Any]
    grain = 16
    head_scope = "head"

    def estimate(self, call: sp.AttentionCall, memory: Memory) -> Any:
        return self.plan(call)


@frozen(eq=False)
class Does:
    """A stage of every other kind that does something to what it is given."""

    act: Callable[..., Any]

    def refine(self, call: Any, plan: Any, memory: Any) -> Any:
        self.act(call, plan, None)
        return plan

    def correct(self, call: Any, plan: Any, result: Any, memory: Any) -> Any:
        self.act(call, plan, result)
        return result

    def observe(self, call: Any, plan: Any, result: Any, memory: Any) -> None:
        self.act(call, plan, result)

    def execute(self, call: Any, plan: Any) -> Any:
        self.act(call, plan, None)
        return sp.ReferenceExecutor().execute(call, plan)

    def accumulate(self, call: Any, plan: Any) -> Any:
        self.act(call, plan, None)
        return sp.ReferenceExecutor().accumulate(call, plan)

    def execute_into(self, call: Any, plan: Any, out: Any, lse: Any) -> Any:
        self.act(call, plan, None)
        return sp.ReferenceExecutor().execute_into(call, plan, out, lse)

    def execute_many(self, calls: Any, plans: Any) -> Any:
        self.act(calls[-1], plans[-1], None)
        return [sp.ReferenceExecutor().execute(call, plan) for call, plan in zip(calls, plans, strict=True)]

    def execute_many_into(self, calls: Any, plans: Any, outs: Any) -> Any:
        made = self.execute_many(calls, plans)
        return [evolve(one, out=out.copy_(one.out)) for one, out in zip(made, outs, strict=True)]


def fresh(length: int = 96, batch: int = 1, **options: Any) -> sp.AttentionCall:
    return make(length, batch=batch, heads=4, kv_heads=2, **options)


def near(call: sp.AttentionCall) -> sp.Plan:
    return sp.Plan(sp.SparseMask.from_rules(call, 16, sink=1, band=1))


def kept(call: sp.AttentionCall) -> sp.Plan:
    """A plan with every tensor that a plan may have."""
    region = sp.SparseMask.from_rules(call, 16, band=0)
    carry = sp.Carry(sp.ReferenceExecutor().accumulate(call, sp.Plan(region)), region)
    mask = sp.SparseMask.full(call, 16) - region
    return sp.Plan(mask, carry, probe=torch.zeros(1, 4, dtype=torch.bool), skip_below=torch.zeros(1))


WRITES: dict[str, Callable[..., Any]] = {
    "call.q": lambda call, plan, result: call.q.mul_(2),
    "call.k": lambda call, plan, result: call.k[:, :, 3:].zero_(),
    "call.v": lambda call, plan, result: call.v.detach().add_(1),
    "call.sinks": lambda call, plan, result: call.sinks.sub_(1),
    "call.lengths": lambda call, plan, result: call.lengths.fill_(96),
}
TO_PLANS: dict[str, Callable[..., Any]] = {
    "plan.probe": lambda call, plan, result: plan.probe.logical_not_(),
    "plan.skip_below": lambda call, plan, result: plan.skip_below.add_(0.5),
    "plan.carry.state.m": lambda call, plan, result: plan.carry.state.m.add_(1),
    "plan.carry.state.acc": lambda call, plan, result: plan.carry.state.acc.mul_(2),
}
TO_RESULTS: dict[str, Callable[..., Any]] = {
    "result.out": lambda call, plan, result: result.out.mul_(2),
    "result.lse": lambda call, plan, result: result.lse.add_(1),
}


def pipeline_of(role: str, act: Callable[..., Any], plan: Callable[..., Any] = kept) -> sp.Pipeline:
    def writes(call: sp.AttentionCall) -> sp.Plan:
        act(call, None, None)
        made: sp.Plan = plan(call)
        return made

    if role == "estimate":
        return sp.Pipeline(Mine(writes), name=NAME)
    stage, options = Does(act), dict[str, Any](executor=sp.ReferenceExecutor(), name=NAME)
    by_role: dict[str, dict[str, Any]] = {
        **{"refine": {"refiners": (stage,)}, "execute": {"executor": stage}},
        **{"correct": {"corrector": stage}, "observe": {"observers": (stage,)}},
    }
    return sp.Pipeline(Mine(plan), **{**options, **by_role[role]})


CASES = [
    *((role, name) for role in ("estimate", "refine", "execute", "correct", "observe") for name in WRITES),
    *((role, name) for role in ("refine", "execute", "correct", "observe") for name in TO_PLANS),
    *((role, name) for role in ("correct", "observe") for name in TO_RESULTS),
]


def full(**options: Any) -> sp.AttentionCall:
    return fresh(sinks=torch.zeros(4), lengths=int32(90), **options)


@pytest.mark.parametrize(("role", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_stage_that_writes_in_place_is_named(role: str, name: str) -> None:
    act = (WRITES | TO_PLANS | TO_RESULTS)[name]
    who = "Mine" if role == "estimate" else "Does"
    with pytest.raises(sp.StageError, match=rf"^third: {who}\.{role}\(\) wrote to {name} in place: it must leave"):
        pipeline_of(role, act).run(full())
    with pytest.raises(AssertionError, match=rf"{who}\.{role}\(\) wrote to {name} in place"):
        check_laws(pipeline_of(role, act), tuple(LAWS), calls=[full()])


@pytest.mark.parametrize("verb", ["accumulate", "execute_into", "execute_many", "execute_many_into"])
def test_whatever_an_executor_is_asked(verb: str) -> None:
    call, plan = fresh(), near
    stage = pipeline_of("execute", WRITES["call.q"], near).executing
    into = torch.empty_like(call.q), torch.empty(1, 4, 96)
    asked: dict[str, Callable[[], Any]] = {
        "accumulate": lambda: stage.accumulate(call, plan(call)),
        "execute_into": lambda: stage.execute_into(call, plan(call), *into),
        "execute_many": lambda: stage.execute_many([call, call], [plan(call), plan(call)]),
        "execute_many_into": lambda: stage.execute_many([call, call], [plan(call), plan(call)], [into[0]] * 2),
    }
    with pytest.raises(sp.StageError, match=rf"third: Does\.{verb}\(\) wrote to call\.q in place"):
        asked[verb]()


def test_tensors_of_inference_mode_have_no_versions() -> None:
    with torch.inference_mode():
        call = fresh()
        assert call.q.is_inference()
        assert not sp.Pipeline(Mine(near), name=NAME).run(call).lse.isnan().any()


@pytest.mark.parametrize("hides", [lambda x: x.data, lambda x: x.numpy()], ids=["data", "numpy"])
@pytest.mark.parametrize("role", ["estimate", "refine", "execute", "correct", "observe"])
def test_the_law_sees_what_torch_does_not_count(role: str, hides: Callable[[Any], Any]) -> None:
    def act(call: Any, plan: Any, result: Any) -> None:
        hides(call.v)[:] = 1

    with pytest.raises(AssertionError, match=r"law 'what is given stays as it is' is broken .* wrote to v"):
        check_laws(pipeline_of(role, act, near), ("what is given stays as it is",), calls=[fresh()])


def test_the_law_sees_a_mask_that_is_written_to() -> None:
    def act(call: Any, plan: Any, result: Any) -> None:
        plan.mask.tile_map()[:] = True

    with pytest.raises(AssertionError, match="Does wrote to the mask of the plan it got"):
        check_laws(pipeline_of("refine", act, near), ("what is given stays as it is",), calls=[fresh()])


def scored(tiles: Any, tile_q: Any = 16, **options: Any) -> Callable[[sp.AttentionCall], sp.Plan]:
    given = {"tiles": tiles, "tile_q": tile_q, "tile_k": 16, **options}
    return lambda call: evolve(near(call), priority=sp.PriorityScores(**given))


class Own(sp.Priority):
    """Scores of a stranger's class."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def tile_scores(self, call: Any, tile_q: int, tile_k: int) -> Any:
        return self.answer()

    def column_scores(self, call: Any, position: Any, heads: slice) -> Any:
        return self.answer()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="meta")


def lists(**changes: Any) -> Callable[[sp.AttentionCall], sp.Plan]:
    def plan(call: sp.AttentionCall) -> sp.Plan:
        mask = sp.SparseMask.full(call, 16)
        assert mask.tiles is not None
        parts: dict[str, Any] = {
            "counts": mask.tiles.counts,
            "offsets": mask.tiles.offsets,
            "indices": mask.tiles.indices,
        } | changes
        return sp.Plan(evolve(mask, tiles=IndexLists(**parts)))

    return plan


def state_of(**changes: Any) -> Callable[[sp.AttentionCall], sp.Plan]:
    def plan(call: sp.AttentionCall) -> sp.Plan:
        plan = kept(call)
        assert plan.carry is not None
        return evolve(plan, carry=evolve(plan.carry, state=evolve(plan.carry.state, **changes)))

    return plan


BLAMED: dict[str, tuple[Callable[[sp.AttentionCall], Any], str]] = {
    "tiles of another size": (scored(torch.rand(1, 4, 3, 3)), r"PriorityScores\.tiles is a Tensor .*\(1, 4, 3, 3\)"),
    "tiles of other heads": (scored(torch.rand(1, 3, 6, 6)), r"PriorityScores\.tiles .*\(1, 3, 6, 6\): it must be"),
    "tiles elsewhere": (scored(meta(1, 4, 6, 6)), r"PriorityScores\.tiles is on meta: it must be on the call's device"),
    "tiles of int": (
        scored(torch.ones(1, 4, 6, 6, dtype=torch.int32)),
        r"PriorityScores\.tiles is a Tensor of torch.int",
    ),
    "tiles from None": (scored(lambda call: None), r"PriorityScores\.tiles is None: it must be a float tensor"),
    "tiles that raise": (scored(lambda call: 1 // 0), r"PriorityScores\.tiles raised ZeroDivisionError"),
    "tiles of a function elsewhere": (scored(lambda call: meta(1, 4, 6, 6)), r"PriorityScores\.tiles is on meta"),
    "a tile of nothing": (scored(torch.rand(1, 4, 6, 6), 0), r"PriorityScores\.tile_q is 0: pass a positive number"),
    "a tile of 2^40": (scored(torch.rand(1, 4, 6, 6), 1 << 40), r"PriorityScores\.tile_q is 1099511627776: pass"),
    "columns of other keys": (
        lambda call: evolve(near(call), priority=sp.PriorityScores(columns=torch.rand(1, 4, 1, 95))),
        r"PriorityScores\.columns is a Tensor .*\(1, 4, 1, 95\): it must be .*\[1, 4, 1, 96\] for one group",
    ),
    "own scores that raise": (
        lambda call: evolve(near(call), priority=Own(lambda: dict[int, int]()[1])),
        r"Own\.tile_scores\(\) raised",
    ),
    "own scores of nothing": (lambda call: evolve(near(call), priority=Own(lambda: 3)), r"Own\.tile_scores\(\) is 3"),
    "a map elsewhere": (
        lambda call: sp.Plan(sp.SparseMask.from_tiles(call, meta(1, 4, 6, 6, dtype=torch.bool), 16)),
        "keep is on meta: move it to the call's device cpu",
    ),
    "columns elsewhere": (
        lambda call: sp.Plan(sp.SparseMask.from_stripes(call, meta(1, 4, 1, 96, dtype=torch.bool), 6, 16)),
        "keep is on meta: move it to the call's device cpu",
    ),
    "lists elsewhere": (
        lists(
            counts=meta(1, 4, 6, dtype=torch.int32),
            offsets=meta(1, 4, 6, dtype=torch.int64),
            indices=meta(6, dtype=torch.int32),
        ),
        r"SparseMask\.tiles has lists on meta",
    ),
    "indices elsewhere": (lists(indices=meta(6, dtype=torch.int32)), r"IndexLists\.indices is on meta"),
    "lists that descend": (lists(indices=torch.arange(6, dtype=torch.int32).flip(0)), "must hold ascending, distinct"),
    "a probe elsewhere": (
        lambda call: evolve(near(call), probe=meta(1, 4, dtype=torch.bool)),
        r"Plan\.probe is on meta",
    ),
    "thresholds elsewhere": (lambda call: evolve(near(call), skip_below=meta(1)), r"Plan\.skip_below is on meta"),
    "notes that are none": (lambda call: evolve(near(call), notes=["x"]), r"Plan\.notes is list"),  # type: ignore[arg-type]
    "a plan of another device": (
        lambda call: near(evolve(call, q=meta(1, 4, 96, 8), k=meta(1, 2, 96, 8), v=meta(1, 2, 96, 8))),
        "on meta; the call is",
    ),
    "sums of half": (
        state_of(l=torch.ones(1, 4, 96, dtype=torch.float16)),
        r"SoftmaxState\.l is a Tensor of torch.float16",
    ),
    "sums of another type": (state_of(l=torch.ones(1, 4, 96).double()), r"SoftmaxState\.l is torch.float64"),
    "values of another size": (state_of(acc=torch.zeros(1, 4, 96, 7)), r"Plan\.carry\.state has acc .*\(1, 4, 96, 7\)"),
    "a bad call": (lambda call: near(evolve(call, window=-1)), r"AttentionCall\.window is -1"),
}


@pytest.mark.parametrize("case", BLAMED.values(), ids=BLAMED)
def test_what_an_estimator_leaves_is_laid_at_its_door(case: tuple[Callable[[sp.AttentionCall], Any], str]) -> None:
    plan, said = case
    for refiners in ((sp.BudgetCeiling(share=0.4),), (sp.Sink(1), sp.BudgetCeiling(share=0.4))):
        with pytest.raises(sp.SparsePrefillError, match=rf"^third: Mine\.estimate\(\).*{said}"):
            sp.Pipeline(Mine(plan), refiners, name=NAME).run(fresh())


def test_scores_that_a_refiner_left_are_its_own() -> None:
    class Leaves:
        def refine(self, call: Any, plan: Any, memory: Any) -> Any:
            return evolve(plan, priority=sp.PriorityScores(columns=lambda call: 1 // 0))  # type: ignore[arg-type]

    made = sp.Pipeline(Mine(near), (Leaves(), sp.BudgetCeiling(share=0.4)), name=NAME)
    with pytest.raises(
        sp.StageError, match=r"^third: Leaves\.refine\(\) left scores .* PriorityScores\.columns raised"
    ):
        made.run(fresh())


def test_scores_of_a_function_are_made_for_each_call() -> None:
    """One estimator, one object of scores: each call is ranked by its own, and by no more than one making."""
    made: list[sp.AttentionCall] = []

    def tiles(call: sp.AttentionCall) -> torch.Tensor:
        made.append(call)
        logits = call.q[:, :, ::16] @ call.k[:, :, ::16].repeat_interleave(call.group, 1).transpose(-1, -2)
        return logits.softmax(-1)

    def build(**options: Any) -> sp.Pipeline:
        priority = sp.PriorityScores(tiles=tiles, tile_q=16, tile_k=16)
        estimator = Mine(lambda call: sp.Plan(sp.SparseMask.full(call, 16), priority=priority))
        return sp.Pipeline(estimator, (sp.BudgetCeiling(share=0.5),) * 2, name=NAME, **options)

    calls, pipeline = [fresh(256), fresh(256, seed=1), fresh(64)], build()
    for call in (*calls, *calls[1::-1]):
        made.clear()
        found = pipeline.run(call).mask.to_dense()
        assert [call] == made
        assert torch.equal(build().run(call).mask.to_dense(), found)
    cut = build(workspace=1 << 12).run(calls[0])
    assert cut.parts is not None
    assert torch.equal(build().run(calls[0]).mask.to_dense(), cut.mask.to_dense())


def changed(**changes: Any) -> sp.Pipeline:
    class Odd:
        def execute(self, call: Any, plan: Any) -> Any:
            return evolve(sp.ReferenceExecutor().execute(call, plan), **changes)

        accumulate = execute

    return sp.Pipeline(Mine(near), executor=Odd(), name=NAME)


HEADS = torch.zeros(1, 4, dtype=torch.int64)
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "lse in half": ({"lse": torch.zeros(1, 4, 96).half()}, "lse is torch.float16: it must be torch.float32"),
    "lse in double": ({"lse": torch.zeros(1, 4, 96).double()}, "lse is torch.float64: it must be torch.float32"),
    "probe of another size": (
        {"probe": torch.zeros(1, 4, 6, 5)},
        r"probe is .*\(1, 4, 6, 5\): it must be None, or float32",
    ),
    "probe of text": ({"probe": "x"}, "probe is 'x': it must be None"),
    "skipped of text": ({"skipped": "x"}, "skipped is 'x': it must be None, or a Skipped"),
    "skipped of floats": ({"skipped": Skipped(HEADS.float(), 1, 1, 1)}, "skipped is .*whose pairs are int64"),
    "parts elsewhere": ({"parts": Parts(fresh().geometry, 1, HEADS.to("meta"))}, "parts is .*whose pairs are int64"),
    "rounded": ({"rounded": Rounding("int8", HEADS, 0.1)}, "rounded is .*it must be None, or a Rounding"),
    "dense": ({"dense": None}, "dense is None: it must be a text"),
    "kernels of text": ({"kernels": ("x",)}, r"kernels is \('x',\): it must be a tuple of Kernels"),
    "kernels in a list": ({"kernels": [Kernel("x")]}, "kernels is .*: it must be a tuple of Kernels"),
    "a plan of another call": ({"plan": near(fresh(64))}, "plan is one for .*it must be one for the call"),
    "a sparse output": ({"out": torch.zeros(1, 4, 96, 8).to_sparse()}, "out is a Tensor"),
}


@pytest.mark.parametrize("case", RESULTS.values(), ids=RESULTS)
def test_every_field_of_a_result_is_looked_at(case: tuple[dict[str, Any], str]) -> None:
    changes, said = case
    with pytest.raises(sp.StageError, match=rf"^third: Odd\.execute\(\) returned a Result whose {said}"):
        changed(**changes).run(fresh())


def test_a_state_of_another_size() -> None:
    other = sp.ReferenceExecutor().accumulate(fresh(64), near(fresh(64)))
    stage: Any = type("Odd", (), {"execute": lambda *_: None, "accumulate": lambda *_: other})()
    made = sp.Pipeline(Mine(near), executor=stage, name=NAME)
    with pytest.raises(sp.StageError, match=r"^third: Odd\.accumulate\(\) returned a SoftmaxState that has acc"):
        made.executing.accumulate(fresh(), near(fresh()))


def test_a_row_without_a_key_is_an_error_on_a_cpu() -> None:
    def empty(call: sp.AttentionCall) -> sp.Plan:
        keep = torch.ones(call.geometry.map_shape(16, 16), dtype=torch.bool)
        keep[:, -1, 3] = False
        return sp.Plan(sp.SparseMask.from_tiles(call, keep, 16, diagonal=False))

    said = r"^third: Mine left query rows without a key.*batch row 0, head [03], query row 48 is the first"
    ways: tuple[Callable[[sp.Pipeline], object], ...] = (
        lambda made: made.run(fresh()),
        lambda made: made.run_many([fresh(), fresh()]),
        lambda made: evolve(made, workspace=1).run(fresh()),
    )
    for run in ways:
        with pytest.raises(sp.StageError, match=said):
            run(sp.Pipeline(Mine(empty), executor=sp.ReferenceExecutor(), name=NAME))
    assert sp.Pipeline(Mine(empty), (sp.LocalBand(0),), name=NAME).run(fresh()).lse.isfinite().all()


def test_rows_whose_logits_are_all_minus_infinity_have_keys() -> None:
    call = fresh()
    k = call.k.clone()
    k[...] = -torch.inf
    call = evolve(call, q=call.q.abs() + 1, k=k)
    assert sp.Pipeline(Mine(near), executor=sp.ReferenceExecutor(), name=NAME).run(call).lse.isneginf().all()


@pytest.mark.parametrize("stripes", [False, True])
def test_pairs_of_mask_and_carry_count_once(stripes: bool) -> None:
    def overlapping(call: sp.AttentionCall) -> sp.Plan:
        plan, column = kept(call), torch.arange(96) == 5
        extra = sp.SparseMask.from_stripes(call, column, 1, 16, diagonal=False)
        return evolve(plan, mask=plan.mask | extra if stripes else sp.SparseMask.full(call, 16))

    said = r"^third: Mine\.estimate\(\): Plan\.mask holds \d+ pairs of the carry region.*they would count twice"
    with pytest.raises(sp.MaskError, match=said):
        sp.Pipeline(Mine(overlapping), name=NAME).run(fresh())

    class Widens:
        def refine(self, call: Any, plan: Any, memory: Any) -> Any:
            return evolve(plan, mask=sp.SparseMask.full(call, 16))

    with pytest.raises(sp.MaskError, match=r"^third: Widens\.refine\(\): Plan\.mask holds"):
        sp.Pipeline(Mine(kept), (sp.Sink(1), Widens()), name=NAME).run(fresh())
    assert sp.Pipeline(Mine(kept), (sp.Sink(1), sp.LocalBand(1)), name=NAME).run(fresh()).density == 1.0


@pytest.mark.parametrize("options", [{}, {"batch": 2, "starts": int32(0, 21)}, {"softcap": 3.0, "window": 40}])
def test_a_carry_of_the_call_before_is_an_error(options: dict[str, Any]) -> None:
    old = []

    def carried(call: sp.AttentionCall) -> sp.Plan:
        region = sp.SparseMask.from_rules(call, 16, band=0)
        old.append(sp.ReferenceExecutor().accumulate(call, sp.Plan(region)))
        return sp.Plan(sp.SparseMask.full(call, 16) - region, sp.Carry(old[0], region))

    made = sp.Pipeline(Mine(carried), name=NAME)
    made.run(fresh(**options))
    with pytest.raises(sp.MaskError, match=r"^third: Mine\.estimate\(\): Plan\.carry\.state is of another call"):
        made.run(fresh(seed=1, **options))
