"""The interfaces that a method composes: estimator, refiners, executor, corrector, observers; the guard that asks them.

Strangers pass by shape; classes that inherit get the missing-method error when they are made. A stage may say more of
itself, in attributes that a pipeline looks up once, when it is built (`Stage`); each has a default:

``unsupported(call) -> str | tuple[str, ...] | None``
    why this stage cannot honour a feature of the call (window, softcap, sinks, padding, dtype), in one reason or
    several; the caller then falls back and records them. A stage without it honours everything.
``grain: int | None``
    the number of tokens at whose multiples a prompt may be cut into chunks without changing the result, where each
    chunk says how long the prompt is (``call.prompt_lengths``). None, or no attribute: the stage looks at the call as a
    whole and has none.
``tail: int``
    of an estimator or refiner: so many last rows of a prompt get every key in each plan that it returns, so that
    adapters need not add them (`Pipeline.with_tail`); `ALL_ROWS` where all rows do. The default: 0.
``check_model(model: ModelIdentity) -> None``
    raises ParameterError where the stage was made for another model; adapters that know the model ask.
``head_scope: HeadScope | None``
    what an estimator, refiner, corrector or observer looks at when it decides for a query head: "head", that head alone
    (with its number, ``call.first_head + h``, and what memory holds); "group", all query heads of its KV head. A
    pipeline may then cut a long call into parts by heads, which run in the order of their heads with one memory. None,
    or no attribute: the stage looks at all heads together, and no call is cut by heads.
``relies_on: tuple[Observer, ...]``
    of an estimator or refiner: observers from which it learns what earlier heads of the same layer did. A pipeline that
    lacks one of them has no `head_scope`. The default: none.
``repeats: bool | "prompt"``
    True: what the stage does on the device follows from the sizes of the call (`AttentionCall.shape`) and from its own
    settings, and it does that by torch's operators and `kernels.launch.enqueue` alone. It reads no value of the device,
    keeps nothing in memory, and asks neither for ``call.layer`` (a layer's number is a `kernels.OfLayer`) nor for the
    length of a prompt that ends more than its `tail` and `REACH` tokens behind the call's keys; "prompt" where it asks
    for that. A host may then record what one layer's call did and repeat it for the layers after it, which meet no
    stage any more (`kernels.recording`). The law "repeated == plain" holds it to that. The default: False.
``workspace(call) -> int``
    an upper bound in bytes of the memory that the stage holds for such a call, beyond q, k, v and the output, with
    what it leaves in its plan; from sizes alone, no value on the device is read. The default: `default_workspace`.
``execute_into(call, plan, out, lse) -> Result``
    of an executor: as `execute`, into tensors of the caller, which may be views of larger ones: out ``[B, Hq, Nq, Dv]``
    in the call's dtype, lse ``[B, Hq, Nq]`` float32 (float64 for float64 calls). Without it the result is copied.
``execute_many(calls, plans) -> list[Result]``
    of an executor: as `execute` of each call with its plan, in their order, for those that can compute several in one
    launch. Without it they run one by one.

Whatever a stage is asked, it is asked through a `Guard`: what it raises, and an answer that is none, becomes a
StageError that names the method, the stage and the question.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from inspect import getattr_static
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import CASTING, AttentionCall, uncast
from sparseprefill.errors import (
    InvalidCallError,
    MaskError,
    ParameterError,
    SparsePrefillError,
    StageError,
    printable,
    printed,
    told,
)
from sparseprefill.mask.looks import check_disjoint
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import ScoresError
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Kernel, Parts, Plan, Result, Rounding, Skipped, SoftmaxState, check_geometry
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.validate import WIDEST, is_whole

T = TypeVar("T")

REACH = 1 << 16
"""Tokens behind a call's keys and the dense tail from which on it does not matter where a prompt ends (`repeats`)."""
HeadScope = Literal["head", "group"]
"""Heads that a stage looks at to decide for a query head: that head, or all heads of its KV head (`head_scope`)."""


