"""The contracts can fail: methods broken on purpose, each caught by the law it breaks, in words that help."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, field, frozen

import sparseprefill as sp
from sparseprefill import kernels, testing
from sparseprefill.call import AttentionCall
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan, Result, SoftmaxState
from sparseprefill.testing import contracts

REFERENCE = ReferenceExecutor()
NEAR = sp.build("streaming", sink=16, window=32, block=16).estimator
CALLS = (
    AttentionCall(*testing.tensors("random", batch=1, heads=2, kv_heads=1, q_len=70, kv_len=70, head_dim=8)),
    AttentionCall(
        *testing.tensors("sink", batch=2, heads=2, kv_heads=1, q_len=70, kv_len=70, head_dim=8),
        starts=torch.tensor([0, 21], dtype=torch.int32),
    ),
)


@frozen
class Estimator:
    """An estimator made of a function, which claims a grain, or a head scope."""

    answer: Callable[[AttentionCall], Plan]
    grain: int | None = None
    head_scope: sp.HeadScope | None = None

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        return self.answer(call)


@frozen
class Writer:
    """An estimator that leaves something for the next layer."""

    inner: Any

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        memory.put("seen", 1)
        plan: Plan = self.inner.estimate(call, memory)
        return plan


@frozen
class Tailed:
    """An estimator that promises more dense rows than its plans have."""

    inner: Any
    tail: ClassVar[int] = 40

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        plan: Plan = self.inner.estimate(call, memory)
        return plan


@frozen
class Executor:
    """The reference, with its result or its plan spoilt."""

    spoil: Callable[[AttentionCall, Result], Result]
    replan: Callable[[AttentionCall, Plan], Plan] = field(default=lambda call, plan: plan)

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        return evolve(self.spoil(call, REFERENCE.execute(call, self.replan(call, plan))), plan=plan)

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        return REFERENCE.accumulate(call, plan)


def estimating(answer: Callable[[AttentionCall], Plan], grain: int | None = None) -> Pipeline:
    return Pipeline(Estimator(answer, grain), name="broken")


def spoiling(spoil: Callable[[AttentionCall, Result], Result]) -> Pipeline:
    return Pipeline(NEAR, executor=Executor(spoil), name="broken")


def softmax(call: AttentionCall, keep: torch.Tensor, leak: bool = False, shift: bool = True) -> torch.Tensor:
    """A softmax over `keep` alone, causal or not; without care for NaN in values (`leak`) or for the maximum."""
    k, v = (x.repeat_interleave(call.group, 1) for x in (call.k, call.v))
    logits = (call.q @ k.transpose(-1, -2) * call.softmax_scale).masked_fill(~keep, -math.inf)
    top = logits.amax(-1, keepdim=True) if shift else torch.zeros(1)
    p = torch.exp(logits - torch.where(top == -math.inf, 0.0, top))
    return p @ (v if leak else torch.nan_to_num(v)) / p.sum(-1, keepdim=True).clamp(min=1e-30)


def peeks(call: AttentionCall, result: Result) -> Result:
    """Each row sees one key too many."""
    keep = result.mask.to_dense()
    keep[..., 1:] |= keep[..., :-1].clone()
    return evolve(result, out=softmax(call, keep, leak=True))


def leaks(call: AttentionCall, result: Result) -> Result:
    """Weights of zero times NaN."""
    return evolve(result, out=softmax(call, result.mask.to_dense(), leak=True))


def overflows(call: AttentionCall, result: Result) -> Result:
    """No maximum is taken off the logits."""
    return evolve(result, out=softmax(call, result.mask.to_dense(), shift=False))


def unwritten(call: AttentionCall, result: Result) -> Result:
    """A kernel that forgets the last row."""
    out = torch.empty_like(result.out)
    out[:, :, :-1] = result.out[:, :, :-1]
    return evolve(result, out=out)


def batch_bound(call: AttentionCall, result: Result) -> Result:
    """The batch decides on the numbers."""
    return evolve(result, out=result.out * (1 + 0.01 * call.q.shape[0]))


def empty_rows(call: AttentionCall) -> Plan:
    return Plan(SparseMask.from_stripes(call, torch.arange(70)[None] > 3, 1, 16, diagonal=False))


def by_last_query(call: AttentionCall) -> Plan:
    """Looks at the last query, so cuts change it."""
    score = (call.q[:, :, -1:] * call.k[:, :1]).sum(-1)
    return Plan(SparseMask.from_stripes(call, (score > 0)[:, :, None], 99, 16))


def by_first_head(call: AttentionCall) -> Plan:
    """All heads keep what the first one wants."""
    score = (call.q[:, :1, -1:] * call.k[:, :1]).sum(-1)
    return Plan(SparseMask.from_stripes(call, (score > 0)[:, :, None], 99, 16))


def overlapping_carry(call: AttentionCall) -> Plan:
    plan = NEAR.estimate(call, Memory())
    return Plan(plan.mask, Carry(REFERENCE.accumulate(call, plan), plan.mask))


def false_disjoint(call: AttentionCall) -> Plan:
    columns = torch.arange(70)[None] % 16 == 0
    return Plan(evolve(SparseMask.from_stripes(call, columns, 1, 16), disjoint=True))


def unsorted(call: AttentionCall) -> Plan:
    mask = SparseMask.full(call, 16)
    assert mask.tiles is not None
    return Plan(evolve(mask, tiles=evolve(mask.tiles, indices=mask.tiles.indices.flip(0))))


def law(name: str) -> Callable[..., Any]:
    """The check of one law."""
    return lambda one, **options: testing.check_laws(one, (name,), **options)


CHUNKS = law("chunk invariance at the grain")


def test_a_law_that_there_is_not_is_named() -> None:
    with pytest.raises(sp.ParameterError, match="names holds 'causal', which is no law; did you mean 'causality'"):
        testing.check_laws("streaming", ("causal",))


BROKEN: dict[str, tuple[Pipeline, Callable[..., Any], str]] = {
    "non-causal": (spoiling(peeks), law("causality"), "causality"),
    "NaN leak": (spoiling(leaks), law("NaN of an unselected key stays out"), "NaN of an unselected key stays out"),
    "overflow": (spoiling(overflows), law("no NaN for finite input"), "no NaN for finite input"),
    "unwritten row": (spoiling(unwritten), law("result == softmax over its own mask"), "softmax over its own mask"),
    "unwritten row is NaN": (spoiling(unwritten), law("no NaN for finite input"), "no NaN"),
    "batch": (spoiling(batch_bound), law("batch rows independent"), "batch rows independent"),
    "wrong numbers": (
        spoiling(lambda _, result: evolve(result, lse=result.lse + 0.01)),
        law("result == softmax over its own mask"),
        "LSE against softmax over its own mask",
    ),
    "wrong dtype": (
        spoiling(lambda _, result: evolve(result, out=result.out.double())),
        law("result == softmax over its own mask"),
        "out is torch.float64",
    ),
    "padding not zero": (
        spoiling(lambda _, result: evolve(result, out=torch.where(result.out == 0, 1.0, result.out))),
        law("result == softmax over its own mask"),
        "starts",
    ),
    "empty rows": (estimating(empty_rows), law("no empty row"), "left query rows without a key"),
    "no diagonal": (
        estimating(lambda call: Plan(SparseMask.from_stripes(call, torch.arange(70)[None] < 1, 1, 16, diagonal=False))),
        law("no empty row"),
        "do not keep their own diagonal",
    ),
    "nothing at all": (
        estimating(lambda call: Plan(SparseMask.empty(call))),
        law("density in (0, 1]"),
        "left query rows without a key",
    ),
    "density counts twice": (estimating(false_disjoint), law("density in (0, 1]"), r"density is .*to_dense\(\) counts"),
    "false disjoint": (estimating(false_disjoint), law("carry and mask disjoint"), "a tile and a stripe"),
    "carry overlaps": (estimating(overlapping_carry), law("carry and mask disjoint"), "carry region"),
    "unsorted lists": (estimating(unsorted), law("carry and mask disjoint"), "ascending, distinct"),
    "grain lie": (
        estimating(by_last_query, 16),
        law("chunk invariance at the grain"),
        r"chunks cut at \[.*\(grain 16\)",
    ),
    "grain lie seen by causality": (estimating(by_last_query, 16), law("causality"), "declared grain 16"),
    "head scope lie": (
        Pipeline(Estimator(by_first_head, head_scope="head"), name="broken"),
        law("parts by heads == whole"),
        "in 2 parts by heads",
    ),
    "an estimator that writes": (
        Pipeline(Writer(NEAR), name="broken"),
        law("memory is read only"),
        "1 values were put into memory",
    ),
    "tail lie": (Pipeline(Tailed(NEAR), name="broken"), law("the tail sees every key"), "and tail is 40"),
    "sparse at full": (
        estimating(lambda call: NEAR.estimate(call, Memory())),
        lambda one, **options: testing.check_laws(one, ("full mask == dense",), full={}, **options),
        "allowed pairs are missing from the mask",
    ),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_broken_method_is_caught(case: tuple[Pipeline, Callable[..., Any], str]) -> None:
    pipeline, check, said = case
    with pytest.raises(AssertionError, match=said) as caught:
        check(pipeline, calls=CALLS)
    assert str(caught.value).startswith("broken: law '")
    assert "q [" in str(caught.value)


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_broken_method_does_not_pass_as_a_whole(case: tuple[Pipeline, Callable[..., Any], str]) -> None:
    full: Any = {"full": {}} if case[2].startswith("allowed") else {}
    with pytest.raises(AssertionError, match="broken: law '"):
        testing.check_method(case[0], calls=CALLS, **full)


def test_sound_pipeline_passes_and_says_what_was_skipped() -> None:
    report = testing.check_method(spoiling(lambda _, result: result), calls=CALLS[:1])
    assert "broken" == report.method
    assert {"full mask == dense", "batch rows independent", "repeated == plain"} == set(report.skipped)
    assert report.skipped["full mask == dense"].startswith("no parameters are known")


def test_pipeline_without_a_grain_says_so() -> None:
    report = testing.check_method(estimating(by_last_query), calls=CALLS[:1])
    assert "declares no grain" in report.skipped["chunk invariance at the grain"]


@frozen
class Unfinished:
    """The reference, whose state in progress is twice what it is."""

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        return REFERENCE.execute(call, plan)

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        state = REFERENCE.accumulate(call, plan)
        return evolve(state, acc=2 * state.acc)


class Counting:
    """Keeps the tiles at another distance at each call."""

    def __init__(self) -> None:
        self.count = 0

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        self.count += 1
        keep = torch.arange(call.geometry.tile_columns(16)) % (1 + self.count) == 0
        return Plan(SparseMask.from_tiles(call, keep.view(1, 1, 1, -1), 16))


@frozen
class Zero:
    """A corrector that forgets the output."""

    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        return evolve(result, out=torch.zeros_like(result.out))


def test_a_stage_that_plans_anew_at_each_call_is_caught() -> None:
    with pytest.raises(
        AssertionError, match=r"law 'the same plan again' is broken on q .* pairs of the mask are other"
    ):
        testing.check_method(Pipeline(Counting(), name="broken"), calls=CALLS)


def test_an_executor_whose_state_is_wrong_is_caught() -> None:
    with pytest.raises(
        AssertionError, match=r"law 'left in progress == whole' is broken on q .*accumulate\(\) against"
    ):
        testing.check_method(Pipeline(NEAR, executor=Unfinished(), name="broken"), calls=CALLS)


def test_a_corrector_that_forgets_the_output_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"law 'values all alike come out' is broken on q .*got 0"):
        testing.check_method(Pipeline(NEAR, corrector=Zero(), name="broken"), calls=CALLS)
    sinks = evolve(CALLS[0], sinks=torch.zeros(2))
    report = testing.check_laws(Pipeline(NEAR, corrector=Zero()), ("values all alike come out",), calls=[sinks])
    assert "sinks take a share" in report.skipped["values all alike come out"]


def unscaled(call: AttentionCall) -> Plan:
    """A carry with the usual factor instead of the call's."""
    region = SparseMask.from_rules(call, 16, sink=1)
    state = REFERENCE.accumulate(evolve(call, scale=None), Plan(region))
    return Plan(NEAR.estimate(call, Memory()).mask - region, Carry(state, region))


