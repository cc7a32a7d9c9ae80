"""Kernels are handed down: by the registry that builds, and to what is built by hand by the installed plugins."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

import sparseprefill as sp
from sparseprefill.errors import ParameterError
from sparseprefill.kernels.family.record import Family, Features, Job, Launched
from sparseprefill.method import Method
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile
from sparseprefill.registry import Registry, default_registry
from sparseprefill.testing import tensors

FEATURES = Features(dtypes=frozenset({torch.float16, torch.float32}), precisions=("call", "fp4"))


def launch(job: Job) -> Launched:
    job.arguments.outputs.out.zero_()
    job.arguments.outputs.lse.zero_()
    return Launched(repaired=True)


MINE = Family(name="mine", rank=50, launch=launch, features=FEATURES)


def plugin(**hooks: Any) -> ModuleType:
    """A module that offers what it is given."""
    made = ModuleType("mine")
    for name, answer in hooks.items():
        setattr(made, f"sparseprefill_{name}", sp.hookimpl(lambda answer=answer: answer))
    return made


@frozen
class Config:
    pass


@frozen
class Inside:
    """An estimator with an executor of its own, as anchor-attention has one."""

    executor: sp.AutoExecutor

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory | None = None) -> sp.Plan:
        return sp.Plan(sp.SparseMask.full(call, 16))


def mine() -> Registry:
    """A registry with one kernel, and one method, of which the installed plugins know nothing."""
    registry = Registry()
    method = Method(
        name="inside", summary="", config=Config, build=lambda _: sp.Pipeline(Inside(sp.AutoExecutor()), name="inside")
    )
    registry.load_entry_points()
    registry.register(plugin(kernels=[MINE], methods=[method]), "mine")
    return registry


def names(executor: Any) -> list[str]:
    return [one.name for one in executor.kernels]


def test_a_registry_hands_its_kernels_to_what_it_builds() -> None:
    registry = mine()
    made: Any = registry.build("inside")
    assert names(made.executor) == names(made.estimator.executor) == [one.name for one in registry.kernels()]
    assert "mine" in names(made.executor)
    assert "mine" not in names(sp.build("dense").executor)
    assert "mine" not in names(sp.AutoExecutor())


@pytest.mark.parametrize(
    "table",
    [
        {"method": "dense"},
        {"method": "dense", "executor": {"bound": 0.2}},
        {"method": "dense", "executor": {"precision": "fp4"}},
        {"union": [{"method": "dense"}, {"method": "streaming"}]},
        {"method": "dense", "recall": 0.9, "refiners": [{"name": "sink", "tiles": 2}]},
    ],
)
def test_a_registry_given_to_from_config_is_asked_for_its_kernels(table: dict[str, Any]) -> None:
    registry = mine()
    made: Any = sp.from_config(table, registry=registry)
    assert registry.kernels() == made.executor.kernels


def test_methods_within_methods_are_those_of_the_registry_that_builds() -> None:
    table = {"method": "star-attention", "parameters": {"inner": "inside", "block_size": 256}}
    assert "star-attention" == sp.from_config(table, registry=mine()).name
    assert "star-attention" == mine().build("star-attention", inner={"method": "inside"}).name
    with pytest.raises(sp.UnknownMethodError, match="inner"):
        sp.from_config(table)


def test_precisions_are_those_of_the_kernels_that_were_handed_down() -> None:
    table = {"method": "dense", "executor": {"precision": "fp4"}}
    made: Any = sp.from_config(table, registry=mine())
    assert "fp4" == made.executor.precision
    with pytest.raises(ParameterError, match=r"executor.precision is 'fp4'"):
        sp.from_config(table)
    assert "fp4" == sp.AutoExecutor(kernels=(MINE,), precision="fp4").precision
    with pytest.raises(ParameterError, match="precision is 'int8'"):
        sp.AutoExecutor(kernels=(MINE,), precision="int8")


def test_kernels_are_no_key_of_a_configuration() -> None:
    with pytest.raises(ParameterError, match=r"executor.kernels is unknown"):
        sp.from_config({"method": "dense", "executor": {"kernels": []}})


def test_every_pipeline_of_a_profile_gets_them() -> None:
    registry = mine()
    sizes = {"layers": 2, "heads": 1, "kv_heads": 1, "head_dim": 16}
    ranges = (
        LengthRange(least=0, tokens=9, method=None, parameters=None),
        LengthRange(least=40, tokens=60, method="streaming", parameters={}),
        LengthRange(least=80, tokens=99, method="dense", parameters={}),
    )
    model = ModelIdentity(name="m", architecture="M", digest="0", **sizes)
    made: Any = registry.build(profile=Profile(methods=("streaming", "dense"), model=model, ranges=ranges))
    assert [registry.kernels()] * len(made.known) == [one.executor.kernels for one in made.known]
    call = sp.AttentionCall(*tensors("random", batch=1, heads=1, kv_heads=1, q_len=9, kv_len=9, head_dim=16))
    assert registry.kernels() == made.executing(call).given.kernels, "of a length for which it has no setting, too"


def test_what_is_registered_later_serves_what_is_built_later() -> None:
    before, pipeline = sp.AutoExecutor(), sp.build("dense")
    default_registry().register(plugin(kernels=[MINE]), "mine")
    try:
        assert [False, False, True, True] == [
            "mine" in names(one)
            for one in (before, pipeline.executor, sp.AutoExecutor(), sp.Pipeline(pipeline.estimator).executor)
        ]
        assert "mine" in names(sp.build("dense").executor)
        assert "mine" not in names(evolve(pipeline, name="other").executor)
    finally:
        default_registry().unregister("mine")
    assert "mine" not in names(sp.AutoExecutor())


def test_copies_know_the_same_kernels() -> None:
    made = sp.AutoExecutor(kernels=(MINE,), precision="fp4")
    assert made == copy.deepcopy(made) == evolve(made)
    assert made == evolve(sp.AutoExecutor(kernels=[MINE]), precision="fp4")
    assert made != sp.AutoExecutor(kernels=(evolve(MINE, rank=1),), precision="fp4")
    there = pickle.loads(pickle.dumps(sp.AutoExecutor(precision="int8")))
    assert (names(sp.AutoExecutor()), "int8") == (names(there), there.precision)


def test_a_registry_that_asks_for_no_kernels_hands_none_down() -> None:
    registry = Registry(kinds=("method",))
    registry.load_entry_points()
    assert () == registry.kernels()
    made: Any = registry.build("dense")
    assert default_registry().kernels() == made.executor.kernels


def test_an_executor_that_a_plugin_makes_while_it_is_imported() -> None:
    """It gets the kernels of those before it, and asks nobody for what is being loaded."""
    made = plugin(kernels=[MINE])

    def load() -> ModuleType:
        made.executor = sp.AutoExecutor()  # type: ignore[attr-defined]
        return made

    registry = Registry()
    registry.load_entry_points([SimpleNamespace(name="mine", dist=None, load=load)])  # type: ignore[list-item]
    assert ["hopper-int8", "hopper", "portable"] == names(made.executor)
    assert "mine" in [one.name for one in registry.kernels()]


@pytest.mark.parametrize("make", [sp.AutoExecutor])
@pytest.mark.parametrize("wrong", [None, "portable", (1,), MINE])
def test_kernels_are_records(make: Any, wrong: Any) -> None:
    with pytest.raises(ParameterError, match=r"AutoExecutor.kernels is .*: pass Family records"):
        make(kernels=wrong)


SERVED = """
import torch, sparseprefill as sp
from test_handed_kernels import MINE, mine
from sparseprefill.executors.triton import TritonExecutor
call = sp.AttentionCall(*(torch.randn(1, h, 70, 64) for h in (2, 1, 1)))
plan = sp.Plan(sp.SparseMask.full(call, 16))
registry = mine()
with registry.building():
    executor = TritonExecutor()
print(executor.execute(call, plan).kernels[0], TritonExecutor().execute(call, plan).kernels[0])
"""


def test_what_was_handed_down_serves() -> None:
    """By the interpreter, which has to be asked for before kernels are imported."""
    folder = os.path.dirname(__file__)
    found = subprocess.run(
        [sys.executable, "-c", SERVED],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert (0, "mine portable\n") == (found.returncode, found.stdout), found.stderr