@runtime_checkable
class PatternEstimator(Protocol):
    """Looks at queries and keys, and says which pairs matter."""

    __slots__ = ()

    @abstractmethod
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The mask to compute, with real output as `carry` where some was computed on the way. Reads memory only."""
        ...


@runtime_checkable
class MaskRefiner(Protocol):
    """Widens, narrows or shares a plan's mask, or asks for probes."""

    __slots__ = ()

    @abstractmethod
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """A new plan (``attrs.evolve``). Reads memory only."""
        ...


@runtime_checkable
class SparseExecutor(Protocol):
    """Turns a plan into output; knows no method."""

    __slots__ = ()

    @abstractmethod
    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Attention over the plan's mask, resumed from its carry, normalised."""
        ...

    @abstractmethod
    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """Attention over the plan, left unnormalised: for estimators that compute real output and for merging parts."""
        ...


@runtime_checkable
class Corrector(Protocol):
    """Changes a result's output after execution, such as by an estimate of what the mask left out."""

    __slots__ = ()

    @abstractmethod
    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        """The result with another output (``attrs.evolve``), in fresh tensors. Reads memory only.

        `lse` and `plan` stay the very ones that it was given: they say what the mask kept.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """Sees a layer's result; the only writer of memory, but for its `prefix`."""

    __slots__ = ()

    @abstractmethod
    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Keep what later layers or chunks need."""
        ...


def missing(stage: object, interface: type) -> list[str]:
    """Names of the interface's methods that `stage` lacks."""
    wanted = [name for name, value in vars(interface).items() if getattr(value, "__isabstractmethod__", False)]
    return [name for name in wanted if not _has(stage, name)]


def _has(stage: object, name: str) -> bool:
    try:
        return callable(getattr(stage, name, None))
    except Exception:  # it is there; the guard names it when it is asked
        return True


@frozen
class Answer:
    """A rule for answers. fits: the test. words: for messages. by_type: whether messages show a value's type."""

    fits: Callable[[Any], bool]
    words: str
    by_type: bool = False

    @classmethod
    def of(cls, kind: type) -> Answer:
        """An object of a class."""
        return cls(lambda value: isinstance(value, kind), kind.__name__, by_type=True)

    def shown(self, value: object) -> str:
        """A value that does not fit."""
        return type(value).__name__ if self.by_type else printed(value)


def _reasons(value: object) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, tuple) and all(isinstance(x, str) for x in value))
    )


GRAIN = Answer(lambda value: value is None or is_whole(value, 1), "a number of tokens from 1 to 2^63 - 1, or None")
SCOPE = Answer(
    lambda value: value is None or (isinstance(value, str) and value in ("head", "group")), "'head', 'group' or None"
)
BYTES = Answer(is_whole, "a number of bytes, an int from 0 to 2^63 - 1")
REASONS = Answer(_reasons, "a reason (str), a tuple of reasons, or None")
CALLABLE = Answer(lambda value: value is None or callable(value), "a function, or None")
NOTHING, PLAN, RESULT, STATE = (Answer.of(kind) for kind in (type(None), Plan, Result, SoftmaxState))
RESULTS = Answer(
    lambda value: isinstance(value, list | tuple) and all(isinstance(one, Result) for one in value),
    "a list of Results, one for each call",
)
OBSERVERS = Answer(
    lambda value: value is None or (isinstance(value, tuple) and not any(missing(one, Observer) for one in value)),
    "a tuple of observers",
)
TAIL = Answer(lambda value: value is None or is_whole(value), "a number of query rows, an int from 0 to 2^63 - 1")
ALL_ROWS = WIDEST - 1
"""The `tail` of a stage that keeps every key for every row."""
FLAG = Answer(
    lambda value: value is None or isinstance(value, bool) or (isinstance(value, str) and value == "prompt"),
    "True, False or 'prompt'",
)
ATTRIBUTES = (("grain", GRAIN), ("head_scope", SCOPE), ("tail", TAIL), ("repeats", FLAG), ("relies_on", OBSERVERS))
"""Things that a stage may say of itself, each with its rule."""
QUESTIONS = ("unsupported", "workspace", "check_model", "execute_into", "execute_many", "execute_many_into")
"""Methods that a stage may leave out."""


