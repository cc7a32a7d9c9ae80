"""torch.compile over what holds a pipeline: it runs between graphs, with the numbers that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparseprefill as sp
from helpers.build import make

CALL = make(60, heads=4, kv_heads=2)
QKV = CALL.q, CALL.k, CALL.v
MEMORY = sp.Memory()
GATED = sp.gated(sp.build("rowmax", block=16), "auto")
WAYS: dict[str, Callable[[sp.Pipeline], Callable[..., Any]]] = {
    "called": lambda one: lambda q, k, v: one(q, k, v) * 2,
    "itself": lambda one: lambda q, k, v: 2 * torch.compile(one, backend="eager")(q, k, v),
    "run": lambda one: lambda q, k, v: one.run(sp.AttentionCall(q, k, v)).out * 2,
    "of a call": lambda one: lambda q, k, v: one.run(CALL).out * 2,
    "with a memory": lambda one: lambda q, k, v: one(q, k, v, memory=MEMORY, layer=3) * 2,
}


@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
@pytest.mark.parametrize("method", ["rowmax", "streaming"])
@pytest.mark.parametrize("way", WAYS)
def test_it_runs_between_graphs(way: str, method: str) -> None:
    pipeline = sp.build(method, block=16)
    assert isinstance(pipeline, sp.Pipeline)
    torch._dynamo.reset()
    compiled = torch.compile(WAYS[way](pipeline), backend="eager")
    for _ in range(2):
        assert torch.equal(2 * pipeline.run(CALL).out, compiled(*QKV))


def test_behind_a_gate() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: GATED(q, k, v) * 2, backend="eager")
    assert torch.equal(2 * GATED.run(CALL).out, compiled(*QKV))


def test_one_graph_says_why_it_cannot_be() -> None:
    torch._dynamo.reset()
    pipeline = sp.build("streaming", block=16)
    compiled = torch.compile(pipeline, backend="eager", fullgraph=True)
    with pytest.raises(
        Exception, match=r"a pipeline of sparseprefill .* runs between graphs\. Compile with fullgraph=False"
    ):
        compiled(*QKV)