def needing(holds: Callable[[AttentionCall], bool]) -> Pipeline:
    """A stage that fails where something does not hold of the call."""

    def answer(call: AttentionCall) -> Plan:
        assert holds(call)
        return NEAR.estimate(call, Memory())

    return estimating(answer)


OF_STANDARD_CALLS: dict[str, tuple[Pipeline, str]] = {
    "scale of a carry": (estimating(unscaled), "scale 0.3.*output against"),
    "scale": (
        spoiling(lambda call, result: REFERENCE.execute(evolve(call, scale=None), result.plan)),
        "scale 0.3.*output against",
    ),
    "head dimension": (needing(lambda call: call.q.shape[3] == 64), r"k \[3, 1, 70, 40\], v \[3, 1, 70, 24\]"),
    "value dimension": (needing(lambda call: call.value_dim == call.q.shape[3]), r"v \[3, 1, 70, 24\]"),
    "batch": (needing(lambda call: call.q.shape[0] < 3), r"q \[3, "),
    "group": (needing(lambda call: call.group in (1, 2, 4)), r"q \[3, 3, .*k \[3, 1, "),
    "groups": (needing(lambda call: call.kv_heads == 1 or call.group == 1), r"q \[2, 4, .*k/v \[2, 2, "),
    "layer": (needing(lambda call: call.layer == 0), "layer 2"),
    "prompt": (needing(lambda call: not isinstance(call.prompt_lengths, torch.Tensor)), r"prompt_lengths \[130, 70\]"),
    "dtype": (needing(lambda call: call.q.dtype == torch.float32), "bfloat16"),
}


