"""AutoExecutor: which executor serves which device."""

from __future__ import annotations

import torch

from helpers.build import make
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Plan


def test_cpu_calls_go_to_the_reference() -> None:
    call = make(20, sinks=torch.zeros(2))
    plan, auto = Plan(SparseMask.full(call, 8)), AutoExecutor()
    assert isinstance(auto.choose(call), ReferenceExecutor)
    assert auto.unsupported(call) is None
    assert torch.equal(ReferenceExecutor().execute(call, plan).out, auto.execute(call, plan).out)
    assert torch.equal(ReferenceExecutor().accumulate(call, plan).acc, auto.accumulate(call, plan).acc)
