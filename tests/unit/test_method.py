"""Methods and parameters: bounds, unknown names with the nearest ones."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from attrs import frozen

import sparseprefill as sp
from helpers.stubs import Estimate
from sparseprefill.errors import ParameterError, UnknownMethodError
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline

SEARCHED = ("flexprefill", "xattention", "vertical-slash")
"""Methods to compare with, whose defaults are among the values to try."""


@frozen(kw_only=True)
class Config:
    size: int = 1

    def __attrs_post_init__(self) -> None:
        if self.size > 9:
            raise ValueError("too large")


def test_unknown_method_lists_the_nearest() -> None:
    with pytest.raises(
        UnknownMethodError, match=r"'anchor-atention'; did you mean 'anchor-attention'.*\? Known: .*dense"
    ):
        sp.build("anchor-atention")
    with pytest.raises(LookupError, match=r"'zzz'\. Known: "):
        sp.build("zzz")


def test_unknown_parameter_lists_the_nearest() -> None:
    with pytest.raises(
        ParameterError, match=r"streaming has no parameter 'windw'; did you mean 'window'\? Known: block"
    ):
        sp.build("streaming", windw=3)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("dense", {"block": 0}, "block is 0: pass an integer >= 1"),
        ("dense", {"block": -16}, "block is -16: pass an integer >= 1"),
        ("dense", {"block": 2.0}, "block is 2.0: pass an integer >= 1"),
        ("streaming", {"sink": -1}, "sink is -1: pass an integer >= 0"),
        ("streaming", {"window": 0}, "window is 0"),
        ("vertical-slash", {"gamma": 1.5}, "gamma is 1.5: pass a number from 0 to 1"),
        ("vertical-slash", {"gamma": math.nan}, "gamma is nan"),
        ("anchor-attention", {"step": 0}, "step is 0"),
        ("anchor-attention", {"block": True}, "block is True"),
        ("anchor-attention", {"init_tokens": "128"}, "init_tokens is '128'"),
        ("anchor-attention", {"theta": math.nan}, "theta is nan"),
        ("anchor-attention", {"use_anchor": 1}, "use_anchor is 1: pass True or False"),
    ],
)
def test_parameter_out_of_bounds(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        sp.build(name, **parameters)


def test_foreign_error_of_a_config_names_method_and_values() -> None:
    method = Method(name="mine", summary="", config=Config, build=lambda _: Pipeline(Estimate()))
    with pytest.raises(ParameterError, match=r"mine\(size=10\): too large"):
        method.pipeline(size=10)


@pytest.mark.parametrize("name", ["Mine", "my_method", "", "-a", 3])
def test_bad_method_name(name: Any) -> None:
    with pytest.raises(ParameterError, match=r"Method\.name is .*lower-case words joined by hyphens"):
        Method(name=name, summary="", config=Config, build=lambda _: Pipeline(Estimate()))


@pytest.mark.parametrize("config", [int, Config(), None])
def test_bad_config(config: Any) -> None:
    with pytest.raises(ParameterError, match=r"Method\.config is .*attrs class"):
        Method(name="mine", summary="", config=config, build=lambda _: Pipeline(Estimate()))


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