@pytest.mark.parametrize("case", OF_STANDARD_CALLS.values(), ids=OF_STANDARD_CALLS)
def test_the_standard_calls_meet_what_a_stage_forgets(case: tuple[Pipeline, str]) -> None:
    pipeline, said = case
    with pytest.raises(AssertionError, match=f"broken: law 'result == softmax over its own mask' is .*{said}"):
        testing.check_laws(pipeline, ("result == softmax over its own mask",))


def test_bfloat16_is_left_out_where_a_dtype_is_given() -> None:
    least = needing(lambda call: call.q.dtype == torch.float64)
    report = testing.check_laws(least, ("no empty row",), dtype=torch.float64)
    assert {"no empty row": len(testing.standard_calls())} == report.cases


def test_calls_that_are_refused_are_left_out() -> None:
    windowed = [evolve(call, window=9) for call in CALLS]
    for check in (testing.check_method, law("causality")):
        with pytest.raises(
            AssertionError, match=r"^anchor-attention: no law could be tried; .*sliding window.*: pass "
        ):
            check("anchor-attention", calls=windowed)
    with pytest.raises(AssertionError, match="no law could be tried; no calls were given"):
        testing.check_method("anchor-attention", calls=[])
    with pytest.raises(AssertionError, match=r"sink: no law could be tried; behind anchor-attention: .*sliding window"):
        testing.check_refiner("sink", parameters={"tiles": 1}, behind=("anchor-attention",), calls=windowed)
    assert {"causality": 2} == testing.check_laws("anchor-attention", ("causality",), calls=[*windowed, *CALLS]).cases


