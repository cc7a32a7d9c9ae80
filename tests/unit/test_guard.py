"""Stages and gates that raise, or answer nonsense: whatever they are asked, the error is ours and names both."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Result, SoftmaxState
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.stages import ExecutorStage

CALL = make(20)
NAME = "my-method"
MODEL = ModelIdentity(name="m", architecture="M", layers=1, heads=2, kv_heads=1, head_dim=8, digest="0")


class MuteError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class MuteOfOursError(sp.SparsePrefillError):
    """One of our tree that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unprintable:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Good:
    """A stage of every kind, with an answer to every question."""

    grain: Any = 1
    head_scope: Any = "head"
    relies_on: Any = ()

    def unsupported(self, call: Any) -> Any:
        return None

    def workspace(self, call: Any) -> Any:
        return 0

    def check_model(self, model: Any) -> Any:
        return None

    def estimate(self, call: Any, memory: Any) -> Any:
        return Plan(SparseMask.full(call, 4))

    def refine(self, call: Any, plan: Any, memory: Any) -> Any:
        return plan

    def execute(self, call: Any, plan: Any) -> Any:
        return sp.ReferenceExecutor().execute(call, plan)

    def execute_into(self, call: Any, plan: Any, out: Any, lse: Any) -> Any:
        return sp.ReferenceExecutor().execute_into(call, plan, out, lse)

    def execute_many(self, calls: Any, plans: Any) -> Any:
        return [sp.ReferenceExecutor().execute(call, plan) for call, plan in zip(calls, plans, strict=True)]

    def execute_many_into(self, calls: Any, plans: Any, outs: Any) -> Any:
        each = zip(self.execute_many(calls, plans), outs, strict=True)
        return [evolve(one, out=out.copy_(one.out)) for one, out in each]

    def accumulate(self, call: Any, plan: Any) -> Any:
        return sp.ReferenceExecutor().accumulate(call, plan)

    def observe(self, call: Any, plan: Any, result: Any, memory: Any) -> Any:
        return None

    def judge(self, call: Any, method: Any) -> Any:
        return sp.Verdict(True)


ROLES = ("estimator", "refiner", "executor", "observer")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "grain": ROLES,
    "head_scope": ROLES,
    "relies_on": ROLES,
    "unsupported": ROLES,
    "workspace": ROLES,
    "check_model": ROLES,
    "estimate": ("estimator",),
    "refine": ("refiner",),
    "execute": ("executor",),
    "execute_into": ("executor",),
    "execute_many": ("executor",),
    "execute_many_into": ("executor",),
    "accumulate": ("executor",),
    "observe": ("observer",),
    "judge": ("gate",),
}
ANSWERS: dict[str, Any] = {
    "none": None,
    "text": "nonsense",
    "nan": float("nan"),
    "infinite": float("inf"),
    "negative": -1,
    "zero": 0,
    "huge": 1 << 63,
    "longer than Python writes": 10**6000,
    "bool": True,
    "float": 1.5,
    "tensor": torch.ones(2, 2),
    "list": ["a reason"],
    "unprintable": Unprintable(),
}
RIGHT = {  # of the answers above, what a question takes
    "grain": {"none"},
    "head_scope": {"none"},
    "relies_on": {"none"},
    "unsupported": {"none", "text"},
    "workspace": {"zero"},
    "check_model": {"none"},
    "observe": {"none"},
}
ERRORS: dict[str, BaseException] = {
    "raises": KeyError("lost"),
    "raises AttributeError": AttributeError("lost"),
    "raises what cannot be printed": MuteError(),
    "raises ours that cannot be printed": MuteOfOursError(),
    "recurses": RecursionError("too deep"),
}
BAD = {f"is {name}": value for name, value in ANSWERS.items()} | ERRORS


