"""from_config: what it builds, and how it names the key at fault."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sparseprefill as sp
from helpers.build import make
from helpers.correctors import Blend, blending
from sparseprefill.config import inner_method
from sparseprefill.errors import ParameterError, UnknownMethodError
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile

CALL = make(60)
ANCHOR: dict[str, Any] = {
    "method": "anchor-attention",
    "parameters": {"theta": 1.0, "step": 1, "block": 8, "init_tokens": 8},
}
STREAMING: dict[str, Any] = {"method": "streaming", "parameters": {"sink": 8, "window": 8, "block": 8}}


def test_a_method_with_its_parameters() -> None:
    made = sp.from_config(ANCHOR)
    expected = sp.build("anchor-attention", **ANCHOR["parameters"])
    assert expected.name == made.name
    assert torch.equal(expected.run(CALL).out, made.run(CALL).out)
    assert sp.build("dense").name == sp.from_config({"method": "dense"}).name


def pipeline_of(source: Any, **options: Any) -> sp.Pipeline:
    """What a configuration without a profile or a gate makes."""
    made = sp.from_config(source, **options)
    assert isinstance(made, sp.Pipeline)
    return made


def test_refiners_come_after_the_methods_own_in_order() -> None:
    table = {
        **ANCHOR,
        "refiners": [{"name": "stride-rescue", "every": 3, "seed": 5}, {"name": "gqa-union"}],
        "name": "mine",
    }
    made = pipeline_of(table)
    assert (sp.StrideRescue(3, seed=5), sp.GqaUnion()) == made.refiners
    assert "mine" == made.name


def test_a_union_of_tables() -> None:
    dense_rows = {**STREAMING, "refiners": [{"name": "dense-rows", "last": 8}]}
    made = pipeline_of({"union": [ANCHOR, dense_rows], "refiners": [{"name": "sink", "tiles": 1}]})
    parts = [sp.from_config(table).run(CALL).mask.to_dense() for table in (ANCHOR, dense_rows)]
    result = made.run(CALL)
    assert "anchor-attention + streaming" == made.name
    assert (sp.Sink(1),) == made.refiners
    assert not ((parts[0] | parts[1]) & ~result.mask.to_dense()).any()
    assert result.plan.carry is not None


def test_unions_keep_the_observers() -> None:
    registry = sp.Registry()

    class Plugin:
        @staticmethod
        @sp.hookimpl
        def sparseprefill_methods() -> list[sp.Method]:
            dense = sp.default_registry().get("dense")
            watch: Any = type("Watch", (), {"observe": lambda *_: None, "grain": 1})()
            build = lambda config: sp.Pipeline(dense.build(config).estimator, observers=(watch,))  # noqa: E731
            return [sp.Method(name="watched", summary="", config=dense.config, build=build)]

    registry.register(Plugin, "watched")
    made = pipeline_of({"union": [{"method": "watched"}, {"method": "watched"}]}, registry=registry)
    assert ["Watch", "Watch"] == [type(observer).__name__ for observer in made.observers]


def test_a_profile_of_a_method_that_is_not_here_says_where(tmp_path: Path) -> None:
    sizes = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
    identity = ModelIdentity(name="m", architecture="M", digest="0", **sizes)
    one = LengthRange(least=0, tokens=64, method="gone", parameters={})
    path = tmp_path / "gone.json"
    path.write_text(Profile(methods=("gone",), model=identity, ranges=(one,)).to_json())
    with pytest.raises(UnknownMethodError, match=r"^here: .*'gone'"):
        sp.from_config({"profile": str(path)}, at="here")


TOML = """
method = "anchor-attention"
name = "from a file"

[parameters]
theta = inf

