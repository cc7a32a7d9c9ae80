"""Hybrids that no paper has, as docs/compose.md shows them, through every contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given

import sparseprefill as sp
from helpers.examples import SCOPES, few_calls, few_of, part
from sparseprefill.testing import calls, check_method, contracts, standard_calls

REGISTRY = sp.default_registry()
METHODS = sorted(REGISTRY.methods())


def method(name: str, full: bool = False, **more: Any) -> sp.Pipeline:
    """A method small enough for a few hundred tokens, or the same with every key."""
    one = REGISTRY.get(name)
    return one.pipeline(**{**one.small, **((full and one.full) or {}), **more})


def refined(name: str, *refiners: sp.MaskRefiner) -> Callable[..., sp.Pipeline]:
    """A method with refiners after its own."""

    def build(full: bool = False) -> sp.Pipeline:
        made = method(name, full)
        return evolve(made, refiners=(*made.refiners, *refiners), name=f"{name} refined")

    return build


def stripes_and_slashes(second: str) -> Callable[..., sp.Pipeline]:
    """AnchorAttention's stripes and another method's slashes."""

    def build(full: bool = False) -> sp.Pipeline:
        return sp.Pipeline(sp.UnionEstimator(method("anchor-attention", full), method(second, full)))

    return build


def star_around(inner: str) -> Callable[..., sp.Pipeline]:
    """Star Attention with a method inside its blocks."""

    def build(full: bool = False) -> sp.Pipeline:
        one = REGISTRY.get(inner)
        parameters = {**one.small, **((full and one.full) or {})}
        return method("star-attention", full, inner={"method": inner, "parameters": parameters}, context_length=112)

    return build


def shared(inner: str, *refiners: sp.MaskRefiner) -> Callable[..., sp.Pipeline]:
    """SharePrefill's clusters over another method's masks."""

    def build(full: bool = False) -> sp.Pipeline:
        one = REGISTRY.get(inner)
        parameters = {**one.small, **((full and one.full) or {})}
        made = method("share-prefill", full, inner={"method": inner, "parameters": parameters})
        return evolve(made, refiners=(*made.refiners, *refiners))

    return build


def budget(refiner: type[sp.BudgetFloor | sp.BudgetCeiling], share: float) -> Callable[..., sp.Pipeline]:
    """A method held to a share of the tiles from below or above; the whole share is the full mask."""

    def build(full: bool = False) -> sp.Pipeline:
        return evolve(method("anchor-attention", full), refiners=(refiner(share=1.0 if full else share),))

    return build


def capped(build: Callable[..., sp.Pipeline]) -> Callable[..., sp.Pipeline]:
    """A hybrid under a ceiling of four tenths, which ranks by the scores of both its methods."""

    def build_capped(full: bool = False) -> sp.Pipeline:
        made = build(full)
        return evolve(made, refiners=(*made.refiners, sp.BudgetCeiling(share=1.0 if full else 0.4)))

    return build_capped


def every(name: str) -> Callable[..., sp.Pipeline]:
    """A method with every key, whose scores alone are wanted."""
    return lambda full: method(name, True)


def thresholded(full: bool) -> sp.MaskRefiner:
    """A threshold that keeps some tiles, or all of them."""
    return sp.RelativeThreshold(0.0 if full else 0.4, sink=1, local=0)


def decaying(full: bool) -> sp.MaskRefiner:
    """A budget that falls, or one that has room for everything."""
    return sp.PositionDecay(share=1.0 if full else 0.3, decay=1.0 if full else 0.5, sink=1, local=0)


def by_score(
    build: Callable[[bool], sp.Pipeline], choose: Callable[[bool], sp.MaskRefiner], *weights: sp.MaskRefiner
) -> Callable[..., sp.Pipeline]:
    """A method or hybrid of whose pairs a refiner chooses by score."""

    def build_chosen(full: bool = False) -> sp.Pipeline:
        made = build(full)
        return evolve(made, refiners=(*made.refiners, *weights, choose(full)))

    return build_chosen


HYBRIDS: dict[str, Callable[..., sp.Pipeline]] = {
    "share-prefill + rescue": refined("share-prefill", sp.LocalBand(1), sp.Sink(1), sp.StrideRescue(3)),
    "anchor-attention + sample-attention": stripes_and_slashes("sample-attention"),
    "anchor-attention + vertical-slash": stripes_and_slashes("vertical-slash"),
    "anchor-attention in star-attention": star_around("anchor-attention"),
    "bfla in star-attention": star_around("bfla"),
    "vertical-slash in star-attention": star_around("vertical-slash"),
    "xattention shared + rescue": shared("xattention", sp.LocalBand(1), sp.Sink(1), sp.StrideRescue(3)),
    "anchor-attention shared": shared("anchor-attention"),
    "bfla shared + recall floor": shared("bfla", sp.RecallFloor(target=0.8, dense_from=1.0)),
    "budget floor": budget(sp.BudgetFloor, 0.5),
    "budget ceiling": budget(sp.BudgetCeiling, 0.5),
    "vertical-slash + ceiling": capped(stripes_and_slashes("vertical-slash")),
    "vertical-slash in star-attention + ceiling": capped(star_around("vertical-slash")),
    "anchor-attention + recall floor": refined("anchor-attention", sp.RecallFloor(target=0.7, rows=3, dense_from=1.0)),
    "vertical-slash + recall floor": refined("vertical-slash", sp.RecallFloor(target=0.8, dense_from=1.0)),
    "bfla + recall floor of spans": refined("bfla", sp.RecallFloor(target=0.7, rows=1, span=32)),
    "streaming + recall floor in spans": refined("streaming", sp.RecallFloor(rows=2, span=64)),
    "xattention + relative threshold": by_score(every("xattention"), thresholded),
    "bfla + value weights + position decay": by_score(every("bfla"), decaying, sp.ValueWeights(1.0, pool=4)),
    "anchor-attention + relative threshold": by_score(partial(method, "anchor-attention"), thresholded),
    "vertical-slash + position decay": by_score(partial(method, "vertical-slash"), decaying),
    "stripes and slashes + value weights + relative threshold": by_score(
        stripes_and_slashes("vertical-slash"), thresholded, sp.ValueWeights(pool=4)
    ),
    **{f"{name} + dense rows": refined(name, sp.DenseRows(20)) for name in METHODS},
}


DENSE_ROWS = [f"{name} + dense rows" for name in METHODS]
FEW_DENSE = [f"{name} + dense rows" for name in SCOPES.values()]
OTHERS = [name for name in HYBRIDS if name not in DENSE_ROWS]
FEW = (
    "anchor-attention + vertical-slash",
    "bfla in star-attention",
    "xattention shared + rescue",
    "vertical-slash + ceiling",
    "bfla + value weights + position decay",
)
"""Hybrids of every run: a union, methods inside others, and both kinds of choice by score. The others keep every law on
the same few standard calls, and on drawn ones, with ``-m thorough``."""


def check_report(report: contracts.Report) -> None:
    assert set(report.skipped) <= {"chunk invariance at the grain", "repeated == plain"}
    assert set(contracts.LAWS) == {*report.cases, *report.skipped}


@pytest.mark.parametrize("name", few_of([*OTHERS, *DENSE_ROWS], [*FEW, *FEW_DENSE]))
def test_every_law_on_a_few_calls(name: str) -> None:
    check_report(check_method(HYBRIDS[name], full={"full": True}, calls=few_calls()))


# float64, so that no score lies within rounding of a threshold and two runs choose the same keys.
DRAWN = calls(dtypes=(torch.float64,), head_dims=(8, 16), max_batch=2, max_heads=4)


@pytest.mark.parametrize("name", few_of(OTHERS, FEW))
@part(0.3)
@given(call=DRAWN)
def test_every_law_on_drawn_calls(name: str, call: sp.AttentionCall) -> None:
    assume(not HYBRIDS[name]().unsupported(call))
    report = check_method(HYBRIDS[name], full={"full": True}, calls=[call])
    assert not (set(report.cases) & set(report.skipped))


LONGEST = max(standard_calls(), key=lambda one: one.q.shape[2])


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "dense + dense rows"])
def test_a_hybrid_is_sparse(name: str) -> None:
    """Else the laws would say nothing about sparse behaviour."""
    assert HYBRIDS[name]().run(LONGEST).density < 1.0


@pytest.mark.parametrize("name", METHODS)
def test_the_last_rows_are_dense_under_any_method(name: str) -> None:
    result = HYBRIDS[f"{name} + dense rows"]().run(LONGEST)
    rows = torch.arange(LONGEST.q.shape[2])[-20:]
    allowed = LONGEST.geometry.visible(rows)[:, None].expand(-1, LONGEST.q.shape[1], -1, -1)
    assert torch.equal(allowed, result.mask.to_dense(rows))


def test_the_union_holds_the_masks_of_both_and_resumes_from_the_carry() -> None:
    parts = [method(name).run(LONGEST).mask.to_dense() for name in ("anchor-attention", "sample-attention")]
    result = HYBRIDS["anchor-attention + sample-attention"]().run(LONGEST)
    assert torch.equal(parts[0] | parts[1], result.mask.to_dense())
    assert result.plan.carry is not None


def test_star_with_a_method_inside_chooses_among_the_stars_keys() -> None:
    star = method("star-attention", context_length=112).run(LONGEST)
    inside = HYBRIDS["anchor-attention in star-attention"]().run(LONGEST)
    assert inside.density < star.density
    assert not (inside.mask.to_dense() & ~star.mask.to_dense()).any()


def test_the_floor_is_above_and_the_ceiling_below() -> None:
    plain = method("anchor-attention").run(LONGEST).density
    floor, ceiling = (HYBRIDS[f"budget {name}"]().run(LONGEST).density for name in ("floor", "ceiling"))
    assert plain < floor
    assert ceiling <= plain