def odd(question: str, answer: Any) -> Good:
    """A good stage, but for one answer; an exception is raised."""

    def give(*_: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    given = property(give) if question in ("grain", "head_scope", "relies_on") else give
    odd: Good = type("Odd", (Good,), {question: given})()
    return odd


def build(role: str, stage: Any) -> sp.Pipeline | sp.Route:
    """A pipeline of good stages, but for one; behind a gate where that is the one."""
    stages: dict[str, Any] = {"estimator": Good(), "refiners": (Good(),), "executor": Good(), "observers": (Good(),)}
    if role == "gate":
        found: sp.Pipeline | sp.Route = sp.gated(sp.Pipeline(**stages, name=NAME), stage)
        return found
    key = {"refiner": "refiners", "observer": "observers"}.get(role, role)
    stages[key] = (stage,) if key in ("refiners", "observers") else stage
    return sp.Pipeline(**stages, name=NAME)


def ask(role: str, question: str, stage: Any) -> None:
    """Everything that a host may do with it."""
    made = build(role, stage)
    if isinstance(made, sp.Route):
        made.run(CALL)
        made.worth(CALL)
        return
    made.run(CALL)
    made.run_many([CALL, CALL])
    made.run_many([CALL, CALL], outs=[torch.empty_like(CALL.q) for _ in range(2)])
    made.bound(CALL)
    made.check_model(MODEL)
    made.executing.accumulate(CALL, Plan(SparseMask.full(CALL, 4)))
    made.executing.execute_into(CALL, Plan(SparseMask.full(CALL, 4)), torch.empty_like(CALL.q), torch.empty(1, 2, 20))


CASES = [
    (role, question, name)
    for question, roles in QUESTIONS.items()
    for role in roles
    for name in BAD
    if name.removeprefix("is ") not in RIGHT.get(question, set())
]


@pytest.mark.parametrize(("role", "question", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_whatever_a_stage_answers_the_error_names_method_stage_and_question(
    role: str, question: str, name: str
) -> None:
    with pytest.raises(sp.StageError) as caught:
        ask(role, question, odd(question, BAD[name]))
    text = str(caught.value)
    assert text.startswith(f"{NAME}: Odd.{question}")
    assert len(text) < 1000
    if name in ERRORS:
        assert f" raised {type(BAD[name]).__name__}" in text
        assert BAD[name] is caught.value.__cause__
    else:
        assert "it must " in text


def test_the_table_asks_every_question_of_every_stage() -> None:
    """So that the cases above are what they seem: without the odd answer nothing is raised."""
    for question, roles in QUESTIONS.items():
        for role in roles:
            ask(role, question, Good())
    assert len(CASES) > 350


def test_answers_that_are_right_pass() -> None:
    for question, names in RIGHT.items():
        for name in names - {"text"}:
            ask("estimator" if question != "observe" else "observer", question, odd(question, ANSWERS[name]))
    made = build("estimator", odd("unsupported", ("one", "two")))
    assert ("Odd: one; two",) == made.unsupported(CALL)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_no_failure_of_the_stage_passes(question: str, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        ask(QUESTIONS[question][0], question, odd(question, error))
    assert error is caught.value


@pytest.mark.parametrize("question", QUESTIONS)
def test_errors_of_the_library_pass(question: str) -> None:
    mine = sp.SparsePrefillError("mine")
    with pytest.raises(sp.SparsePrefillError) as caught:
        ask(QUESTIONS[question][0], question, odd(question, mine))
    assert mine is caught.value


@pytest.mark.parametrize(
    "question", ["unsupported", "workspace", "check_model", "execute_into", "execute_many", "execute_many_into"]
)
def test_a_question_that_is_no_function(question: str) -> None:
    stage = type("Odd", (Good,), {question: 3})()
    with pytest.raises(sp.StageError, match=rf"my-method: Odd\.{question} is 3: it must be a function, or None"):
        build("executor", stage)


def test_a_slot_without_a_value_is_no_missing_attribute() -> None:
    """A property that fails by an AttributeError of its own is not taken for "no grain"."""

    class Slotted(Good):
        __slots__ = ("grain",)

    with pytest.raises(sp.StageError, match=r"my-method: Slotted\.grain raised AttributeError"):
        build("estimator", Slotted())


def test_a_class_is_no_stage() -> None:
    with pytest.raises(sp.ParameterError, match=r"Pipeline\.estimator is the class Good: pass an instance of it"):
        sp.Pipeline(Good)  # type: ignore[arg-type]


def of(**changes: Any) -> Callable[..., Any]:
    def execute(self: Any, call: Any, plan: Any) -> Any:
        return evolve(sp.ReferenceExecutor().execute(call, plan), **changes)

    return execute


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"out": None}, r"whose out is None: it must be a tensor \[1, 2, 20, 8\] on cpu"),
        ({"out": torch.zeros(1, 2, 20, 7)}, r"whose out is a Tensor of torch.float32 \(1, 2, 20, 7\): it must be a"),
        (
            {"out": torch.zeros(1, 2, 20, 8).double()},
            "whose out is torch.float64: it must be torch.float32, the call's",
        ),
        ({"out": torch.zeros(1, 2, 20, 8, device="meta")}, r"whose out is .*: it must be a tensor .* on cpu"),
        ({"lse": torch.zeros(1, 20)}, r"whose lse is a Tensor of torch.float32 \(1, 20\): it must be a tensor \[1, 2"),
        ({"plan": None}, "whose plan is None: it must be the Plan that was computed"),
    ],
)
def test_a_result_of_other_sizes(changes: dict[str, Any], said: str) -> None:
    stage = type("Odd", (Good,), {"execute": of(**changes), "execute_into": None})()
    made = build("executor", stage)
    with pytest.raises(sp.StageError, match=rf"my-method: Odd\.execute\(\) returned a Result {said}"):
        made.run(CALL)


