"""AutoExecutor: Triton for CUDA tensors, fused attention over gathered keys on CPUs, the reference for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen

from sparseprefill.call import AttentionCall, check_call
from sparseprefill.executors.cpu import CpuExecutor
from sparseprefill.executors.reference import REFERENCE, ReferenceExecutor
from sparseprefill.kernels.family.choose import a_precision, are_records, records, unmet
from sparseprefill.kernels.family.known import known
from sparseprefill.plan import BOUND, EXACT, Plan, Result, SoftmaxState
from sparseprefill.validate import fitting, number

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.executors.triton import TritonExecutor
    from sparseprefill.kernels.family.record import Family

CPU = CpuExecutor()


@frozen
class AutoExecutor:
    """Picks by the device of the call; Triton is imported when the first CUDA call comes.

    A CUDA call that Triton cannot run is refused (`unsupported`), never passed to the slow reference in silence.

    kernels, precision, bound: of `TritonExecutor`; on other devices calls run as they are, which `Result.kernels` says.
    """

    kernels: tuple[Family, ...] = field(
        factory=known,
        converter=records,
        kw_only=True,
        repr=False,
        validator=fitting("AutoExecutor", are_records, "Family records, such as those of Registry.kernels()"),
    )
    precision: str = field(default=EXACT, kw_only=True, validator=a_precision)
    bound: float = field(default=BOUND, kw_only=True, validator=number(0.0))
    repeats: ClassVar[bool] = True

    def choose(self, call: AttentionCall) -> CpuExecutor | ReferenceExecutor | TritonExecutor:
        """The executor for this call; ParameterError for no call."""
        if not isinstance(call, AttentionCall):
            check_call(call)
        if call.q.device.type != "cuda":
            return CPU if call.q.device.type == "cpu" else REFERENCE
        return self._triton

    def unsupported(self, call: AttentionCall) -> str | None:
        """The chosen executor's objection."""
        return self.choose(call).unsupported(call)

    def workspace(self, call: AttentionCall) -> int:
        """The chosen executor's."""
        return self.choose(call).workspace(call)

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Attention of one call over its plan, by the executor that `choose` names: see `SparseExecutor.execute`."""
        return self._told(call, self.choose(call).execute(call, plan))

    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """Run `execute`, and leave output and LSE in tensors of the caller."""
        return self._told(call, self.choose(call).execute_into(call, plan, out, lse))

    def execute_many(self, calls: Sequence[AttentionCall], plans: Sequence[Plan]) -> list[Result]:
        """Run `execute` for each call; together where Triton serves all: see `TritonExecutor.execute_many`."""
        if not calls or not all(call.q.is_cuda for call in calls):
            return [self.execute(call, plan) for call, plan in zip(calls, plans, strict=True)]
        return self._triton.execute_many(calls, plans)

    def execute_many_into(
        self, calls: Sequence[AttentionCall], plans: Sequence[Plan], outs: Sequence[Tensor]
    ) -> list[Result]:
        """Run `execute_many`, and leave the outputs in tensors of the caller."""
        if calls and all(call.q.is_cuda for call in calls):
            return self._triton.execute_many_into(calls, plans, outs)
        made = zip(self.execute_many(calls, plans), outs, strict=True)
        return [evolve(result, out=out.copy_(result.out)) for result, out in made]

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The unnormalised state of one call, by the executor that `choose` names: see `SparseExecutor.accumulate`."""
        return self.choose(call).accumulate(call, plan)

    @cached_property
    def _triton(self) -> TritonExecutor:
        from sparseprefill.executors.triton import TritonExecutor

        return TritonExecutor(kernels=self.kernels, precision=self.precision, bound=self.bound)

    def _told(self, call: AttentionCall, result: Result) -> Result:
        if self.precision == EXACT or call.q.is_cuda:
            return result
        why = str(unmet(self.precision))
        return evolve(result, kernels=tuple(evolve(one, reason=one.reason or why) for one in result.kernels))
