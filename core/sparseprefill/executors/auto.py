"""AutoExecutor: Triton for CUDA tensors, the reference for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from sparseprefill.executors.into import execute_into
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.parts.split import workspace

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Plan, Result
    from sparseprefill.softmax import SoftmaxState
    from sparseprefill.stages import SparseExecutor


@frozen
class AutoExecutor:
    """Picks by the device of the call; Triton is imported when the first CUDA call comes.

    A CUDA call that Triton cannot run is refused (`unsupported`), never passed to the slow reference in silence.
    """

    def unsupported(self, call: AttentionCall) -> str | None:
        """The chosen executor's objection."""
        ask = getattr(self.choose(call), "unsupported", None)
        return None if ask is None else ask(call)

    def choose(self, call: AttentionCall) -> SparseExecutor:
        """The executor for this call."""
        if call.q.device.type != "cuda":
            return ReferenceExecutor()
        from sparseprefill.executors.triton import TritonExecutor

        return TritonExecutor()

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