@frozen(eq=False)
class Watch:
    """Tensors that a stage is given, with the number that torch has counted of writes to each; no value is read.

    Not those that were made in inference mode, whose writes torch does not count, and not the cache of pages, which
    belongs to the host.
    """

    tensors: tuple[tuple[str, Tensor], ...]
    versions: list[int]

    @classmethod
    def of(cls, call: AttentionCall, plan: Plan | None = None, result: Result | None = None) -> Self:
        """The call's tensors, those of a plan that are no lists, and those of a result."""
        given: tuple[tuple[str, Any], ...] = (
            *(("call.q", call.q), ("call.k", call._k), ("call.v", call._v), ("call.sinks", call.sinks)),
            *(("call.starts", call.starts), ("call.lengths", call.lengths)),
            ("call.prompt_lengths", call.prompt_lengths),
        )
        if plan is not None:
            given += ("plan.probe", plan.probe), ("plan.skip_below", plan.skip_below)
            if plan.carry is not None:
                given += tuple((f"plan.carry.state.{name}", getattr(plan.carry.state, name)) for name in STATE_FIELDS)
        if result is not None:
            given += ("result.out", result.out), ("result.lse", result.lse), ("result.probe", result.probe)
        tensors: tuple[tuple[str, Any], ...] = tuple(
            [one for one in given if isinstance(one[1], Tensor) and not one[1].is_inference()]
        )
        return cls(tensors, [x._version for _, x in tensors])

    @property
    def written(self) -> str:
        """The first of them that was written to since; empty for none."""
        if [x._version for _, x in self.tensors] == self.versions:
            return ""
        pairs = zip(self.tensors, self.versions, strict=True)
        return next(name for (name, x), version in pairs if x._version != version)


STATE_FIELDS = ("m", "l", "acc")


@frozen(eq=False)
class Guard:
    """The one way to ask an object of a plugin, or of a user: what it raises or answers wrongly is a StageError.

    given: whom. method: the name of the pipeline that it serves, for messages; empty where it serves none.
    Errors of the library pass unchanged, lack of memory on a device and what is no Exception (KeyboardInterrupt) too.
    """

    given: object
    method: str

    @property
    def name(self) -> str:
        """Its class, for messages."""
        return type(self.given).__name__

    @property
    def place(self) -> str:
        """``method: Class``, as messages begin."""
        return f"{self.method}: {self.name}" if self.method else self.name

    def own(self, name: str, answer: Answer) -> Any:
        """An attribute, None where it has none. A property that fails is not taken for one that is missing."""

        def look() -> Any:
            try:
                return getattr(self.given, name)
            except AttributeError:
                if getattr_static(self.given, name, self) is self:
                    return None
                raise

        found = self.run(name, look)
        if not answer.fits(found):
            raise StageError(f"{self.place}.{name} is {answer.shown(found)}: it must be {answer.words}")
        return found

    def run(self, what: str, run: Callable[[], T]) -> T:
        """Run a function of the object, outside of autocast; `what` is its name for messages."""
        try:
            return uncast(run)() if any(map(torch.is_autocast_enabled, CASTING)) else run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(error, SparsePrefillError) and printable(error):
                raise
            raise StageError(f"{self.place}.{what} raised {type(error).__name__}: {told(error)}") from error

    def ask(self, verb: str, answer: Answer, *given: object) -> Any:
        """The answer of one of its methods."""
        found = self.run(f"{verb}()", lambda: getattr(self.given, verb)(*given))
        if not answer.fits(found):
            raise StageError(f"{self.place}.{verb}() returned {answer.shown(found)}: it must return {answer.words}")
        return found


