"""Plugins, methods and entry points made on the spot, for the tests of the registry."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from attrs import field, frozen

from sparseprefill.method import Method, hookimpl
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.registry import Registry


@frozen(kw_only=True)
class Config:
    size: int = 3
    _share: float = field(default=0.5)

    def __attrs_post_init__(self) -> None:
        if self.size == 0:
            raise KeyError("size")


class Nothing:
    def estimate(self, call: Any, memory: Any) -> Plan:
        raise NotImplementedError


def method(name: str, **options: Any) -> Method:
    settings: dict[str, Any] = {"summary": "s", "config": Config, "build": lambda config: Pipeline(Nothing())}
    return Method(name=name, **{**settings, **options})


def plugin(*names: str, answer: Any = None, hook: str = "sparseprefill_methods") -> ModuleType:
    """A plugin module that offers methods of these names, or `answer`; an exception is raised."""

    def implementation() -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return [method(name) for name in names] if answer is None else answer

    module = ModuleType("plugin_of_" + "_".join(names))
    setattr(module, hook, hookimpl(implementation))
    return module


@frozen
class Refiner:
    """A refiner that changes nothing."""

    size: int = 3

    def __attrs_post_init__(self) -> None:
        if self.size == 0:
            raise KeyError("size")

    def refine(self, call: Any, plan: Plan, memory: Any) -> Plan:
        return plan


@frozen
class Corrector:
    """A corrector that changes nothing."""

    size: int = 3

    def correct(self, call: Any, plan: Plan, result: Result, memory: Any) -> Result:
        return result


def offering(kind: str, answer: Any = None, **parts: Any) -> ModuleType:
    """A plugin module that offers refiners or correctors by these names, or `answer`."""
    module = ModuleType(f"plugin_of_{kind}s")
    setattr(module, f"sparseprefill_{kind}s", hookimpl(lambda: parts if answer is None else answer))
    return module


class Point:
    """An entry point without a file; loading gives the object, or raises it."""

    def __init__(self, name: str, target: object, distribution: str = "some-dist", version: str = "1.2") -> None:
        self.name, self.target = name, target
        self.dist = type("Dist", (), {"name": distribution, "version": version})()

    def load(self) -> object:
        if isinstance(self.target, BaseException):
            raise self.target
        return self.target


def load(*points: Any) -> Registry:
    registry = Registry()
    registry.load_entry_points(points)
    return registry