[[refiners]]
name = "dense-rows"
last = 64
"""


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    table = {"method": "anchor-attention", "parameters": {"theta": math.inf}, "name": "from a file"}
    (tmp_path / "a.json").write_text(json.dumps({**table, "refiners": [{"name": "dense-rows", "last": 64}]}))
    for made in (pipeline_of(tmp_path / "a.toml"), pipeline_of(str(tmp_path / "a.json"))):
        assert ("from a file", (sp.DenseRows(64),)) == (made.name, made.refiners)


def test_files_of_other_editors(tmp_path: Path) -> None:
    """A mark at the beginning, and a name in capitals."""
    (tmp_path / "A.TOML").write_text(TOML, encoding="utf-8-sig")
    (tmp_path / "A.JSON").write_text('{"method": "dense"}', encoding="utf-8-sig")
    assert ["from a file", "dense"] == [pipeline_of(tmp_path / name).name for name in ("A.TOML", "A.JSON")]


def test_methods_within_methods_end() -> None:
    circle: dict[str, Any] = {"method": "star-attention", "parameters": {}}
    circle["parameters"]["inner"] = circle
    with pytest.raises(ParameterError, match="inner is nested too deeply, or contains itself: use at most 32 levels"):
        sp.from_config(circle)


@pytest.mark.parametrize("name", ["share-prefill", "star-attention"])
def test_a_method_with_another_ones_table_can_be_copied(name: str) -> None:
    more: dict[str, Any] = {"clusters": "single"} if name == "share-prefill" else {}
    made = sp.build(name, inner={"method": "xattention", "parameters": {"threshold": 0.5}}, **more)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert copied.name == made.name
    config = sp.default_registry().get(name).configure({"inner": {"method": "xattention"}, **more})
    assert hash(config) == hash(copy.deepcopy(config))
    assert config == copy.deepcopy(config)


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    cases = {
        '{"method": "dense", "parameters": {"block": 0}}': "parameters.block is 0: pass an integer from 1 to 8192",
        '{"method": "dens"}': "method: no method is named 'dens'",
        "{": "cannot be read: ",
        "[" * 100000: "cannot be read: is nested too deeply",
        f'{{"method": {"1" * 5000}}}': "cannot be read: is not JSON",
        "[]": r"the configuration is \[\]",
        '{"method": "dense", "profile": "none.json"}': f"profile is '{tmp_path}/none.json': No such file",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises((ParameterError, UnknownMethodError), match=f"a.json: {message}"):
            sp.from_config(path)
    path = tmp_path / "a.toml"
    for value, message in (("[" * 100000, "is nested too deeply"), ("1" * 5000, "is not TOML")):
        path.write_text(f"method = {value}")
        with pytest.raises(ParameterError, match=f"a.toml: cannot be read: {message}"):
            sp.from_config(path)
    with pytest.raises(ParameterError, match=r"b.json: cannot be read: .*No such file"):
        sp.from_config(tmp_path / "b.json")
    with pytest.raises(ParameterError, match=r"a.yaml: is a file of kind '.yaml'"):
        sp.from_config(tmp_path / "a.yaml")


def within_unions(depth: int) -> dict[str, Any]:
    table: dict[str, Any] = {"method": "dense"}
    for _ in range(depth):
        table = {"union": [table]}
    return table


def test_unions_within_unions_to_the_last() -> None:
    assert isinstance(sp.from_config(within_unions(31)), sp.Pipeline)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (3, "the configuration is 3: give a table"),
        ({}, "the configuration has neither method nor union"),
        ({"method": "dense", "union": []}, "the configuration has both method and union"),
        ({1: "dense"}, "the table has the key 1"),
        ({"methd": "dense"}, "methd is unknown; did you mean 'method'"),
        (
            {"method": "rowmax", "eps": 0.1},
            r'eps is a parameter of rowmax: did you mean "parameters": \{"eps": \.\.\.\}\?',
        ),
        (
            {"union": [{"method": "dense"}, {"method": "streaming", "sink": 1 << 99}]},
            r"union\[1\]\.sink is a parameter of streaming: did you mean",
        ),
        ({"method": ["streaming"], "sink": 1}, "sink is unknown"),
        ({"method": "dense", "sink": 1}, "sink is unknown"),
        ({"method": 3}, "method is 3: give a name"),
        ({"method": "anchor-atention"}, "method: no method is named 'anchor-atention'; did you mean"),
        ({"method": "dense", "name": ""}, "name is '': give a name"),
        ({"method": "dense", "parameters": []}, r"parameters is \[\]: give a table"),
        ({"method": "dense", "parameters": {"blok": 1}}, "parameters.blok is unknown; did you mean 'block'"),
        ({"method": "dense", "parameters": {"block": 0}}, "parameters.block is 0: pass an integer from 1 to 8192"),
        ({"method": "streaming", "parameters": {"self": 1}}, r"parameters\.self is unknown"),
        ({"method": "dense", "profile": 1}, "profile is 1: give the path of a file of sparseprefill fit"),
        ("a\0b.json", r".*cannot be read: is not a path \(embedded null byte\)"),
        ({"method": "streaming", "profile": "a\0b.json"}, r".*is not a path \(embedded null byte\)"),
        ({"method": "streaming", "gate": "a\0b.json"}, r".*is not a path \(embedded null byte\)"),
        ({"method": "streaming", "gate": 3}, 'gate is 3: give "auto", the path'),
        ({"method": "streaming", "gate": ""}, "gate is ''"),
        ({"method": "streaming", "gate": "nowhere.json"}, "gate: break-even table is 'nowhere.json'"),
        ({"union": [{"method": "streaming", "gate": "auto"}]}, r"union\[0\].gate has no meaning there"),
        ({"profile": "x.json", "parameters": {"sink": 3}}, ".*parameters belong to one method"),
        ({"profile": "x.json", "union": []}, ".*both profile and union"),
        (within_unions(32), ".*is nested too deeply: use at most 32 levels"),
        (within_unions(5000), ".*is nested too deeply: use at most 32"),
        ({"method": "dense", "refiners": {}}, "refiners is {}: give a list of tables"),
        ({"method": "dense", "refiners": "sink"}, "refiners is 'sink': give a list of tables"),
        ({"method": "dense", "refiners": ["sink"]}, r"refiners\[0\] is 'sink': give a table"),
        ({"method": "dense", "refiners": [{}]}, r"refiners\[0\].name is missing"),
        (
            {"method": "dense", "refiners": [{"name": "stride"}]},
            r"refiners\[0\].name: no refiner is named 'stride'; did you mean 'stride-",
        ),
        ({"method": "dense", "refiners": [{"name": "sink"}]}, r"refiners\[0\].tiles is missing: sink needs it"),
        (
            {"method": "dense", "refiners": [{"name": "gqa-union"}, {"name": "stride-rescue", "every": 0}]},
            r"refiners\[1\].every is 0: pass an integer >= 1",
        ),
        (
            {"method": "dense", "refiners": [{"name": "stride-rescue", "evry": 1}]},
            r"refiners\[0\].evry is unknown; did you mean 'every'",
        ),
        (
            {"method": "dense", "refiners": [{"name": "budget-floor"}]},
            r"refiners\[0\]: BudgetFloor\(.*pass either tiles or share",
        ),
        ({"method": "dense", "corrector": "delta"}, "corrector: no corrector is named 'delta'. Known: none"),
        ({"method": "dense", "corrector": {"tile": 4}}, "corrector.name is missing"),
        ({"method": "dense", "corrector": False}, "corrector is False: give a table"),
        ({"method": "dense", "executor": {"precision": "int4"}}, "executor.precision is 'int4': pass 'call' or 'int8'"),
        (
            {"method": "dense", "executor": {"precison": "int8"}},
            "executor.precison is unknown; did you mean 'precision'",
        ),
        ({"method": "dense", "executor": {"bound": -1}}, "executor.bound is -1: pass a number"),
        ({"method": "dense", "executor": "int8"}, "executor is 'int8'"),
        (
            {"union": [{"method": "dense", "executor": {}}]},
            r"union\[0\].executor has no meaning there: put executor next to union",
        ),
        (
            {"method": "star-attention", "parameters": {"inner": {"method": "dense", "executor": {}}}},
            ".*dense has an executor, which would not run",
        ),
        (
            {"union": [{"method": "dense", "corrector": "mine"}]},
            r"union\[0\].corrector has no meaning there: put corrector next to union",
        ),
        (
            {"union": [{"method": "dense", "profile": "a.json"}]},
            r"union\[0\].profile has no meaning there: give a method and its parameters",
        ),
        (
            {"method": "star-attention", "parameters": {"inner": {"method": "streaming", "gate": "auto"}}},
            ".*streaming has a profile or a gate, which choose for the whole call",
        ),
        ({"union": []}, "union is empty"),
        ({"union": [{"method": "dense"}], "parameters": {}}, "parameters has no meaning next to union"),
        (
            {"union": [{"method": "dense"}, {"method": "dense", "parameters": {"block": -1}}]},
            r"union\[1\].parameters.block is -1",
        ),
        (
            {"method": "star-attention", "parameters": {"inner": {"method": "dense", "parameters": {"block": 0}}}},
            "parameters.inner.parameters.block is 0",
        ),
        ({"method": "star-attention", "parameters": {"inner": "dens"}}, "parameters.inner.method: no method is named"),
    ],
)
def test_the_key_at_fault_is_named(table: Any, message: str) -> None:
    with pytest.raises((ParameterError, UnknownMethodError), match=f"^{message}"):
        sp.from_config(table)


def test_every_public_refiner_and_corrector_has_its_name() -> None:
    public = [getattr(sp, name) for name in sp.__all__]  # not vars(sp): names are loaded when they are first used
    registry = sp.default_registry()
    offered: list[tuple[str, Any, Mapping[str, type]]] = [
        ("refine", sp.MaskRefiner, registry.refiners()),
        ("correct", sp.Corrector, registry.offered("corrector")),
    ]
    for verb, interface, known in offered:
        kinds = {one for one in public if isinstance(one, type) and callable(getattr(one, verb, None))}
        assert kinds - {interface} == set(known.values())
        for name, kind in known.items():
            assert name.replace("-", "") == kind.__name__.lower()


def test_a_union_that_holds_itself() -> None:
    table: dict[str, Any] = {"union": [STREAMING]}
    table["union"].append({"union": [table]})
    with pytest.raises(ParameterError, match=r"union\[1\]\.union\[0\] contains itself"):
        sp.from_config(table)
    assert pipeline_of({"union": [STREAMING, STREAMING]})  # beside itself a table may stand


def test_an_inner_method_is_a_name_a_table_a_pipeline_or_an_estimator() -> None:
    method = sp.build("streaming", sink=4)
    assert inner_method(method, "") is method
    named, listed = inner_method("streaming", ""), inner_method({"method": "streaming", "parameters": {"sink": 4}}, "")
    alone = inner_method(method.estimator, "")
    assert isinstance(named, sp.Pipeline)
    assert isinstance(listed, sp.Pipeline)
    assert isinstance(alone, sp.Pipeline)
    assert sp.build("streaming").estimator == named.estimator
    assert method.estimator == listed.estimator
    assert (method.estimator, type(method.estimator).__name__) == (alone.estimator, alone.name)


@pytest.mark.parametrize(("method", "name"), [("streaming", "sink"), ("anchor-attention", "theta")])
@pytest.mark.parametrize("value", [10**400, 10**5000], ids=["400 digits", "5000 digits"])
def test_numbers_beyond_any_device(method: str, name: str, value: int) -> None:
    with pytest.raises(ParameterError, match=rf"parameters\.{name} is .*: pass an? "):
        sp.from_config({"method": method, "parameters": {name: value}})


@pytest.mark.parametrize("source", ["a.toml", "a.json"])
def test_clusters_are_found_beside_the_file(tmp_path: Path, source: str) -> None:
    table = {"schema": "sparseprefill.clusters", "version": 1, "model": None, "clusters": [[[0, 0]]], "noise": []}
    (tmp_path / "own.json").write_text(json.dumps(table))
    texts = {
        "a.toml": 'method = "share-prefill"\nparameters.clusters = "{}"',
        "a.json": '{{"method": "share-prefill", "parameters": {{"clusters": "{}"}}}}',
    }
    for clusters in ("own.json", str(tmp_path / "own.json"), "single"):
        (tmp_path / source).write_text(texts[source].format(clusters))
        assert "share-prefill" == pipeline_of(tmp_path / source).name
    (tmp_path / source).write_text(texts[source].format("none.json"))
    with pytest.raises(ParameterError, match=rf"parameters\.clusters is '{tmp_path}/none.json': No such file"):
        sp.from_config(tmp_path / source)


@pytest.mark.parametrize(
    ("given", "made"),
    [("blend", Blend()), ({"name": "blend"}, Blend()), ({"name": "blend", "share": 1}, Blend(share=1))],
)
def test_a_corrector_by_name_or_by_table(given: Any, made: sp.Corrector) -> None:
    table = {"union": [{"method": "dense"}, {"method": "streaming"}], "corrector": given}
    pipeline = sp.from_config(table, registry=blending())
    assert isinstance(pipeline, sp.Pipeline)
    assert pipeline.corrector == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("blond", "corrector: no corrector is named 'blond'; did you mean 'blend'"),
        ({"name": "blend", "share": 2}, "corrector.share is 2: pass a number"),
        ({"name": "blend", "tile": 1}, "corrector.tile is unknown"),
    ],
)
def test_the_key_of_a_corrector_at_fault_is_named(given: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        sp.from_config({"method": "dense", "corrector": given}, registry=blending())


def test_an_inner_method_has_no_corrector() -> None:
    with pytest.raises(ParameterError, match="dense has a corrector, which would not run"):
        inner_method(sp.build("dense").with_corrector(Blend()), "")


@pytest.mark.parametrize("of", [{"method": "streaming"}, {"union": [{"method": "dense"}, {"method": "streaming"}]}])
def test_an_executor_and_its_precision(of: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('method = "streaming"\nexecutor = {precision = "int8", bound = 0.05}')
    for source in ({**of, "executor": {"precision": "int8", "bound": 0.05}}, tmp_path / "a.toml"):
        assert pipeline_of(source).executor == sp.AutoExecutor(precision="int8", bound=0.05)
    assert pipeline_of(of).executor == sp.AutoExecutor()


def test_every_pipeline_of_a_profile_gets_the_executor(tmp_path: Path) -> None:
    sizes = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
    identity = ModelIdentity(name="m", architecture="M", digest="0", **sizes)
    ranges = tuple(
        LengthRange(least=least, tokens=2 * least + 64, method="streaming", parameters={"sink": sink})
        for least, sink in ((0, 64), (65, 128))
    )
    path = tmp_path / "two.json"
    path.write_text(Profile(methods=("streaming",), model=identity, ranges=ranges).to_json())
    made = sp.from_config({"profile": str(path), "executor": {"precision": "int8"}})
    assert [one.executor for one in made.known] == [sp.AutoExecutor(precision="int8")] * 2
