"""Execution into tensors of the caller, for executors that can and for those that cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from sparseprefill.plan import Result

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Plan
    from sparseprefill.stages import SparseExecutor


def execute_into(executor: SparseExecutor, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
    """`executor.execute_into` where it has that; else `execute`, and a copy.

    out: ``[B, Hq, Nq, Dv]`` in the call's dtype; lse: ``[B, Hq, Nq]`` float32 (float64 for float64 calls); any strides.
    """
    into = getattr(executor, "execute_into", None)
    if into is not None:
        made: Result = into(call, plan, out, lse)
        return made
    result = executor.execute(call, plan)
    if not isinstance(result, Result):
        return result
    out.copy_(result.out)
    lse.copy_(result.lse)
    return evolve(result, out=out, lse=lse)