@frozen(eq=False)
class Stage(Guard):
    """A stage with an answer to everything that a pipeline may ask: its own, or the default. Made by `of`.

    questions: names of the optional methods that it has. All methods here raise StageError as `Guard` says.
    """

    grain: int | None
    head_scope: HeadScope | None
    tail: int
    repeats: bool | Literal["prompt"]
    relies_on: tuple[Observer, ...]
    questions: frozenset[str]

    @classmethod
    def of(cls, given: object, method: str = "") -> Self:
        """Look up, once, what a stage says of itself. method: as in `Guard`."""
        guard = Guard(given, method)
        questions = frozenset(name for name in QUESTIONS if guard.own(name, CALLABLE) is not None)
        grain, scope, tail, repeats, relies_on = (guard.own(name, answer) for name, answer in ATTRIBUTES)
        return cls(given, method, grain, scope, tail or 0, repeats or False, relies_on or (), questions)

    @property
    def asks_model(self) -> bool:
        """True if it wants to know the model that it runs in."""
        return "check_model" in self.questions

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where it was made for another model."""
        if self.asks_model:
            self.ask("check_model", NOTHING, model)

    def objection(self, call: AttentionCall) -> str | None:
        """Reason for which it cannot honour a feature of the call, or None."""
        found = self.ask("unsupported", REASONS, call) if "unsupported" in self.questions else None
        return "; ".join(found) if isinstance(found, tuple) else found

    def workspace(self, call: AttentionCall) -> int:
        """Bytes that it may hold for a call."""
        found: int = self.ask("workspace", BYTES, call) if "workspace" in self.questions else default_workspace(call)
        return found

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The estimator's plan, which is one for this call."""
        return self._planned("estimate", call, None, memory)

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """The refiner's plan, which is one for this call."""
        return self._planned("refine", call, plan, memory)

    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        """The corrected result, which has the call's sizes and names what corrected it."""
        watch = Watch.of(call, plan, result)
        made: Result = self.ask("correct", RESULT, call, plan, result, memory)
        self._left_alone("correct", watch)
        self._computed("correct", call, plan, made)
        for name in ("lse", "plan"):
            if getattr(made, name) is not getattr(result, name):
                words = "it must be the one that was given, which says what the mask kept"
                raise StageError(f"{self.place}.correct() returned a Result of another {name}: {words}")
        return evolve(made, corrected=self.name)

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Let the observer see a result."""
        watch = Watch.of(call, plan, result)
        self.ask("observe", NOTHING, call, plan, result, memory)
        self._left_alone("observe", watch)

    def _planned(self, verb: str, call: AttentionCall, given: Plan | None, memory: Memory) -> Plan:
        """The plan of an estimator, or of a refiner that is `given` one. Errors that name a field say whose it is."""
        watch = Watch.of(call, given)
        try:
            plan: Plan = self.ask(verb, PLAN, *((call, memory) if given is None else (call, given, memory)))
            self._left_alone(verb, watch)
            if plan is not given:
                self.run(f"{verb}().mask", lambda: _check_plan(call, plan, given))
        except (MaskError, ParameterError) as error:
            raise type(error)(f"{self.place}.{verb}(): {error}") from error
        except InvalidCallError as error:  # of a call that it made
            raise StageError(f"{self.place}.{verb}(): {error}") from error
        return plan

    def _computed(self, verb: str, call: AttentionCall, plan: Plan, result: Result) -> Result:
        if why := _objection(call, plan, result):
            raise StageError(f"{self.place}.{verb}() returned a Result whose {why}")
        return result

    def _left_alone(self, verb: str, watch: Watch) -> None:
        """StageError where the stage has written to what it was given."""
        if name := watch.written:
            words = "it must leave what it is given as it is, and put what it makes into tensors of its own"
            raise StageError(f"{self.place}.{verb}() wrote to {name} in place: {words}")


@frozen(eq=False)
class ExecutorStage(Stage):
    """An executor behind its guard; it can stand in the executor's place."""

    @property
    def together(self) -> bool:
        """True if it may compute several calls in one launch."""
        return "execute_many" in self.questions

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Run the executor, and check that the result has the call's sizes: see `SparseExecutor.execute`."""
        watch = Watch.of(call, plan)
        result: Result = self.ask("execute", RESULT, call, plan)
        self._left_alone("execute", watch)
        return self._computed("execute", call, plan, result)

    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """Run the executor into these tensors; where it has no such method, copy what `execute` returns."""
        if "execute_into" not in self.questions:
            return self.execute(call, plan).into(out, lse)
        watch = Watch.of(call, plan)
        result: Result = self.ask("execute_into", RESULT, call, plan, out, lse)
        self._left_alone("execute_into", watch)
        self._computed("execute_into", call, plan, result)
        if (result.out.data_ptr(), result.lse.data_ptr()) != (out.data_ptr(), lse.data_ptr()):
            words = "it must hold the tensors that the caller gave, filled"
            raise StageError(f"{self.place}.execute_into() returned a Result of other tensors: {words}")
        return result

    def execute_many(
        self, calls: Sequence[AttentionCall], plans: Sequence[Plan], outs: Sequence[Tensor] = ()
    ) -> list[Result]:
        """Run several calls at once; one by one where the executor has no such method, and where there is one call.

        outs: tensors for the outputs, ``[B, Hq, Nq, Dv]`` each, which hold them then where the executor has a method
        for that; else results lie elsewhere.
        """
        if not self.together or len(calls) < 2:
            return [self.execute(call, plan) for call, plan in zip(calls, plans, strict=True)]
        verb = "execute_many_into" if outs and "execute_many_into" in self.questions else "execute_many"
        watches = [Watch.of(call, plan) for call, plan in zip(calls, plans, strict=True)]
        made = self.ask(verb, RESULTS, calls, plans, *([outs] if verb != "execute_many" else []))
        for watch in watches:
            self._left_alone(verb, watch)
        if len(made) != len(calls):
            words = f"it must return one for each of {len(calls)} calls"
            raise StageError(f"{self.place}.{verb}() returned {len(made)} Results: {words}")
        each = zip(calls, plans, made, strict=True)
        results = [self._computed(verb, call, plan, one) for call, plan, one in each]
        into = outs if verb == "execute_many_into" else ()
        if any(one.out.data_ptr() != out.data_ptr() for one, out in zip(results, into, strict=False)):
            words = "they must hold the tensors that the caller gave, filled"
            raise StageError(f"{self.place}.{verb}() returned Results of other tensors: {words}")
        return results

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The executor's softmax state over a plan, not normalised."""
        watch = Watch.of(call, plan)
        state: SoftmaxState = self.ask("accumulate", STATE, call, plan)
        self._left_alone("accumulate", watch)
        try:
            _check_state("a SoftmaxState that", state, call)
        except MaskError as error:
            raise StageError(f"{self.place}.accumulate() returned {error}") from error
        return state