def test_an_executor_that_leaves_the_callers_tensors_alone() -> None:
    """Parts of a long call would come out as fresh memory."""
    stage = odd("execute_into", sp.ReferenceExecutor().execute(CALL, Plan(SparseMask.full(CALL, 4))))
    into = torch.empty_like(CALL.q), torch.empty(1, 2, 20)
    with pytest.raises(sp.StageError, match=r"execute_into\(\) returned a Result of other tensors"):
        ExecutorStage.of(stage, NAME).execute_into(CALL, Plan(SparseMask.full(CALL, 4)), *into)


def test_an_executor_that_leaves_out_a_call() -> None:
    made = build("executor", odd("execute_many", [sp.ReferenceExecutor().execute(CALL, Plan(SparseMask.full(CALL)))]))
    assert isinstance(made, sp.Pipeline)
    with pytest.raises(sp.StageError, match=r"Odd\.execute_many\(\) returned 1 Results: it must return one"):
        made.run_many([CALL, CALL])


@pytest.mark.parametrize("inside", [True, False])
def test_outputs_of_several_calls_lie_in_the_callers_tensors(inside: bool) -> None:
    stage = Good()
    if not inside:
        stage.execute_many_into = lambda calls, plans, outs: stage.execute_many(calls, plans)  # type: ignore[method-assign]
    made, outs = build("executor", stage), [torch.zeros_like(CALL.q) for _ in range(2)]
    assert isinstance(made, sp.Pipeline)
    if not inside:
        with pytest.raises(
            sp.StageError, match=r"execute_many_into\(\) returned Results of other tensors: they must hold"
        ):
            made.run_many([CALL, CALL], outs=outs)
        return
    for result, out, alone in zip(
        made.run_many([CALL, CALL], outs=outs), outs, made.run_many([CALL, CALL]), strict=True
    ):
        assert result.out is out
        assert torch.equal(out, alone.out)


@pytest.mark.parametrize("make_mask", [lambda: None, lambda: 1 // 0], ids=["none", "raises"])
def test_a_plan_whose_mask_cannot_be_made(make_mask: Any) -> None:
    with pytest.raises(sp.SparsePrefillError, match=r"Plan.mask is NoneType|Odd\.estimate\(\)\.mask raised ZeroDiv"):
        build("estimator", odd("estimate", Plan(make_mask))).run(CALL)


def test_dense_attention_behind_a_gate_and_of_a_host_goes_through_the_guard() -> None:
    """A gate's "dense" runs the pipeline's executor where torch has no kernel for the call."""
    stage = odd("execute", KeyError("lost"))
    route = sp.gated(build("executor", stage), odd("judge", sp.Verdict(False, reason="small")))
    with pytest.raises(sp.StageError, match=r"my-method: Odd\.execute\(\) raised KeyError: 'lost'"):
        route.run(evolve(CALL, softcap=2.0))
    route = sp.gated(build("executor", Good()), odd("judge", sp.Verdict(False)))
    assert "gave no reason" in route.run(CALL).dense


VERDICTS: list[Any] = [
    *(sp.Verdict(worth) for worth in (None, 1, "yes", torch.ones(1))),  # type: ignore[arg-type]
    *(sp.Verdict(True, ratio) for ratio in (float("nan"), -1.0, "1", True)),  # type: ignore[arg-type]
    *(sp.Verdict(True, None, reason) for reason in (None, 3, Unprintable())),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("verdict", VERDICTS, ids=range(len(VERDICTS)))
def test_a_verdict_that_is_none(verdict: Any) -> None:
    with pytest.raises(
        sp.StageError, match=r"my-method: Odd\.judge\(\) returned .*: it must return a Verdict of worth"
    ):
        ask("gate", "judge", odd("judge", verdict))


def test_memory_may_be_given() -> None:
    assert isinstance(build("estimator", Good()).run(CALL, Memory()), Result)
    assert isinstance(SoftmaxState.empty((1, 1, 1), 1, torch.float32, torch.device("cpu")), SoftmaxState)
