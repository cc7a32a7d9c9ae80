"""Registry and Method: whatever a plugin does wrong is named, recorded, and takes nothing else down."""

from __future__ import annotations

import logging
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from attrs import frozen

from helpers.registry_plugins import Corrector, Point, Refiner, load, method, offering, plugin
from sparseprefill.config import from_config
from sparseprefill.errors import (
    MethodCollisionError,
    ParameterError,
    PluginLoadError,
    SparsePrefillError,
    UnknownMethodError,
)
from sparseprefill.method import hookimpl
from sparseprefill.plan import Plan
from sparseprefill.registry import Registry


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEPREFILL_PLUGINS", raising=False)


def test_a_broken_plugin_is_recorded_and_takes_nothing_down(caplog: pytest.LogCaptureFixture) -> None:
    original = ImportError("no such kernel")
    with caplog.at_level(logging.WARNING):
        registry = load(Point("one", plugin("alpha")), Point("bad", original), Point("two", plugin("beta")))
    assert list(registry.methods()) == ["alpha", "beta"]
    assert [None, None, original, None] == [record.error for record in registry.plugins()]
    assert "plugin 'bad' of some-dist 1.2 failed to load: ImportError: no such kernel" in caplog.text


def test_nothing_is_no_plugin() -> None:
    with pytest.raises(PluginLoadError, match="plugin is None: pass a module or object"):
        Registry().register(None, "mine")


def test_asking_for_a_broken_plugins_method_raises_from_the_original() -> None:
    original = ImportError("no such kernel")
    registry = load(Point("my_method", original))
    with pytest.raises(PluginLoadError, match="ImportError: no such kernel") as caught:
        registry.build("my-method")
    assert original is caught.value.__cause__


def test_another_unknown_name_mentions_the_broken_plugin() -> None:
    registry = load(Point("bad", ImportError("x")), Point("one", plugin("alpha")))
    with pytest.raises(UnknownMethodError, match=r"'alpa'; did you mean 'alpha'.*failed to load: plugin 'bad'"):
        registry.get("alpa")


def test_a_broken_plugin_never_hides_a_sound_one_of_the_same_name() -> None:
    registry = load(Point("one", plugin("alpha"), "first-dist"), Point("one", ImportError("x"), "second-dist"))
    assert list(registry.methods()) == ["alpha"]
    assert [(record.distribution, record.error is not None) for record in registry.plugins()][1:] == [
        ("first-dist", False),
        ("second-dist", True),
    ]
    with pytest.raises(MethodCollisionError, match="first-dist"):
        registry.register(plugin("alpha"), "other")


def test_a_repaired_plugin_replaces_its_failure() -> None:
    registry = load(Point("one", ImportError("x")))
    registry.load_entry_points([Point("one", plugin("alpha"))])  # type: ignore[list-item]
    assert [record.error for record in registry.plugins()] == [None, None]


BROKEN: dict[str, tuple[ModuleType, str]] = {
    "misspelt hook": (plugin("alpha", hook="sparseprefill_method"), "unknown hook 'sparseprefill_method'"),
    "no hook": (ModuleType("empty"), "implements no hook"),
    "surplus argument": (ModuleType("surplus"), r"Argument\(s\) {'extra'}"),
    "returns nothing": (plugin(answer=0), "offers 0"),
    "returns one method bare": (plugin(answer=method("alpha")), "Methods"),
    "returns a dict": (plugin(answer={"alpha": method("alpha")}), "offers 'alpha'"),
    "raises": (plugin(answer=ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero"),
    "one name twice": (plugin("alpha", "alpha"), "the same name twice"),
}
BROKEN["surplus argument"][0].sparseprefill_methods = hookimpl(lambda extra: [])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind != "returns one method bare"])
def test_a_faulty_plugin_is_refused_and_leaves_nothing_behind(kind: str) -> None:
    module, message = BROKEN[kind]
    registry = Registry()
    with pytest.raises(PluginLoadError, match=message):
        registry.register(module, "mine")
    assert [record.name for record in registry.plugins()] == ["core"]
    registry.register(plugin("alpha"), "mine")
    assert list(registry.methods()) == ["alpha"]


@frozen
class Named:
    name: str = "a"

    def refine(self, call: Any, plan: Plan, memory: Any) -> Plan:
        return plan