@frozen(kw_only=True)
class Tabled:
    """A method's parameters: a table that it needs, and how many key tiles it keeps."""

    table: tuple[int, ...] | None = None
    tiles: int = 1

    def unsupported(self, call: AttentionCall) -> str | None:
        return "no table" if self.table is None else "wide" if call.q.shape[0] > 1 and self.tiles > 9 else None

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        assert self.table is not None
        rules = {"sink": self.tiles * self.table[0]}
        return Plan(SparseMask.from_rules(call, 16, band=1, **rules))


def tabled(**fields: Any) -> Method:
    return Method(
        name="tabled", summary="", config=Tabled, build=lambda config: Pipeline(config, name="tabled"), **fields
    )


def test_parameters_that_are_given_reach_what_is_full() -> None:
    method = tabled(full={"tiles": 99})
    with pytest.raises(AssertionError, match=r"tabled: no law could be tried; .*no table"):
        testing.check_method(method, calls=CALLS)
    report = testing.check_method(method, parameters={"table": (1,)}, calls=CALLS)
    assert (1, 2) == (report.cases["full mask == dense"], report.cases["causality"]), "one call is refused when full"
    short = testing.check_method(method, parameters={"table": (1,)}, calls=CALLS[1:])
    assert short.skipped["full mask == dense"] == "with its full parameters it refuses the call: Tabled: wide"


