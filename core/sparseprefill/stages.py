"""The interfaces that a method composes: estimator, refiners, executor, observers.

Strangers pass by shape; classes that inherit get the missing-method error when they are made. A stage may say more of
itself, in attributes that a pipeline asks for once, when it is built (`Stage`); each has a default:

``unsupported(call) -> str | None``
    why this stage cannot honour a feature of the call (window, softcap, sinks, padding, dtype); the caller then falls
    back and records the reason. A stage without it honours everything.
``grain: int | None``
    the number of tokens at whose multiples a prompt may be cut into chunks without changing the result. None, or no
    attribute: the stage looks at the call as a whole and has none.
``check_model(model: ModelIdentity) -> None``
    raises ParameterError where the stage was made for another model; adapters that know the model ask.
``head_scope: HeadScope | None``
    what an estimator, refiner or observer looks at when it decides for a query head: "head", that head alone (with its
    number, ``call.first_head + h``, and what memory holds); "group", all query heads of its KV head. A pipeline may
    then cut a long call into parts by heads, which run in the order of their heads with one memory. None, or no
    attribute: the stage looks at all heads together, and no call is cut by heads.
``workspace(call) -> int``
    an upper bound in bytes of the memory that the stage holds for such a call, beyond q, k, v and the output, with
    what it leaves in its plan; from sizes alone, no value on the device is read. The default: `default_workspace`.
``execute_into(call, plan, out, lse) -> Result``
    of an executor: as `execute`, into tensors of the caller, which may be views of larger ones: out ``[B, Hq, Nq, Dv]``
    in the call's dtype, lse ``[B, Hq, Nq]`` float32 (float64 for float64 calls). Without it the result is copied.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import frozen

from sparseprefill.parts.workspace import default_workspace

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan, Result
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.softmax import SoftmaxState

HeadScope = Literal["head", "group"]
"""See `head_scope` above."""


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
        """The same, left unnormalised: for estimators that compute real output and for merging parts."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Sees a layer's result; the only writer of memory."""

    __slots__ = ()

    @abstractmethod
    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Keep what later layers or chunks need."""
        ...


def missing(stage: object, interface: type) -> list[str]:
    """Names of the interface's methods that `stage` lacks."""
    wanted = [name for name, value in vars(interface).items() if getattr(value, "__isabstractmethod__", False)]
    return [name for name in wanted if not callable(getattr(stage, name, None))]


@frozen(eq=False)
class Stage:
    """A stage with an answer to everything that a pipeline may ask: its own, or the default.

    given: the stage itself. unsupported, check_model: None where the stage has nothing to object to.
    """

    given: object
    grain: int | None
    head_scope: HeadScope | None
    workspace: Callable[[AttentionCall], int]
    unsupported: Callable[[AttentionCall], str | None] | None
    check_model: Callable[[ModelIdentity], None] | None

    @classmethod
    def of(cls, given: object) -> Stage:
        """Ask a stage, once."""
        return cls(**_answers(given))

    @property
    def name(self) -> str:
        """Its class, for messages."""
        return type(self.given).__name__

    def objection(self, call: AttentionCall) -> str | None:
        """Why it cannot honour a feature of the call, or None."""
        return None if self.unsupported is None else self.unsupported(call)


@frozen(eq=False)
class ExecutorStage(Stage):
    """The same of an executor. execute_into: see above; the default copies what `execute` returns."""

    given: SparseExecutor
    execute_into: Callable[[AttentionCall, Plan, Tensor, Tensor], Result]

    @classmethod
    def of(cls, given: Any) -> ExecutorStage:
        """Ask an executor, once."""

        def copied(call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
            result: Result = given.execute(call, plan)
            return result.into(out, lse) if hasattr(result, "into") else result  # nonsense is the pipeline's to name

        return cls(**_answers(given), execute_into=getattr(given, "execute_into", copied))


def _answers(given: object) -> dict[str, Any]:
    return {
        "given": given,
        "grain": getattr(given, "grain", None),
        "head_scope": getattr(given, "head_scope", None),
        "workspace": getattr(given, "workspace", default_workspace),
        "unsupported": getattr(given, "unsupported", None),
        "check_model": getattr(given, "check_model", None),
    }


def common_grain(grains: Iterable[int | None]) -> int | None:
    """The least common multiple of grains, None where one stage has none."""
    known = list(grains)
    return None if None in known else math.lcm(*(grain for grain in known if grain is not None))


def widest_scope(scopes: Iterable[HeadScope | None]) -> HeadScope | None:
    """What all stages together look at: the widest of their scopes, None where one looks at all heads."""
    found = set(scopes)
    if found <= {"head", "group"}:
        return "group" if "group" in found else "head"
    return None