class Bare:
    refine = Named.refine


NO_REFINERS: dict[str, tuple[Any, str]] = {
    "a list": ([Refiner], "must return a dict of classes by name"),
    "a class": (Refiner, "must return a dict"),
    "an object": ({"alpha": Refiner()}, "offers Refiner.* as refiner 'alpha': pass an attrs class"),
    "no attrs class": ({"alpha": Bare}, "pass an attrs class"),
    "another stage": ({"alpha": Corrector}, r"the class has no method refine\(\), which a refiner needs"),
    "a method": ({"alpha": method("alpha")}, "pass an attrs class"),
    "a bad name": ({"My Refiner": Refiner}, "a refiner named 'My Refiner': use lower-case words"),
    "no name": ({3: Refiner}, "a refiner named 3"),
    "a field that tables use": ({"alpha": Named}, "it has the field 'name', by which configurations call it"),
}


@pytest.mark.parametrize("answer", NO_REFINERS.values(), ids=NO_REFINERS)
def test_what_is_no_refiner_is_refused_and_recorded(answer: tuple[Any, str]) -> None:
    given, message = answer
    faulty = plugin("alpha")
    faulty.sparseprefill_refiners = hookimpl(lambda: given)  # type: ignore[attr-defined]
    registry = load(Point("bad", faulty), Point("one", offering("refiner", beta=Refiner)))
    assert [None, PluginLoadError, None] == [record.error and type(record.error) for record in registry.plugins()]
    assert registry.kinds("beta") == ("refiner",)
    assert list(registry.methods()) == []  # nothing of it stays
    for ask in (registry.get, registry.kinds, partial(registry.find, "refiner"), partial(registry.find, "corrector")):
        with pytest.raises(PluginLoadError, match=message):
            ask("bad")
    with pytest.raises(ParameterError, match=r"'betta'; did you mean 'beta'.*failed to load: plugin 'bad'"):
        registry.find("refiner", "betta")


def test_a_refiner_whose_validator_raises_anything_is_a_parameter_error() -> None:
    registry = load(Point("mine", offering("refiner", alpha=Refiner)), Point("one", plugin("method")))
    with pytest.raises(ParameterError, match=r"refiners\[0\]: alpha\(size=0\): 'size'"):
        from_config({"method": "method", "refiners": [{"name": "alpha", "size": 0}]}, registry=registry)


@pytest.mark.parametrize("name", [None, 3, ["sink"]])
def test_a_refiners_name_of_another_kind_is_unknown(name: Any) -> None:
    with pytest.raises(ParameterError, match=r"name is .*: pass the name of a refiner\. Known: .*sink"):
        Registry().find("refiner", name)


def test_a_single_method_needs_no_list() -> None:
    registry = Registry()
    registry.register(BROKEN["returns one method bare"][0], "mine")
    assert list(registry.methods()) == ["alpha"]


@pytest.mark.parametrize("kind", ["misspelt hook", "surplus argument", "raises"])
def test_loading_records_a_faulty_plugin(kind: str) -> None:
    registry = load(Point("bad", BROKEN[kind][0]), Point("one", plugin("beta")))
    assert list(registry.methods()) == ["beta"]
    with pytest.raises(PluginLoadError, match=BROKEN[kind][1]):
        registry.get("bad")


def test_a_plugin_that_exits_takes_nothing_down() -> None:
    registry = load(Point("bad", SystemExit(3)), Point("one", plugin("alpha")))
    assert list(registry.methods()) == ["alpha"]
    with pytest.raises(PluginLoadError, match="SystemExit: 3"):
        registry.get("bad")


@pytest.mark.parametrize("name", [None, 3, ""])
def test_a_name_of_another_kind_is_unknown(name: Any) -> None:
    registry = load(Point("bad", ImportError("x")))
    with pytest.raises(UnknownMethodError, match="Known: none"):
        registry.get(name)


def test_parameters_are_known_by_the_name_users_type() -> None:
    expected = 0.1
    assert expected == method("alpha").configure({"share": expected})._share


def test_every_error_of_the_registry_is_of_the_tree() -> None:
    assert all(
        issubclass(error, SparsePrefillError) for error in (MethodCollisionError, PluginLoadError, UnknownMethodError)
    )
    assert issubclass(UnknownMethodError, LookupError)