def test_without_full_the_law_of_the_full_mask_is_not_tried() -> None:
    given: dict[str, Any] = {"parameters": {"table": (1,)}, "calls": CALLS}
    assert tabled().full is None
    report = testing.check_method(tabled(), **given)
    assert report.skipped["full mask == dense"] == "no parameters are known at which the mask is full: pass full={...}"
    with pytest.raises(AssertionError, match="allowed pairs are missing from the mask"):
        testing.check_method(tabled(full={}), **given)


@frozen(kw_only=True)
class Config:
    block: int = 64


def test_method_name_and_factory_are_all_taken() -> None:
    @frozen
    class Everything:
        block: int
        grain: ClassVar[int] = 1
        head_scope: ClassVar[sp.HeadScope] = "head"

        def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
            return Plan(SparseMask.full(call, self.block))

    def factory(block: int = 64) -> Pipeline:
        return Pipeline(Everything(block), name="everything")

    def build(config: Config) -> Pipeline:
        return factory(config.block)

    method = Method(name="all-of-it", summary="", config=Config, build=build, small={"block": 8})
    named = [testing.check_method(one, calls=CALLS, full={}).method for one in (method, "dense", factory)]
    assert ["all-of-it", "dense", "everything"] == named
    report = testing.check_method(factory, calls=CALLS, parameters={"block": 8}, full={"block": 16})
    assert {"repeated == plain"} == set(report.skipped), "the stage does not say that it does"
    assert set(contracts.LAWS) == {*report.cases, *report.skipped}


def test_long_grain_gets_a_call_of_its_own() -> None:
    pipeline = sp.build("anchor-attention", theta=0.5, step=8, block=32, init_tokens=32)
    assert {"chunk invariance at the grain": 1} == testing.check_laws(
        pipeline, ("chunk invariance at the grain",)
    ).cases
    too_long = testing.check_laws(sp.build("anchor-attention"), ("chunk invariance at the grain",))
    assert "grain 2048" in too_long.skipped["chunk invariance at the grain"]


@frozen
class Refined:
    """A refiner made of a function."""

    answer: Callable[[AttentionCall, Plan, Memory], Plan]
    grain: ClassVar[int] = 1

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        return self.answer(call, plan, memory)


