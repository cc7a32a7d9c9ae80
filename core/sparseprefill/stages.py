"""The interfaces that a method composes: estimator, refiners, executor, observers.

Strangers pass by shape; classes that inherit get the missing-method error when they are made. Three more attributes are
read where a stage has them:

``unsupported(call) -> str | None``
    why this stage cannot honour a feature of the call (window, softcap, sinks, padding, dtype); the caller then falls
    back and records the reason. A stage without it honours everything.
``grain: int | None``
    the number of tokens at whose multiples a prompt may be cut into chunks without changing the result. None, or no
    attribute: the stage looks at the call as a whole and has none.
``check_model(model: ModelIdentity) -> None``
    raises ParameterError where the stage was made for another model; adapters that know the model ask.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan, Result
    from sparseprefill.softmax import SoftmaxState


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
