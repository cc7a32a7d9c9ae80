"""Every registered method through every contract: on the standard calls, and on drawn ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given

import sparseprefill as sp
from helpers.examples import SCOPES, few_calls, few_of, part
from sparseprefill.testing import calls, check_method, contracts, standard_calls

METHODS = sorted(sp.default_registry().methods())


@pytest.mark.parametrize("name", METHODS)
def test_every_law_on_standard_calls(name: str) -> None:
    """All laws at once share the runs that they look at; an error names the law and the call."""
    report = check_method(name)
    assert set(contracts.LAWS) == {*report.cases, *report.skipped}
    method = sp.default_registry().get(name)
    left_out = {"chunk invariance at the grain"} if method.pipeline(**method.small).grain is None else set[str]()
    assert left_out | {"repeated == plain"} == set(report.skipped), "nothing is recorded without kernels"


def other_dtypes() -> Iterator[Any]:
    """bfloat16 of every method; of a method of each head scope also float16, which is handled alike, and float64, in
    which every method's calls are drawn below."""
    for name in METHODS:
        few = name in SCOPES.values()
        for dtype in (torch.bfloat16, torch.float16, torch.float64) if few else (torch.bfloat16,):
            yield pytest.param(name, dtype, marks=[] if few else [pytest.mark.thorough])


@pytest.mark.parametrize(("name", "dtype"), other_dtypes(), ids=str)
def test_every_law_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    report = check_method(name, calls=few_calls(dtype))
    left_out = {"chunk invariance at the grain", "repeated == plain"}
    if sp.build(name).head_scope == "group":  # the few calls have one group each
        left_out.add("parts by heads == whole")
    assert set(contracts.LAWS) - left_out <= set(report.cases)


@pytest.mark.parametrize("name", METHODS)
def test_small_parameters_are_sparse(name: str) -> None:
    """Else the laws above would say nothing about sparse behaviour."""
    method = sp.default_registry().get(name)
    call = max(standard_calls(), key=lambda one: one.q.shape[2])
    density = method.pipeline(**method.small).run(call).density
    assert (name == "dense") == (density == 1.0)


@pytest.mark.parametrize("name", METHODS)
def test_lists_of_our_own_are_not_looked_at_again(name: str) -> None:
    """On a CPU an executor reads every value of lists that nobody said to be sound."""
    method = sp.default_registry().get(name)
    call = max(standard_calls(), key=lambda one: one.q.shape[2])
    for options in ({}, method.small):
        plan = method.pipeline(**{**method.stand_in, **options}).run(call).plan
        assert not any(mask.doubtful for mask in plan.masks)


# float64, so that no score lies within rounding of a threshold and two runs choose the same keys.
DRAWN = calls(dtypes=(torch.float64,), head_dims=(8, 16), max_batch=2, max_heads=4)


@pytest.mark.parametrize("name", few_of(METHODS))
@part(0.4)
@given(call=DRAWN)
def test_every_law_on_drawn_calls(name: str, call: sp.AttentionCall) -> None:
    method = sp.default_registry().get(name)
    assume(not method.pipeline(**method.small).unsupported(call))
    report = check_method(name, calls=[call])
    assert not (set(report.cases) & set(report.skipped))


def test_each_head_scope_has_a_method_whose_calls_are_drawn() -> None:
    small = {name: sp.default_registry().get(name) for name in METHODS}
    scopes = {name: method.pipeline(**method.small).head_scope for name, method in small.items()}
    assert {name: scopes[name] for name in SCOPES.values()} == {name: scope for scope, name in SCOPES.items()}
    assert set(scopes.values()) == set(SCOPES)
