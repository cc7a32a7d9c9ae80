"""A pipeline that takes its parameters from a profile, by the length of each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from sparseprefill.errors import ParameterError, UnsupportedCallError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.into import execute_into
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.parts.split import workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.profile import Profile
from sparseprefill.stages import HeadScope, head_scope

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.method import Method
    from sparseprefill.plan import Plan, Result
    from sparseprefill.softmax import SoftmaxState
    from sparseprefill.stages import SparseExecutor


@frozen(eq=False)
class ByLength:
    """One pipeline per range of a profile; a call's number of keys chooses. None: dense was all that held up."""

    profile: Profile
    pipelines: tuple[Pipeline | None, ...]

    def choose(self, call: AttentionCall) -> Pipeline:
        """The pipeline for this call; UnsupportedCallError where the profile has none."""
        found = self.pipelines[self.profile.index(call.kv_len)]
        if found is None:
            raise UnsupportedCallError([str(self.objection(call))])
        return found

    def objection(self, call: AttentionCall) -> str | None:
        """Why the profile cannot serve this call, whatever the chosen pipeline says."""
        reason = self.profile.model.objection(call)
        if reason:
            return f"the profile is for another model: {reason}"
        kv_len = call.kv_len
        if self.pipelines[self.profile.index(kv_len)] is None:
            return f"the profile has no setting of {self.profile.method} that is accurate enough at {kv_len} keys"
        return None


@frozen(eq=False)
class ProfiledEstimator:
    """Plans with the pipeline chosen for the call, its refiners included."""

    by_length: ByLength

    @property
    def grain(self) -> int | None:
        """That of the method, if one range serves all lengths; chunks of one prompt may fall in several ranges."""
        pipelines = self.by_length.pipelines
        return pipelines[0].grain if len(pipelines) == 1 and pipelines[0] is not None else None

    @property
    def head_scope(self) -> HeadScope | None:
        """The widest scope of the pipelines."""
        return head_scope(one for one in self.by_length.pipelines if one is not None)

    def workspace(self, call: AttentionCall) -> int:
        """That of the chosen pipeline's plan."""
        chosen = self.by_length.choose(call)
        return workspace((chosen.estimator,), call) + workspace(chosen.refiners, call)

    def unsupported(self, call: AttentionCall) -> str | None:
        """The objection of the profile, or those of the chosen pipeline's stages; the executor speaks for itself."""
        reason = self.by_length.objection(call)
        if reason:
            return reason
        chosen = self.by_length.choose(call)
        silent = evolve(chosen, executor=ReferenceExecutor())
        return "; ".join(silent.unsupported(call)) or None

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The chosen pipeline's plan."""
        return self.by_length.choose(call).plan(call, memory)


@frozen(eq=False)
class ProfiledExecutor:
    """Runs the chosen pipeline's executor; the usual one where the profile has none, as for a band of a window."""

    by_length: ByLength

    def choose(self, call: AttentionCall) -> SparseExecutor:
        """The executor for this call."""
        found = self.by_length.pipelines[self.by_length.profile.index(call.kv_len)]
        return AutoExecutor() if found is None else found.executor

    def unsupported(self, call: AttentionCall) -> str | None:
        """The chosen executor's objection."""
        ask = getattr(self.choose(call), "unsupported", None)
        return None if ask is None else ask(call)

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """See SparseExecutor."""
        return self.choose(call).execute(call, plan)

    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """See `executors.into`."""
        return execute_into(self.choose(call), call, plan, out, lse)

    def workspace(self, call: AttentionCall) -> int:
        """The chosen executor's."""
        return workspace((self.choose(call),), call)

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """See SparseExecutor."""
        return self.choose(call).accumulate(call, plan)


@frozen(eq=False)
class ProfiledObserver:
    """Runs the chosen pipeline's observers."""

    by_length: ByLength

    @property
    def head_scope(self) -> HeadScope | None:
        """The widest scope of the pipelines' observers."""
        return head_scope(each for one in self.by_length.pipelines if one is not None for each in one.observers)

    def workspace(self, call: AttentionCall) -> int:
        """That of the chosen pipeline's observers."""
        return workspace(self.by_length.choose(call).observers, call)

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """See Observer."""
        for observer in self.by_length.choose(call).observers:
            observer.observe(call, plan, result, memory)


def profiled(method: Method, profile: Profile, parameters: Mapping[str, Any]) -> Pipeline:
    """A pipeline of `method` that takes each call's parameters from the profile; `parameters` go over them.

    The number of keys of a call, padding included, chooses the range. Raises ParameterError where the profile is for
    another method, or its parameters do not fit the method.
    """
    if profile.method != method.name:
        raise ParameterError(f"the profile is for {profile.method!r}, not for {method.name!r}")
    made: list[Pipeline | None] = []
    for i, one in enumerate(profile.ranges):
        try:
            made.append(None if one.parameters is None else method.pipeline(**{**one.parameters, **parameters}))
        except ParameterError as error:
            raise ParameterError(f"profile of {method.name}, ranges[{i}].parameters: {error}") from error
    by_length = ByLength(profile, tuple(made))
    observers = (ProfiledObserver(by_length),) if any(one is not None and one.observers for one in made) else ()
    return Pipeline(ProfiledEstimator(by_length), (), ProfiledExecutor(by_length), observers, method.name)
