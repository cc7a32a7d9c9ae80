"""Methods and parameters: bounds, unknown names with the nearest ones."""

from __future__ import annotations

from itertools import product

import pytest

import sparseprefill as sp

SEARCHED = ("flexprefill", "xattention", "vertical-slash")
"""Methods to compare with, whose defaults are among the values to try."""


def test_every_registered_method_has_a_summary_and_builds() -> None:
    methods = sp.default_registry().methods()
    assert {"anchor-attention", "dense", "streaming", "vertical-slash"} <= set(methods)
    for name, method in methods.items():
        assert sp.methods()[name] == method.summary
        assert "\n" not in method.summary.strip()
        assert name == sp.build(name).name


@pytest.mark.parametrize("name", sorted(sp.methods()))
def test_every_value_of_a_search_space_configures(name: str) -> None:
    method = sp.default_registry().get(name)
    made = list(product(*method.search.values()))
    for values in made:
        parameters = dict(zip(method.search, values, strict=True))
        config = method.configure(parameters)
        assert {one: getattr(config, one) for one in parameters} == parameters
        assert method.pipeline(**parameters).name
    assert len(made) == len(set(made))
    for parameter, tried in method.search.items():
        assert len(tried) > 1
        if name in SEARCHED:  # what users run without tuning is among the values
            assert getattr(method.configure({}), parameter) in tried


@pytest.mark.parametrize("name", SEARCHED)
def test_methods_to_compare_with_can_be_tuned(name: str) -> None:
    assert sp.default_registry().get(name).search