def _check_plan(call: AttentionCall, plan: Plan, given: Plan | None) -> None:
    """MaskError for a plan that does not fit the call; given: the plan that a refiner was given, None for none.

    On a CPU also for lists that are none, and for pairs of the carry's region that the mask holds again.
    """
    priority, carry, mask = plan.priority, plan.carry, plan._mask
    geometry = mask.geometry if isinstance(mask, SparseMask) else plan.geometry
    if geometry is not call.geometry:
        check_geometry(call, geometry, "it returned")
    if isinstance(mask, SparseMask) and mask.doubtful:
        _ = mask.looked_at
    if priority is not None and priority.checked and (given is None or priority is not given.priority):
        priority.check(call)
    if carry is None:
        return
    same = given is not None and carry is given.carry
    if not same:
        _check_state("Plan.carry.state", carry.state, call)
        if not carry.state.serves(call.q):
            raise MaskError("Plan.carry.state is of another call: it must be made afresh for each call")
    if not (same and given is not None and plan.base is given.base):
        check_disjoint(plan.base, carry.region)


def _check_state(name: str, state: SoftmaxState, call: AttentionCall) -> None:
    """MaskError for a softmax state that is none of the call's, by sizes, type and device."""
    shape, dtype = (*call.q.shape[:3], call.value_dim), torch.promote_types(call.q.dtype, torch.float32)
    if not _is(state.acc, shape, (dtype,), call):
        words = f"it must be {list(shape)} of {dtype} on {call.q.device}, the call's"
        raise MaskError(f"{name} has acc {_at(state.acc)}: {words}")


