"""Pipeline: estimate -> refine* -> execute -> observe*, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from attrs import Attribute, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError, ParameterError, SparsePrefillError, StageError, UnsupportedCallError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.into import execute_into
from sparseprefill.memory import Memory
from sparseprefill.parts.record import Recorder
from sparseprefill.parts.split import Limit, Part, limit_of, parts
from sparseprefill.plan import Plan, Result
from sparseprefill.stages import (
    HeadScope,
    MaskRefiner,
    Observer,
    PatternEstimator,
    SparseExecutor,
    head_scope,
    missing,
)

T = TypeVar("T")


def _refiners(given: Iterable[MaskRefiner]) -> tuple[MaskRefiner, ...]:
    return tuple(given)


def _observers(given: Iterable[Observer]) -> tuple[Observer, ...]:
    return tuple(given)


def _implements(interface: type) -> Callable[[Any, Attribute[Any], object], None]:
    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        lacking = missing(value, interface)
        if lacking:
            shown = f"{type(value).__name__} has no {', '.join(f'{name}()' for name in lacking)}"
            raise ParameterError(f"Pipeline.{attribute.name}: {shown}; a {interface.__name__} needs it")

    return check


def _each(interface: type) -> Callable[[Any, Attribute[Any], Iterable[object]], None]:
    one = _implements(interface)

    def check(owner: object, attribute: Attribute[Any], values: Iterable[object]) -> None:
        for value in values:
            one(owner, attribute, value)

    return check


def _limit(_: object, attribute: Attribute[Any], value: object) -> None:
    known = value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
    if not known:
        raise ParameterError(f"Pipeline.{attribute.name} is {value!r}: pass a positive number of bytes, 'auto' or None")


@frozen(eq=False)
class Pipeline:
    """A method ready to run. Immutable and free of state, so one serves all threads and requests.

    Compose with ``attrs.evolve(pipeline, refiners=(*pipeline.refiners, mine))`` or from stages of any plugin.

    workspace: bytes that a call may hold beyond q, k, v and the result; a longer call is cut into parts, by heads where
    `head_scope` allows it and by rows where there is a `grain`, one after the other. "auto": 3 GiB on CUDA devices,
    no limit elsewhere. None: no limit. A call that cannot be cut runs whole, whatever it needs.
    """

    estimator: PatternEstimator = field(validator=_implements(PatternEstimator))
    refiners: tuple[MaskRefiner, ...] = field(default=(), converter=_refiners, validator=_each(MaskRefiner))
    executor: SparseExecutor = field(factory=AutoExecutor, validator=_implements(SparseExecutor))
    observers: tuple[Observer, ...] = field(default=(), converter=_observers, validator=_each(Observer))
    name: str = "pipeline"
    workspace: Limit = field(default="auto", kw_only=True, validator=_limit)

    @property
    def stages(self) -> tuple[object, ...]:
        """Every stage, in the order in which they run."""
        return (self.estimator, *self.refiners, self.executor, *self.observers)

    @property
    def grain(self) -> int | None:
        """Tokens at whose multiples a prompt may be cut into chunks without changing the result, or None."""
        grains = [getattr(stage, "grain", None) for stage in (self.estimator, *self.refiners, *self.observers)]
        known = [grain for grain in grains if grain is not None]
        return math.lcm(*known) if len(known) == len(grains) else None

    @property
    def head_scope(self) -> HeadScope | None:
        """What its stages look at when they decide for a head: "head", "group" (of a KV head), or None, all heads."""
        return head_scope((self.estimator, *self.refiners, *self.observers))

    def unsupported(self, call: AttentionCall) -> tuple[str, ...]:
        """Why this pipeline cannot honour the call: one reason per stage that objects; empty if it can."""
        reasons = []
        for stage in self.stages:
            ask = getattr(stage, "unsupported", None)
            reason = None if ask is None else ask(call)
            if reason:
                reasons.append(f"{type(stage).__name__}: {reason}")
        return tuple(reasons)

    def run(self, call: AttentionCall, memory: Memory | None = None) -> Result:
        """One layer's attention.

        memory: this request's Memory, shared by its layers and chunks; None for a call on its own.
        Raises UnsupportedCallError where a stage objects to the call (there is no silent fallback), StageError where
        a stage raises or returns nonsense, MaskError where a mask does not fit the call.
        """
        reasons = self.unsupported(call)
        if reasons:
            raise UnsupportedCallError(reasons)
        memory = Memory() if memory is None else memory
        with torch.cuda.device_of(call.q):  # kernels start on the current device, which need not be the tensors'
            cut = parts(self, call, limit_of(self.workspace, call.q.device))
            if len(cut) > 1:
                return self._run_parts(call, memory, cut)
            plan = self.plan(call, memory)
            result = _ask(self.executor, "execute", Result, lambda: self.executor.execute(call, plan))
            self._observe(call, plan, result, memory)
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
            self._run_part(part.of(call), memory, out[here], lse[here], partial(recorder.add, part))
        return Result(out, lse, None, parts=recorder.done())

    def _run_part(
        self, call: AttentionCall, memory: Memory, out: Tensor, lse: Tensor, record: Callable[[Plan], None]
    ) -> None:
        plan = self.plan(call, memory)
        result = _ask(self.executor, "execute", Result, lambda: execute_into(self.executor, call, plan, out, lse))
        self._observe(call, plan, result, memory)
        record(plan)

    def _observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        for observer in self.observers:
            _observed(observer, call, plan, result, memory)

    def plan(self, call: AttentionCall, memory: Memory) -> Plan:
        """What `run` would execute: the estimate, refined. For stages that hold a pipeline; errors as of `run`."""
        plan = _ask(self.estimator, "estimate", Plan, lambda: self.estimator.estimate(call, memory))
        _check_plan(self.estimator, call, plan)
        for refiner in self.refiners:
            plan = _refined(refiner, call, plan, memory)
            _check_plan(refiner, call, plan)
        return plan

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        q_offset: int | None = None,
        layer: int = 0,
        memory: Memory | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention output ``[B, Hq, Nq, Dv]``; `options` are AttentionCall's other fields."""
        call = AttentionCall(q, k, v, scale=scale, q_offset=q_offset, layer=layer, **options)
        return self.run(call, memory).out


def _refined(refiner: MaskRefiner, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
    return _ask(refiner, "refine", Plan, lambda: refiner.refine(call, plan, memory))


def _observed(observer: Observer, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
    _ask(observer, "observe", type(None), lambda: observer.observe(call, plan, result, memory))


def _ask(stage: object, verb: str, wanted: type[T], run: Callable[[], T]) -> T:
    try:
        answer = run()
    except (SparsePrefillError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StageError(f"{type(stage).__name__}.{verb}() raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, wanted):
        given = type(answer).__name__
        raise StageError(f"{type(stage).__name__}.{verb}() returned {given}: it must return {wanted.__name__}")
    return answer


def _check_plan(stage: object, call: AttentionCall, plan: Plan) -> None:
    masks = [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
    for mask in masks:
        if not mask.geometry.fits(call.geometry):
            made, wanted = mask.geometry.describe(), call.geometry.describe()
            raise MaskError(f"{type(stage).__name__} returned a mask for {made}; the call is {wanted}")
