"""Registry: plugins found, listed, colliding, left out, forgotten."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import sparseprefill as sp
from helpers.registry_plugins import Point, load, method, plugin
from sparseprefill.errors import MethodCollisionError, UnknownMethodError
from sparseprefill.hookspecs import hookimpl
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import Registry, default_registry


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEPREFILL_PLUGINS", raising=False)


def test_a_plugin_is_listed_with_its_methods() -> None:
    registry = load(Point("mine", plugin("zeta", "alpha")))
    (record,) = registry.plugins()
    assert (
        record.name,
        record.distribution,
        record.version,
        record.methods,
        record.error,
    ) == ("mine", "some-dist", "1.2", ("zeta", "alpha"), None)
    names = ["alpha", "zeta"]
    assert names == list(registry.methods())
    assert isinstance(registry.build("alpha", size=2, share=0.1), Pipeline)


def test_registries_do_not_share_plugins() -> None:
    one, other = Registry(), Registry()
    module = plugin("alpha")
    one.register(module, "mine")
    assert list(other.methods()) == []
    other.register(module, "mine")


def test_the_built_in_methods_come_through_entry_points() -> None:
    assert {"dense", "streaming", "vertical-slash", "anchor-attention"} <= set(default_registry().methods())
    assert {"classic", "anchor-attention"} <= {record.name for record in default_registry().plugins()}


def test_changing_the_listing_changes_nothing() -> None:
    registry = load(Point("mine", plugin("alpha")))
    dict(registry.methods()).clear()
    assert registry.methods() is not registry.methods()
    assert list(registry.methods()) == ["alpha"]


def test_a_method_collision_names_both_sides() -> None:
    registry = load(Point("one", plugin("alpha"), "first-dist", "1.0"))
    with pytest.raises(MethodCollisionError) as caught:
        registry.load_entry_points([Point("two", plugin("beta", "alpha"), "second-dist", "2.0")])  # type: ignore[list-item]
    for part in ("'alpha'", "'one' of first-dist 1.0", "'two' of second-dist 2.0", "SPARSEPREFILL_PLUGINS"):
        assert part in str(caught.value)
    assert list(registry.methods()) == ["alpha"]
    assert [record.name for record in registry.plugins()] == ["one"]


def test_two_plugins_of_one_name_collide_and_name_both_sides() -> None:
    with pytest.raises(MethodCollisionError) as caught:
        load(Point("one", plugin("alpha"), "first-dist"), Point("one", plugin("beta"), "second-dist"))
    assert "first-dist" in str(caught.value)
    assert "second-dist" in str(caught.value)


def test_one_module_under_two_names_collides() -> None:
    module = plugin("alpha")
    registry = load(Point("one", module))
    with pytest.raises(MethodCollisionError, match=r"'one' .* 'two' .* the same module"):
        registry.register(module, "two")
    assert list(registry.methods()) == ["alpha"]


def test_loading_again_changes_nothing() -> None:
    points = [Point("one", plugin("alpha")), Point("bad", ImportError("no such kernel"))]
    registry = load(*points)
    before = registry.plugins()
    registry.load_entry_points(points)  # type: ignore[arg-type]
    assert before == registry.plugins()


def test_the_environment_narrows_what_loads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SPARSEPREFILL_PLUGINS", "one, missing")
    with caplog.at_level(logging.WARNING):
        registry = load(Point("one", plugin("alpha")), Point("two", plugin("alpha")))
    assert [record.name for record in registry.plugins()] == ["one"]
    assert "not installed: missing" in caplog.text
    with pytest.raises(UnknownMethodError, match="excluded by SPARSEPREFILL_PLUGINS: two"):
        registry.get("beta")


def test_the_empty_environment_variable_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEPREFILL_PLUGINS", "")
    assert load(Point("one", plugin("alpha"))).plugins() == ()


def test_unregister_forgets_a_plugin_and_frees_its_names() -> None:
    registry = load(Point("one", plugin("alpha")), Point("bad", ImportError("x")))
    for name in ("one", "bad", "never seen"):
        registry.unregister(name)
    assert registry.plugins() == ()
    registry.register(plugin("alpha"), "other")
    with pytest.raises(UnknownMethodError, match="no method is named 'one'"):
        registry.get("one")


def test_an_object_with_the_hook_is_a_plugin() -> None:
    class Mine:
        @hookimpl
        def sparseprefill_methods(self) -> Iterable[Method]:
            yield method("alpha")

    registry = Registry()
    assert registry.register(Mine(), "mine").source == "plugin 'mine' of local"
    assert list(registry.methods()) == ["alpha"]


def test_real_entry_points_serve_too() -> None:
    registry = load(EntryPoint("classic", "sparseprefill.plugins.classic", "sparseprefill"))
    assert {"dense", "streaming", "vertical-slash"} == set(registry.methods())
    assert [(record.name, record.distribution) for record in registry.plugins()] == [("classic", "unknown")]


@pytest.mark.parametrize("name", [["dense"], None, {}, 3])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(UnknownMethodError, match=r"name is .*: pass the name of a method.*Known: .*dense"):
        sp.build(name)