def _objection(call: AttentionCall, plan: Plan, result: Result) -> str:
    """The first field of a result that does not fit call and plan, as ``name is value: it must ...``, or nothing."""
    rows, exact = tuple(call.q.shape[:3]), torch.float64 if call.q.dtype == torch.float64 else torch.float32
    for name, x, shape, dtype in (
        ("out", result.out, (*rows, call.value_dim), call.q.dtype),
        ("lse", result.lse, rows, exact),
    ):
        if _is(x, shape, (dtype,), call):
            continue
        if _is(x, shape, (getattr(x, "dtype", dtype),), call):
            return f"{name} is {x.dtype}: it must be {dtype}" + (", the call's" if name == "out" else "")
        return f"{name} is {_at(x)}: it must be a tensor {list(shape)} on {call.q.device}"
    if not isinstance(result.plan, Plan):
        return f"plan is {printed(result.plan)}: it must be the Plan that was computed"
    if result.plan is not plan and not result.plan.geometry.fits(call.geometry):
        return f"plan is one for {result.plan.geometry.describe()}: it must be one for the call"
    heads, floats = rows[:2], (torch.float32, torch.float64)
    if result.probe is not None:
        mask = result.plan.base
        tiles = mask.geometry.map_shape(mask.tile_q, mask.tile_k)
        if not _is(result.probe, tiles, floats, call):
            return f"probe is {_at(result.probe)}: it must be None, or float32 {list(tiles)} on {call.q.device}"
    counted, rounded = (torch.int64,), result.rounded
    for name, value, kind in (("parts", result.parts, Parts), ("skipped", result.skipped, Skipped)):
        if value is not None and not (isinstance(value, kind) and _is(value.pairs, heads, counted, call)):
            words = f"None, or a {kind.__name__} whose pairs are int64 {list(heads)} on {call.q.device}"
            return f"{name} is {printed(value)}: it must be {words}"
    if rounded is not None and not (isinstance(rounded, Rounding) and _is(rounded.errors, heads, floats, call)):
        words = f"None, or a Rounding whose errors are float32 {list(heads)} on {call.q.device}"
        return f"rounded is {printed(rounded)}: it must be {words}"
    for name, text in (("dense", result.dense), ("corrected", result.corrected)):
        if not isinstance(text, str):
            return f"{name} is {printed(text)}: it must be a text"
    if not isinstance(result.kernels, tuple) or not all(isinstance(one, Kernel) for one in result.kernels):
        return f"kernels is {printed(result.kernels)}: it must be a tuple of Kernels"
    return ""


def _is(x: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], call: AttentionCall) -> bool:
    plain = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
    return plain and x.shape == shape and x.dtype in dtypes and x.device == call.q.device


def _at(x: Any) -> str:
    elsewhere = isinstance(x, Tensor) and x.device.type != "cpu"
    return f"{printed(x)} on {x.device}" if elsewhere else printed(x)


def planned_by(
    stages: Sequence[Stage], call: AttentionCall, memory: Memory, asked: int = 0, plan: Plan | None = None
) -> Plan:
    """The plan of an estimator, which comes first, and of refiners, in their order.

    Scores are read by refiners; where that fails, the error names the stage that left them.
    plan: of the first `asked` stages, where these are behind.
    """
    if plan is None:
        plan, asked = stages[0].estimate(call, memory), 1
    left_by, verb = stages[asked - 1], "refine" if asked > 1 else "estimate"
    for refiner in stages[asked:]:
        try:
            after = refiner.refine(call, plan, memory)
        except ScoresError as error:
            cause = error.__cause__
            kind = type(cause) if isinstance(cause, MaskError | ParameterError) else StageError
            raise kind(f"{left_by.place}.{verb}() left scores that cannot be read: {error}") from error
        if after.priority is not plan.priority:
            left_by, verb = refiner, "refine"
        plan = after
    return plan


def objections(stages: Iterable[Stage], call: AttentionCall) -> tuple[str, ...]:
    """``stage: reason`` of each stage that objects to a call, each once."""
    reasons = ((stage, stage.objection(call)) for stage in stages)
    return tuple(dict.fromkeys(f"{stage.name}: {reason}" for stage, reason in reasons if reason))


def common_grain(grains: Iterable[int | None]) -> int | None:
    """The least common multiple of grains, None where one stage has none."""
    known = list(grains)
    return None if None in known else math.lcm(*(grain for grain in known if grain is not None))


def repeating(each: Iterable[bool | str]) -> bool | Literal["prompt"]:
    """The word of all stages together on ``repeats``."""
    found = set(each)
    if not found <= {True, "prompt"}:
        return False
    return "prompt" if "prompt" in found else True


def widest_scope(scopes: Iterable[HeadScope | None]) -> HeadScope | None:
    """The scope of all stages together: the widest of their scopes, None where one looks at all heads."""
    found = set(scopes)
    if found <= {"head", "group"}:
        return "group" if "group" in found else "head"
    return None
