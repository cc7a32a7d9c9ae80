"""What refiners refuse: parameters out of bounds, and plans that they cannot work on.

Values that no parameter of their type takes are in `helpers.bad_inputs`, for every parameter.
"""

from __future__ import annotations

import math
from typing import Any

from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from helpers.refusals import Refusal, over, parameter_error

# A class, its parameters, and the words.
PARAMETERS: list[tuple[Any, dict[str, Any], str]] = [
    (sp.StrideRescue, {"every": 7, "seed": 2**63}, "seed is 9223372036854775808"),
    (sp.RandomRescue, {"share": 0.5, "seed": 2**63}, "seed is 9223372036854775808"),
    *((sp.RandomRescue, {"share": share}, rf"share is {share}") for share in (1.1, 1.01, -0.01)),
    *(
        (kind, size, words)
        for kind in (sp.BudgetFloor, sp.BudgetCeiling)
        for size, words in (
            ({}, "pass either tiles or share"),
            ({"tiles": 1, "share": 0.5}, "pass either tiles or share"),
            ({"share": 1.01}, r"share is 1\.01"),
            ({"share": -0.01}, r"share is -0\.01"),
        )
    ),
    (sp.PositionDecay, {"tiles": 3, "share": 0.5}, "pass tiles or share, or neither"),
    (sp.PositionDecay, {"decay": -0.1}, "decay is -0.1"),
    (sp.RelativeThreshold, {"share": 1.01}, "share is 1.01"),
    (sp.ValueWeights, {"beta": -1.0}, "beta is -1.0"),
    (sp.RecallFloor, {"target": 1.5}, "^target is 1.5: pass a number from 0 to 1$"),
    (sp.RecallFloor, {"target": "high"}, "^target is 'high': pass a number from 0 to 1$"),
    (sp.RecallFloor, {"target": math.nan}, "^target is nan: pass a number from 0 to 1$"),
    (sp.RecallFloor, {"rows": 0}, "^rows is 0: pass an integer from 1 to 65536$"),
    (sp.RecallFloor, {"rows": True}, "^rows is True: pass an integer from 1 to 65536$"),
    (sp.RecallFloor, {"span": 0}, "^span is 0: pass an integer >= 1$"),
    (sp.RecallFloor, {"speaks_for": "all"}, "^speaks_for is 'all': pass 'neighbours' or 'stretch' or 'tile'$"),
    (sp.RecallFloor, {"dense_from": -1}, "^dense_from is -1: pass a number from 0 to 1$"),
    (sp.SkipSoftmax, {"below": -1}, "below is -1: pass a number from 0"),
    *((sp.SkipSoftmax, {"below": more}, r"below is .*: pass .*1e\+12") for more in (1e12 + 0.5, math.inf)),
]


def run(refiner: sp.MaskRefiner, method: str = "dense", **parameters: Any) -> sp.Result:
    found: sp.Result = evolve(sp.build(method, **parameters), refiners=(refiner,)).run(make(64))
    return found


PLANS = [
    *(
        parameter_error(f"{type(refiner).__name__} needs scores, .* is None: .*{remedy}", run, refiner)
        for refiner, remedy in (
            (sp.PositionDecay(), "use BudgetCeiling"),
            (sp.RelativeThreshold(0.1), "leave it out"),
            (sp.RelativeThreshold(0.0), "leave it out"),
            (sp.ValueWeights(), "leave it out"),
        )
    ),
    parameter_error(
        r"ValueWeights.pool is 8: pass a divisor of 12",
        evolve(sp.build("streaming", block=12), refiners=(sp.ValueWeights(pool=8), sp.RelativeThreshold(0.1))).run,
        make(64),
    ),
    parameter_error(
        r"SkipSoftmax\.grain is 8: pass a multiple of 16", run, sp.SkipSoftmax(20.0, grain=8), "skip-softmax", block=16
    ),
    parameter_error(
        r"^RecallFloor\.span is 24: pass a multiple of 16, the tokens of the plan's",
        *(sp.RecallFloor(span=24).refine, make(64), sp.Plan(sp.SparseMask.empty(make(64), 16)), sp.Memory()),
    ),
]


@over([*(parameter_error(words, kind, **given) for kind, given, words in PARAMETERS), *PLANS])
def test_refused(refusal: Refusal) -> None:
    refusal.check()
