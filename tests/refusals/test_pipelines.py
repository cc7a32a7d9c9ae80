"""What pipelines, unions, routes and their gates and profiles refuse, and executors and metrics asked without one."""

from __future__ import annotations

from typing import Any

import torch

import sparseprefill as sp
from helpers.build import make
from helpers.correctors import Blend
from helpers.refusals import Refusal, invalid_call, over, parameter_error, stage_error
from helpers.stubs import Estimate, Observe, Refine
from sparseprefill import metrics
from sparseprefill.executors.auto import CPU
from sparseprefill.executors.triton import TritonExecutor

CALL = make(40)
THREE = (CALL.q, CALL.k, CALL.v)
PLAN = sp.Plan(sp.SparseMask.full(CALL))
STREAMING, DENSE = sp.build("streaming"), sp.build("dense")
MADE = sp.Pipeline(Estimate())
BOTH = (MADE, sp.gated(MADE))


def pipeline(**fields: Any) -> sp.Pipeline:
    return sp.Pipeline(**{"estimator": Estimate(), **fields})


STAGES = [
    parameter_error(
        r"Pipeline\.estimator: object has no estimate\(\); a PatternEstimator needs it", pipeline, estimator=object()
    ),
    parameter_error(
        r"Pipeline\.refiners: int has no refine\(\); a MaskRefiner needs it", pipeline, refiners=(Refine(), 3)
    ),
    parameter_error(r"Pipeline\.executor: Estimate has no execute\(\), accumulate\(\)", pipeline, executor=Estimate()),
    parameter_error(r"Pipeline\.observers: Refine has no observe\(\)", pipeline, observers=(Refine(),)),
    parameter_error(r"Pipeline.corrector: int has no correct\(\); a Corrector needs it", STREAMING.with_corrector, 3),
    *(
        parameter_error(f"Pipeline.{name} is .*: pass a tuple of stages", pipeline, **{name: given})
        for name in ("refiners", "observers")
        for given in (5, "sink", b"sink", torch.zeros(2))
    ),
    *(
        parameter_error(
            r"Pipeline\.workspace is .*: pass a positive number of bytes, 'auto'", pipeline, workspace=value
        )
        for value in (0, -1, True, False, 1.5, "all", "much")
    ),
    *(
        parameter_error(r"Pipeline\.kept_bytes is .*: pass a number of bytes, 0 for none", pipeline, kept_bytes=value)
        for value in (-1, True, 1.0, "auto", None)
    ),
    *(
        parameter_error(r"tail is .*: pass a number of query rows from 0 to 2147483647", made.with_tail, rows)
        for made in (STREAMING, sp.Route.of(STREAMING))
        for rows in (-1, True, 1.0, "128", None, 1 << 31)
    ),
    *(
        stage_error(
            r"\.tail is .*: it must be a number of query rows",
            sp.Pipeline,
            type("Told", (Estimate,), {"tail": answer})(),
        )
        for answer in (-1, 1.5, True, "all")
    ),
]

CALLS = [
    *(
        invalid_call(rf"\.{name} is 1: there is no such field.*Known: .*sinks", made, *THREE, **{name: 1})
        for name in ("bogus", "self")
        for made in BOTH
    ),
    *(invalid_call("did you mean 'softcap'", made, *THREE, soft_cap=1) for made in BOTH),
    *(parameter_error("call is NoneType: pass an AttentionCall", made.run, None) for made in BOTH),
    parameter_error("memory is 3: pass a Memory, or None", MADE.run, CALL, 3),
    parameter_error(
        "memories has 1 entries: pass one for each of 2 calls, or None", MADE.run_many, [CALL, CALL], [None]
    ),
]

UNIONS = [
    parameter_error("UnionEstimator has no parts", sp.UnionEstimator),
    parameter_error("UnionEstimator part 0 is Estimate, a class", sp.UnionEstimator, Estimate),
    parameter_error("UnionEstimator part 0 is str", sp.UnionEstimator, "dense"),
    parameter_error(
        "UnionEstimator part 1 is Observe: pass an estimator or a Pipeline", sp.UnionEstimator, Estimate(), Observe()
    ),
    *(
        parameter_error(
            r"UnionEstimator part 1 is .*: pass an estimator or a Pipeline", sp.UnionEstimator, Estimate(), part
        )
        for part in (Estimate, int, 3, object())
    ),
    parameter_error(
        "part 1 has a corrector, which would not run", sp.UnionEstimator, DENSE, STREAMING.with_corrector(Blend())
    ),
]

GATES = [
    parameter_error(r'gate is .*: pass "auto", the path of a break-even table', sp.gated, STREAMING, given)
    for given in (True, 3, 0, object(), ["auto"])
]

EXECUTORS = [
    parameter_error("AttentionCall", sp.AutoExecutor().choose, None),
    parameter_error("call is", CPU.execute, 1, PLAN),
    parameter_error("plan is", CPU.accumulate, CALL, 1),
    *(
        parameter_error(words, kind, **{name: value})
        for kind in (TritonExecutor, sp.AutoExecutor)
        for name, value, words in (
            ("precision", "fp4", "precision is 'fp4': pass 'call' or 'int8'"),
            ("bound", -1, "bound is -1: pass a number from 0"),
        )
    ),
    *(parameter_error("rows", metrics.sample_rows, CALL, rows) for rows in (0, -2, [], [40], [-1], [0, -1], [[1]])),
    *(
        parameter_error(
            r"result is of another call .*: pass what this call's run returned", sp.recall, make(24), MADE.run(other)
        )
        for other in (make(20, 24), make(24, heads=4), make(24, window=5), make(24, batch=2), make(24, 40))
    ),
]


@over([*STAGES, *CALLS, *UNIONS, *GATES, *EXECUTORS])
def test_refused(refusal: Refusal) -> None:
    refusal.check()