def emptied(call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
    keep = torch.zeros(1, 1, 1, call.geometry.tile_columns(16), dtype=torch.bool)
    return Plan(SparseMask.from_tiles(call, keep, 16, diagonal=False))


def remembering(call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
    memory.put("seen", plan)
    return plan


class Alternating:
    """Gives every key at each second call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        self.count += 1
        return plan.widen(SparseMask.full(call, plan.grid())) if self.count % 2 else plan


@pytest.mark.parametrize(
    ("answer", "law"),
    [
        (emptied, "left query rows without a key"),
        (remembering, "memory is read only"),
        (Alternating(), "the same plan again"),
        (lambda call, plan, memory: 3, "returned int"),
        (lambda call, plan, memory: Plan(plan.mask), "the rest of a plan is handed on.*priority of the plan is lost"),
    ],
    ids=["empties", "remembers", "alternates", "answers nonsense", "drops scores"],
)
def test_a_broken_refiner_is_caught(answer: Any, law: str) -> None:
    with pytest.raises(AssertionError, match=f"Refined behind streaming: law .*{law}"):
        testing.check_refiner(Refined, behind=("streaming",), parameters={"answer": answer}, calls=CALLS)


def test_a_refiner_passes_by_name_and_by_class() -> None:
    report = testing.check_refiner("sink", parameters={"tiles": 1}, full={}, calls=CALLS)
    assert "sink" == report.method
    assert len(CALLS) * len(contracts.BEHIND) == report.cases["full mask == dense"] == report.cases["no empty row"]
    assert {"no host synchronisation"} <= set(report.skipped)
    assert report.cases == testing.check_refiner(sp.Sink, parameters={"tiles": 1}, full={}, calls=CALLS).cases


@pytest.mark.parametrize(
    ("lost", "where"),
    [
        ({"carry": None}, "anchor-attention: .*: carry of"),
        ({"probe": None}, "share-prefill: .*: probe of"),
        ({"notes": {}}, r"share-prefill: .*: notes.'share-prefill .*'. of"),
    ],
    ids=["carry", "probe", "notes"],
)
def test_a_refiner_that_loses_what_a_plan_holds_is_caught(lost: dict[str, Any], where: str) -> None:
    def answer(call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        return evolve(plan, **lost)

    with pytest.raises(AssertionError, match=f"behind {where} the plan is lost"):
        testing.check_refiner(Refined, parameters={"answer": answer}, calls=CALLS)


def test_a_carry_may_be_computed_again() -> None:
    def answer(call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        return plan if plan.carry is None else evolve(plan, mask=plan.mask | plan.carry.region, carry=None)

    report = testing.check_refiner(Refined, parameters={"answer": answer}, calls=CALLS)
    assert len(CALLS) * (len(contracts.BEHIND) + len(contracts.HOLDING)) == report.cases["carry and mask disjoint"]


def test_what_a_refiner_refuses_is_told() -> None:
    report = testing.check_refiner("position-decay", behind=("dense", "bfla"), calls=CALLS)
    assert "use BudgetCeiling" in report.skipped["behind dense"]
    with pytest.raises(
        AssertionError, match=r"position-decay: no law could be tried; behind dense: .*use BudgetCeiling"
    ):
        testing.check_refiner("position-decay", behind=("dense",), calls=CALLS)
    with pytest.raises(sp.ParameterError, match="no refiner is named 'sinc'; did you mean 'sink'"):
        testing.check_refiner("sinc")


REPEATED = law("repeated == plain")
LAYERED = AttentionCall(
    *testing.tensors("sink", batch=1, heads=2, kv_heads=1, q_len=40, kv_len=70, head_dim=64), layer=2
)


@frozen
class Repeating:
    """Says that it repeats; its plan is the good one, with a key tile for every query that a function names."""

    tile: Callable[[AttentionCall, Memory], int | torch.Tensor]
    repeats: bool | str = True

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        plan = NEAR.estimate(call, memory)
        keep = torch.zeros(1, 2, call.geometry.tile_rows(16), call.geometry.tile_columns(16), dtype=torch.bool)
        index = torch.as_tensor(self.tile(call, memory))
        return plan.widen(SparseMask.from_tiles(call, keep.index_fill_(3, index.view(1), True), 16))


class Late:
    """Makes its plan when it is read."""

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        return Plan(lambda: NEAR.estimate(call, memory).mask)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve, in Triton's interpreter, and can be recorded."""
    for name in ("serve", "serve_device"):
        monkeypatch.setattr(kernels, name, lambda _: True)


def repeating(tile: Callable[[AttentionCall, Memory], int | torch.Tensor], repeats: bool | str = True) -> Pipeline:
    return Pipeline(Repeating(tile, repeats), executor=TritonExecutor(), name="broken")


def kept(call: AttentionCall, memory: Memory) -> int:
    """Of the layer before."""
    before = memory.get("layer", None)
    memory.put("layer", call.layer)
    return 1 if before is None else 2


def unseen(call: AttentionCall, memory: Memory) -> torch.Tensor:
    """A launch that no recording is told of."""
    found = torch.zeros(1, dtype=torch.int64)
    found.numpy()[:] = 1 + (call.q.numpy().sum() > 0)
    return found


def read(call: AttentionCall, memory: Memory) -> int:
    return 1 + int(call.q.sum() > 0)


OWN = torch.zeros(1, dtype=torch.int64)
LIES: dict[str, tuple[Pipeline, str]] = {
    "the layer": (repeating(lambda call, _: 1 + call.layer % 2), "recorded in layer 2 and repeated .* in layer 5"),
    "the prompt": (
        repeating(lambda call, _: 2 if isinstance(call.prompt_lengths, int) and call.prompt_lengths > 1 << 20 else 1),
        "of a prompt of 1114182 tokens where it had 65606",
    ),
    "memory": (repeating(kept), "differ from what the stages give there themselves"),
    "a launch of its own": (repeating(unseen), "numbers of the output differ"),
    "values": (repeating(read), "says that it repeats, but the call cannot be recorded: _local_scalar_dense reads"),
    "random numbers": (
        repeating(lambda call, _: 1 + torch.rand(2).argmax()), "cannot be recorded: rand draws random numbers"
    ),
    "a tensor of its own": (
        repeating(lambda call, _: OWN.add_(1) % 2 + 1),
        "add_ writes to a tensor that was there before",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_stage_that_says_that_it_repeats_and_does_not_is_caught(lie: tuple[Pipeline, str]) -> None:
    pipeline, said = lie
    with pytest.raises(AssertionError, match=f"broken: law 'repeated == plain' is broken on .*{said}"):
        REPEATED(pipeline, calls=[LAYERED])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("_kernels")
def test_a_stage_that_repeats_passes_and_one_that_does_not_is_left_out() -> None:
    def by_prompt(call: AttentionCall, _: Memory) -> int:
        return 1 + int(isinstance(call.prompt_lengths, int) and call.prompt_lengths > 1 << 20)

    def by_values(call: AttentionCall, _: Memory) -> torch.Tensor:
        return 1 + (call.q.sum() > 0).long()

    for one in (repeating(by_values), repeating(by_prompt, "prompt")):
        assert {"repeated == plain": 1} == REPEATED(one, calls=[LAYERED]).cases
    asked = REPEATED(repeating(kept, False), calls=[LAYERED])
    assert "the stages that are asked differ in more than" not in str(asked.skipped)
    assert {"repeated == plain": 1} == asked.cases, "what comes after it is repeated"
    late = Pipeline(Late(), executor=TritonExecutor(), name="late")
    assert "makes its plan when it is read" in REPEATED(late, calls=[LAYERED]).skipped["repeated == plain"]


def test_without_kernels_the_law_says_what_it_cannot_try() -> None:
    report = REPEATED("streaming", calls=[LAYERED])
    reason = report.skipped["repeated == plain"]
    assert reason.startswith("nothing can be recorded here; the call: _local_scalar_dense reads a value")
    assert reason.endswith("pass device='cuda'")


@frozen(kw_only=True)
class Strides:
    """Parameters, not all of which are read."""

    block: int = 8
    stride: int = 4
    far: bool = False


def test_a_parameter_that_nothing_reads_is_named() -> None:
    def build(config: Strides) -> Pipeline:
        near = config.stride if config.far else 16
        return sp.build("streaming", sink=16, window=near * 2, block=16)

    method = Method(name="idle", summary="", config=Strides, build=build)
    with pytest.raises(AssertionError, match="in the calls of this check nothing reads block, stride of Strides: use"):
        testing.check_method(method, calls=CALLS)
    wider = evolve(method, search={"far": [True]})
    with pytest.raises(AssertionError, match="idle: in the calls of this check nothing reads block of Strides"):
        testing.check_method(wider, calls=CALLS)


def names(value: str) -> tuple[str, ...]:
    """A converter that takes no second turn."""
    return tuple(value.split(","))


@frozen(kw_only=True)
class Lists:
    """Parameters of which one is a list, and one matters to long calls alone."""

    kinds: Any = field(default="near,far", converter=names)
    far: int = 64

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        far = self.far if call.kv_len > 300 else 0
        return Plan(SparseMask.from_rules(call, 16, band=1, sink=len(self.kinds) + far // 16))


def test_converters_see_what_a_user_gives_and_longer_calls_read_more() -> None:
    method = Method(name="lists", summary="", config=Lists, build=lambda config: Pipeline(config, name="lists"))
    with pytest.raises(
        AssertionError, match=r"lists: in the calls of this check nothing reads far of Lists: .* calls="
    ):
        testing.check_method(method, calls=CALLS)
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 9, "kv_len": 310, "head_dim": 8}
    longer = AttentionCall(*testing.tensors("random", **sizes))
    assert "lists" == testing.check_method(method, calls=(call for call in (*CALLS, longer))).method


@frozen(kw_only=True)
class Writes:
    """Writes to the keys, or only at its defaults."""

    always: bool = False
    tiles: int = 9

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        if self.always or self.tiles == 9:
            call.k.mul_(1.0)
        return Plan(SparseMask.from_rules(call, 16, band=1, sink=self.tiles))


@pytest.mark.parametrize(
    ("small", "said"),
    [
        ({"always": True}, r"law '.*' is broken on q \[1, 2, 70, 8\].*wrote to call.k in place"),
        ({"tiles": 1}, r"with its defaults it fails on q \[1, 2, 70, 8\].*wrote to call.k in place"),
    ],
    ids=["always", "at its defaults"],
)
def test_a_stage_that_writes_in_place_is_told_by_law_or_parameters_and_shape(small: Any, said: str) -> None:
    build = lambda config: Pipeline(config, name="writes")  # noqa: E731
    with pytest.raises(AssertionError, match=f"writes: {said}"):
        testing.check_method(Method(name="writes", summary="", config=Writes, build=build, small=small), calls=CALLS)
