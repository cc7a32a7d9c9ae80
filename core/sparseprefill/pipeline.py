"""Pipeline: estimate -> refine* -> execute -> correct? -> observe*, nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, Self, cast

import torch
from attrs import Attribute, Factory, evolve, field, frozen
from attrs.validators import deep_iterable, optional
from torch import Tensor

from sparseprefill.call import AttentionCall, check_call
from sparseprefill.errors import ParameterError, StageError, UnsupportedCallError, printed
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.looks import keyless
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.recorded import RECORDING, apart
from sparseprefill.memory import KEPT_BYTES, Memory
from sparseprefill.parts.split import Part, Recorder, parts
from sparseprefill.plan import Parts, Plan, Planned, Result
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.refiners.recall import KeptWhole, Recall, RecallFloor, floor_of
from sparseprefill.refiners.rescue import DenseRows
from sparseprefill.stages import (
    ALL_ROWS,
    Corrector,
    ExecutorStage,
    HeadScope,
    MaskRefiner,
    Observer,
    PatternEstimator,
    SparseExecutor,
    Stage,
    common_grain,
    missing,
    objections,
    planned_by,
    repeating,
    widest_scope,
)
from sparseprefill.validate import MOST_ROWS, fitting, is_whole

Limit = int | Literal["auto"] | None
"""Bytes that a call may hold: so many, `LIMIT` on CUDA devices and any number elsewhere ("auto"), or any number."""
LIMIT = 3 << 30
"""Bytes on CUDA devices by default: with the LSE, and with what bounds leave out, a layer stays within 4 GiB."""
SHARE = 8
"""Most calls that wait for each other, and into how many shares the workspace is divided for them."""


def _refiners(given: Iterable[MaskRefiner]) -> tuple[MaskRefiner, ...]:
    return _several("refiners", given)


def _observers(given: Iterable[Observer]) -> tuple[Observer, ...]:
    return _several("observers", given)


def _several(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Tensor):
        raise ParameterError(f"Pipeline.{name} is {printed(given)}: pass a tuple of stages")
    return tuple(given)


def _implements(interface: type) -> Callable[[Any, Attribute[Any], object], None]:
    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if isinstance(value, type):
            raise ParameterError(f"Pipeline.{attribute.name} is the class {value.__name__}: pass an instance of it")
        lacking = missing(value, interface)
        if lacking:
            shown = f"{type(value).__name__} has no {', '.join(f'{name}()' for name in lacking)}"
            raise ParameterError(f"Pipeline.{attribute.name}: {shown}; a {interface.__name__} needs it")

    return check


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == "auto") or is_whole(value, 1)


def _asked(stages: Callable[[Pipeline], Iterable[object]]) -> Any:
    """The default of a field: what stages of a pipeline say of themselves, asked once, when it is built."""

    def ask(pipeline: Pipeline) -> tuple[Stage, ...]:
        return tuple(Stage.of(_no_pipeline(stage), pipeline.name) for stage in stages(pipeline))

    return Factory(ask, takes_self=True)


def _executing(pipeline: Pipeline) -> ExecutorStage:
    return ExecutorStage.of(_no_pipeline(pipeline.executor), pipeline.name)


def _no_pipeline(stage: Any) -> Any:
    """The stage; ParameterError for a whole pipeline, which answers to much of what a stage is asked."""
    if isinstance(stage, Runner):
        remedy = "pass one of its stages, such as its estimator, or join pipelines by UnionEstimator"
        raise ParameterError(f"a {type(stage).__name__} stands where a stage of a Pipeline belongs: {remedy}")
    return stage


EXECUTING: Any = Factory(_executing, takes_self=True)
PLANNING = _asked(lambda pipeline: (pipeline.estimator, *pipeline.refiners))
CORRECTING = _asked(lambda pipeline: () if pipeline.corrector is None else (pipeline.corrector,))
OBSERVING = _asked(lambda pipeline: pipeline.observers)


def _of_tensors(
    runner: Runner, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], memory: Memory | None
) -> Tensor:
    return runner.run(AttentionCall.of(q, k, v, given), memory).out


class Runner(ABC):
    """A runner of calls, given as calls or as tensors: a Pipeline, or a Route over several."""

    __slots__ = ()

    @property
    @abstractmethod
    def known(self) -> tuple[Pipeline, ...]:
        """Every pipeline there is."""

    @abstractmethod
    def each(self, change: Callable[[Pipeline], Pipeline]) -> Self:
        """A copy with every pipeline changed, such as ``made.each(lambda one: evolve(one, refiners=...))``."""

    @abstractmethod
    def run(self, call: AttentionCall, memory: Memory | None = None) -> Result:
        """One layer's attention."""

    @property
    def corrects(self) -> bool:
        """True if any of the pipelines has a corrector."""
        return any(one.corrector is not None for one in self.known)

    @property
    def remembers(self) -> bool:
        """True if any of the pipelines keeps something from layer to layer, or from chunk to chunk."""
        return any(one.observers for one in self.known)

    def with_corrector(self, corrector: Corrector | None) -> Self:
        """A copy with this corrector in each pipeline, None for none. ParameterError for what is no corrector."""
        return self.each(lambda one: evolve(one, corrector=corrector))

    def __call__(
        self,
        /,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        q_offset: int | None = None,
        layer: int = 0,
        memory: Memory | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention output ``[B, Hq, Nq, Dv]``; `options` are AttentionCall's other fields.

        Under torch.compile it runs between graphs; where one graph has to hold all, torch says why not.
        """
        given = {"scale": scale, "q_offset": q_offset, "layer": layer, **options}
        if torch.compiler.is_dynamo_compiling():
            from sparseprefill.parts.graphs import run_between_graphs

            return cast(Tensor, run_between_graphs(_of_tensors, self, q, k, v, given, memory))
        return _of_tensors(self, q, k, v, given, memory)


@frozen(eq=False)
class Pipeline(Runner):
    """A method ready to run. Immutable and without a request's state, so one serves all threads and requests.

    Compose with ``attrs.evolve(pipeline, refiners=(*pipeline.refiners, mine))`` or from stages of any plugin.

    corrector: changes the output after execution; the LSE stays the mask's own, and
    observers see what was corrected. None: the output is what the mask gives.
    workspace: bytes that a call may hold beyond q, k, v and the result; a longer call is cut into parts, by heads where
    `head_scope` allows it and by rows where there is a `grain`, one after the other. "auto": 3 GiB on CUDA devices,
    no limit elsewhere. None: no limit. A call that cannot be cut runs whole, whatever it needs.
    kept_bytes: what statistics of a request's keys may take in its `Memory` from one chunk to the next
    (`Memory.prefix`); 0 keeps none, and changes no result.
    executing: the executor behind its guard, for hosts that run dense attention or windows through it.
    """

    estimator: PatternEstimator = field(validator=_implements(PatternEstimator))
    refiners: tuple[MaskRefiner, ...] = field(
        default=(), converter=_refiners, validator=deep_iterable(_implements(MaskRefiner))
    )
    executor: SparseExecutor = field(factory=AutoExecutor, validator=_implements(SparseExecutor))
    observers: tuple[Observer, ...] = field(
        default=(), converter=_observers, validator=deep_iterable(_implements(Observer))
    )
    name: str = field(default="pipeline", validator=fitting("Pipeline", lambda x: isinstance(x, str), "a string"))
    corrector: Corrector | None = field(default=None, kw_only=True, validator=optional(_implements(Corrector)))
    workspace: Limit = field(
        default="auto",
        kw_only=True,
        validator=fitting("Pipeline", _is_limit, "a positive number of bytes, 'auto' or None"),
    )
    kept_bytes: int = field(
        default=KEPT_BYTES, kw_only=True, validator=fitting("Pipeline", is_whole, "a number of bytes, 0 for none")
    )
    _planning: tuple[Stage, ...] = field(default=PLANNING, init=False, repr=False)
    executing: ExecutorStage = field(default=EXECUTING, init=False, repr=False)
    _correcting: tuple[Stage, ...] = field(default=CORRECTING, init=False, repr=False)
    _observing: tuple[Stage, ...] = field(default=OBSERVING, init=False, repr=False)

    @property
    def _deciding(self) -> tuple[Stage, ...]:
        return (*self._planning, *self._correcting, *self._observing)

    @property
    def _all(self) -> tuple[Stage, ...]:
        return (*self._planning, self.executing, *self._correcting, *self._observing)

    @property
    def known(self) -> tuple[Pipeline]:
        """The pipeline alone."""
        return (self,)

    def each(self, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        """The pipeline changed."""
        return change(self)

    @property
    def stages(self) -> tuple[object, ...]:
        """Every stage, in the order in which they run."""
        return tuple(stage.given for stage in self._all)

    @property
    def grain(self) -> int | None:
        """Tokens at whose multiples a prompt may be cut into chunks without changing the result, or None."""
        return common_grain(stage.grain for stage in self._deciding)

    @property
    def head_scope(self) -> HeadScope | None:
        """Heads that the stages look at when they decide for one: "head", "group" (of a KV head), or None, all
        heads; None too where an observer is missing that a stage relies on."""
        if any(one not in self.observers for one in self.relies_on):
            return None
        return widest_scope(stage.head_scope for stage in self._deciding)

    @property
    def plan_scope(self) -> HeadScope | None:
        """As `head_scope`, of estimator and refiners alone, for stages that hold a pipeline and run its plan only."""
        return widest_scope(stage.head_scope for stage in self._planning)

    @property
    def relies_on(self) -> tuple[Observer, ...]:
        """Observers by which its plans know what earlier heads of a layer did; see `stages`."""
        return tuple(one for stage in self._planning for one in stage.relies_on)

    @property
    def tail(self) -> int:
        """The number of last rows of a prompt that see every key, as the stage says that has the last word."""
        return self._planning[-1].tail

    def with_tail(self, rows: int) -> Pipeline:
        """The pipeline whose last refiner gives the prompt's last `rows` query rows every key; see `DenseRows`.

        Itself where rows is 0 or its plans have them already. No refiner can take them away, and observers that go by
        the estimator's evidence see them as pairs that a refiner added. ParameterError for what is no number of rows.
        """
        if not is_whole(rows, 0, MOST_ROWS):
            raise ParameterError(f"tail is {printed(rows)}: pass a number of query rows from 0 to {MOST_ROWS}")
        if rows <= self.tail:
            return self
        return evolve(self, refiners=(*self.refiners, DenseRows(rows)))

    def with_recall(self, recall: Recall) -> Pipeline:
        """The pipeline whose last refiner keeps at least so much of sampled rows' attention mass; see `RecallFloor`.

        recall: the floor's target, or a RecallFloor, in place of one that is there already. Itself where it is None;
        where the plans hold every key, they get the floor's notes and nothing else. ParameterError for anything else.
        """
        floor = floor_of(recall)
        if floor is None:
            return self
        last = KeptWhole(floor.rows) if self.tail == ALL_ROWS else floor
        others = (one for one in self.refiners if not isinstance(one, RecallFloor | KeptWhole))
        return evolve(self, refiners=(*others, last))

    @property
    def asks_model(self) -> bool:
        """True if a stage wants to know the model that it runs in: `check_model`."""
        return any(stage.asks_model for stage in self._all)

    @cached_property
    def repeats(self) -> bool | Literal["prompt"]:
        """True if a host may record one layer's call and repeat it for others, as all stages say; "prompt" if only for
        prompts of the same length. See `stages`."""
        return False if self.asked else self.rest_repeats

    @cached_property
    def rest_repeats(self) -> bool | Literal["prompt"]:
        """As `repeats`, of the stages behind those that are asked."""
        return False if self.asked is None else repeating(stage.repeats for stage in self._all[self.asked :])

    @cached_property
    def asked(self) -> int | None:
        """The number of first stages that a host asks in each layer, since they do not repeat, where all that come
        after them do; 0 where all repeat, None where the executor does not, or what comes after it."""
        if not repeating(stage.repeats for stage in self._all[len(self._planning) :]):
            return None
        return max((i for i, stage in enumerate(self._planning, 1) if not stage.repeats), default=0)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where a stage was made for another model."""
        for stage in self._all:
            stage.check_model(model)

    def unsupported(self, call: AttentionCall) -> tuple[str, ...]:
        """List why this pipeline cannot honour the call: one reason per stage that objects; empty if it can."""
        return objections(self._all, call)

    def unsupported_plan(self, call: AttentionCall) -> tuple[str, ...]:
        """The objections of estimator and refiners alone, for stages that hold a pipeline and run its plan only."""
        return objections(self._planning, call)

    def plan_bound(self, call: AttentionCall) -> int:
        """Bytes that making a plan may hold at once: the estimator's, and of the refiners the largest."""
        first, *refiners = self._planning
        return first.workspace(call) + max((stage.workspace(call) for stage in refiners), default=0)

    def bound(self, call: AttentionCall) -> int:
        """Bytes that the pipeline may hold for a call at once: the plan, and the stage that works on it."""
        first, *after = self._all
        return first.workspace(call) + max(stage.workspace(call) for stage in after)

    def limit(self, device: torch.device) -> int | None:
        """Bytes that a call may hold on a device, by `workspace`; None for no limit."""
        if self.workspace == "auto":
            return LIMIT if device.type == "cuda" else None
        return self.workspace

    def run(self, call: AttentionCall, memory: Memory | None = None) -> Result:
        """One layer's attention.

        memory: this request's Memory, shared by its layers and chunks; None for a call on its own.
        Raises UnsupportedCallError where a stage objects to the call (there is no silent fallback), StageError where
        a stage raises or returns nonsense, MaskError where a mask does not fit the call, ParameterError for no call.
        """
        if torch.compiler.is_dynamo_compiling():
            from sparseprefill.parts.graphs import run_between_graphs

            return cast(Result, run_between_graphs(self.run, call, memory))
        memory = self._accepted(call, memory)
        with torch.cuda.device_of(call.q):  # kernels start on the current device, which need not be the tensors'
            cut, _ = self._cut(call)
            return self._run_parts(call, memory, cut) if len(cut) > 1 else self._run_whole(call, memory)

    def run_into(self, call: AttentionCall, memory: Memory | None, out: Tensor, begun: Plan | None = None) -> Result:
        """As `run`, with the output in a tensor of the caller, ``[B, Hq, Nq, Dv]``, which may be a view.

        begun: the plan of `ask`, of a call that is `whole`.
        """
        memory = self._accepted(call, memory)
        with torch.cuda.device_of(call.q):
            cut, _ = self._cut(call)
            if len(cut) > 1 or self._correcting:
                result = self._run_parts(call, memory, cut) if len(cut) > 1 else self._run_whole(call, memory, begun)
                out.copy_(result.out)
                return evolve(result, out=out)
            planned = Planned(call, self.plan(call, memory, begun), memory)
            dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
            lse = torch.empty(call.q.shape[:3], dtype=dtype, device=call.q.device)
            return self._finish(planned, self.executing.execute_into(call, planned.plan, out, lse))

    def whole(self, call: AttentionCall) -> bool:
        """True if a call of these sizes runs in one part."""
        return len(self._cut(call)[0]) <= 1

    def run_many(
        self,
        calls: Sequence[AttentionCall],
        memories: Sequence[Memory | None] | None = None,
        begun: Sequence[Plan] = (),
        outs: Sequence[Tensor] = (),
    ) -> list[Result]:
        """Run several calls, with one launch for several where the executor can: see `begin`. Errors as of `run`.

        memories: of each call's request; None for calls on their own, of different requests. begun: see
        `run_into`. outs: of each call a tensor that its output may lie in; a result tells where it does.
        """
        for name, listed in (("calls", calls), ("memories", () if memories is None else memories)):
            if not isinstance(listed, Sequence):
                raise ParameterError(f"{name} is {printed(listed)}: pass a list")
        given = [None] * len(calls) if memories is None else memories
        if len(given) != len(calls):
            raise ParameterError(f"memories has {len(given)} entries: pass one for each of {len(calls)} calls, or None")
        found: list[Result] = []
        for first in range(0, len(calls), SHARE):
            some = slice(first, first + SHARE)
            plans: Sequence[Plan | None] = begun[some] or [None] * len(calls[some])
            each = zip(calls[some], given[some], plans, strict=True)
            waiting = [self.begin(call, memory, plan) for call, memory, plan in each]
            planned = [one for one in waiting if isinstance(one, Planned)]
            made = iter(self.execute(planned, outs[some] if len(planned) == len(waiting) else ()))
            found += [self.finish(one, next(made)) if isinstance(one, Planned) else one for one in waiting]
        return found

    def begin(self, call: AttentionCall, memory: Memory | None = None, begun: Plan | None = None) -> Planned | Result:
        """The first step of `run`: the call with its plan, for `execute` together with others, and then `finish`.

        Of different requests, and at most `SHARE` at a time: what they hold is within the workspace then. The result
        itself, of a call that may hold more than its share, runs in parts, or is corrected. Errors as of `run`.
        """
        memory = self._accepted(call, memory)
        with torch.cuda.device_of(call.q):
            cut, waits = self._cut(call)
            if len(cut) > 1:
                return self._run_parts(call, memory, cut)
            if self._correcting or not waits:
                return self._run_whole(call, memory, begun)
            return Planned(call, self.plan(call, memory, begun), memory)

    def execute(self, planned: Sequence[Planned], outs: Sequence[Tensor] = ()) -> list[Result]:
        """The second step: what the executor computes for calls that `begin` planned; errors as of `run`.

        outs: tensors that the outputs may lie in.
        """
        if not planned:
            return []
        with torch.cuda.device_of(planned[0].call.q):
            return self.executing.execute_many([one.call for one in planned], [one.plan for one in planned], outs)

    def finish(self, planned: Planned, computed: Result) -> Result:
        """The last step: the call's result, corrected, and seen by the observers; errors as of `run`."""
        with torch.cuda.device_of(planned.call.q):
            return self._finish(planned, computed)

    def _accepted(self, call: AttentionCall, memory: Memory | None) -> Memory:
        if not isinstance(call, AttentionCall):
            check_call(call)
        if reasons := self.unsupported(call):
            raise UnsupportedCallError(reasons)
        if memory is not None and not isinstance(memory, Memory):
            raise ParameterError(f"memory is {printed(memory)}: pass a Memory, or None for a call on its own")
        return Memory() if memory is None else memory

    def _cut(self, call: AttentionCall) -> tuple[tuple[Part, ...], bool]:
        """The parts of a call, none where it runs whole, and whether it may wait for others. By sizes alone."""
        limit = self.limit(call.q.device)
        if limit is None:
            return (), True
        bound = self.bound(call)
        return () if bound <= limit else parts(self, call, limit), bound <= limit // SHARE

    def _run_whole(self, call: AttentionCall, memory: Memory, begun: Plan | None = None) -> Result:
        planned = Planned(call, self.plan(call, memory, begun), memory)
        return self._finish(planned, self.executing.execute(call, planned.plan))

    def _finish(self, planned: Planned, computed: Result) -> Result:
        lse, plan = computed.lse, planned.plan
        looked_at = type(lse) is Tensor and lse.is_cpu
        shows = looked_at and (RECORDING.get() is not None or bool(lse.isneginf().any()))
        if shows and (lost := apart(keyless, plan.masks, lse, planned.call.first_head)):
            raise StageError(f"{self.name}: {', '.join(stage.name for stage in self._planning)} left {lost}")
        result = computed
        for corrector in self._correcting:
            result = corrector.correct(planned.call, planned.plan, result, planned.memory)
        self.observe(planned.call, planned.plan, result, planned.memory)
        return result

    def _run_parts(self, call: AttentionCall, memory: Memory, cut: tuple[Part, ...]) -> Result:
        """Part after part into one output; nothing of a part stays but what `Recorder` keeps."""
        shape, exact = call.q.shape[:3], call.q.dtype == torch.float64
        same = call.q.shape[-1] == call.value_dim
        out = torch.empty_like(call.q) if same else call.q.new_empty(*shape, call.value_dim)
        lse = call.q.new_empty(shape, dtype=torch.float64 if exact else torch.float32)
        recorder = Recorder(call.geometry)
        for part in cut:
            here = (slice(None), slice(*part.heads), slice(*part.rows))
            recorder.add(part, *self._run_part(part.of(call), memory, out[here], lse[here]))
        return Result(
            out,
            lse,
            Plan(recorder.mask),
            parts=Parts(call.geometry, recorder.count, recorder.pairs),
            corrected="".join(stage.name for stage in self._correcting),
            kernels=tuple(recorder.kernels),
            skipped=recorder.skipped,
            rounded=recorder.rounded,
        )

    def _run_part(
        self, call: AttentionCall, memory: Memory, out: Tensor, lse: Tensor
    ) -> tuple[tuple[SparseMask, ...], Result]:
        planned = Planned(call, self.plan(call, memory), memory)
        computed = self.executing.execute_into(call, planned.plan, out, lse)
        result = self._finish(planned, computed)
        if result.out is not computed.out:
            out.copy_(result.out)
        return planned.plan.computed(), result

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Let the observers see a layer's result; errors as of `run`."""
        for observer in self._observing:
            observer.observe(call, plan, result, memory)

    def plan(self, call: AttentionCall, memory: Memory, begun: Plan | None = None) -> Plan:
        """Make the plan that `run` would execute, for stages that hold a pipeline. Raises the errors of `run`."""
        memory.prefix.most = self.kept_bytes if RECORDING.get() is None else 0  # which changes no bit
        return planned_by(self._planning, call, memory, self.asked or 0, begun)

    def ask(self, call: AttentionCall, memory: Memory) -> Plan:
        """The plan of the first `asked` stages; errors as of `run`."""
        stages = self._planning[: self.asked]
        if reasons := objections(stages, call):
            raise UnsupportedCallError(reasons)
        memory.prefix.most = self.kept_bytes
        with torch.cuda.device_of(call.q):
            return planned_by(stages, call, memory)
