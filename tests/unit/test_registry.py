"""Registry: plugins found, listed, colliding, left out, forgotten."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint

import pytest

import sparseprefill as sp
from helpers.registry_plugins import Corrector, Point, Refiner, load, method, offering, plugin
from sparseprefill.errors import MethodCollisionError, UnknownMethodError
from sparseprefill.method import Method, hookimpl
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import Registry, default_registry


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEPREFILL_PLUGINS", raising=False)


def test_a_plugin_is_listed_with_its_methods() -> None:
    registry = load(Point("mine", plugin("zeta", "alpha")))
    core, record = registry.plugins()
    assert (core.name, core.methods, core.correctors) == ("core", (), ())
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
    assert [record.name for record in registry.plugins()] == ["core", "one"]


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
    assert [record.name for record in registry.plugins()] == ["core", "one"]
    assert "not installed: missing" in caplog.text
    with pytest.raises(UnknownMethodError, match="excluded by SPARSEPREFILL_PLUGINS: two"):
        registry.get("beta")


def test_the_empty_environment_variable_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEPREFILL_PLUGINS", "")
    registry = load(Point("one", plugin("alpha")))
    assert [record.name for record in registry.plugins()] == ["core"]
    assert "sink" in registry.refiners()


def test_unregister_forgets_a_plugin_and_frees_its_names() -> None:
    registry = load(Point("one", plugin("alpha")), Point("bad", ImportError("x")))
    for name in ("one", "bad", "never seen"):
        registry.unregister(name)
    assert [record.name for record in registry.plugins()] == ["core"]
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
    assert [(record.name, record.distribution) for record in registry.plugins()][1:] == [("classic", "unknown")]


def test_a_plugin_is_listed_with_its_refiners_and_correctors() -> None:
    registry = load(Point("mine", offering("refiner", zeta=Refiner, alpha=Refiner)))
    registry.register(offering("corrector", alpha=Corrector), "other")
    (mine, other) = registry.plugins()[1:]
    assert (mine.methods, mine.refiners, mine.correctors) == ((), ("zeta", "alpha"), ())
    assert (other.methods, other.refiners, other.correctors) == ((), (), ("alpha",))
    names = list(registry.refiners())
    assert sorted(names) == names
    assert registry.find("refiner", "alpha") is Refiner
    assert registry.offered("corrector") == {"alpha": Corrector}
    assert registry.kinds("alpha") == ("refiner", "corrector")
    assert registry.owner("corrector", "alpha") is other


def test_one_plugin_may_offer_all_kinds() -> None:
    module = plugin("alpha")
    for kind, part in (("refiner", Refiner), ("corrector", Corrector)):
        hook = f"sparseprefill_{kind}s"
        setattr(module, hook, getattr(offering(kind, alpha=part), hook))
    registry = load(Point("mine", module))
    assert registry.kinds("alpha") == ("method", "refiner", "corrector")
    registry.unregister("mine")
    with pytest.raises(UnknownMethodError, match="no method, refiner or corrector is named 'alpha'"):
        registry.kinds("alpha")


def test_the_built_in_parts_come_through_entry_points() -> None:
    registry = default_registry()
    owners = {name: registry.owner("refiner", name).name for name in registry.refiners()}
    expected = {"position-decay": "stem", "value-weights": "stem", "relative-threshold": "flashprefill"}
    assert expected == {name: owner for name, owner in owners.items() if owner != "core"}
    assert dict(registry.correctors()) == {}


def test_configurations_look_parts_up_in_the_registry_that_is_passed() -> None:
    registry = load(Point("mine", offering("refiner", alpha=Refiner)), Point("one", plugin("method")))
    made = sp.from_config({"method": "method", "refiners": [{"name": "alpha", "size": 5}]}, registry=registry)
    assert isinstance(made, Pipeline)
    assert made.refiners == (Refiner(5),)
    with pytest.raises(sp.ParameterError, match=r"refiners\[0\]\.name: no refiner is named 'alpha'"):
        sp.from_config({"method": "dense", "refiners": [{"name": "alpha"}]})


@pytest.mark.parametrize("kind", ["refiner", "corrector"])
def test_a_collision_of_parts_names_both_sides(kind: str) -> None:
    part = {"refiner": Refiner, "corrector": Corrector}[kind]
    registry = load(Point("one", offering(kind, alpha=part), "first-dist", "1.0"))
    with pytest.raises(MethodCollisionError) as caught:
        registry.register(offering(kind, beta=part, alpha=part), "two", "second-dist", "2.0")
    for word in (f"{kind} 'alpha'", "'one' of first-dist 1.0", "'two' of second-dist 2.0", "SPARSEPREFILL_PLUGINS"):
        assert word in str(caught.value)
    assert registry.find(kind, "alpha") is part
    assert "beta" not in registry.offered(kind)


def test_no_plugin_takes_a_name_of_core() -> None:
    with pytest.raises(MethodCollisionError, match=r"refiner 'sink' is offered by plugin 'core' of sparseprefill and"):
        load(Point("one", offering("refiner", sink=Refiner)))


def test_the_environment_narrows_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEPREFILL_PLUGINS", "one")
    registry = load(Point("one", plugin("alpha")), Point("two", offering("refiner", beta=Refiner)))
    with pytest.raises(sp.ParameterError, match=r"no refiner is named 'beta'.*excluded by SPARSEPREFILL_PLUGINS: two"):
        registry.find("refiner", "beta")
