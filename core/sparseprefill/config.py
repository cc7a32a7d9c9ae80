"""from_config: a pipeline from plain data, a dict or a TOML or JSON file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from attrs import NOTHING, evolve, fields, frozen

from sparseprefill import structure
from sparseprefill.breakeven.gate import AUTO
from sparseprefill.errors import ParameterError, UnknownMethodError, nearest, printed
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.method import FLOOR, configured
from sparseprefill.pipeline import Pipeline, Runner
from sparseprefill.refiners.recall import floor_of
from sparseprefill.refiners.skip import SkipSoftmax
from sparseprefill.registry import KEY, Registry, default_registry, registry_at_work
from sparseprefill.route import Route, gated
from sparseprefill.stages import PatternEstimator
from sparseprefill.structure import check_names, join
from sparseprefill.union import UnionEstimator
from sparseprefill.validate import FILE

DEEPEST = 32
"""Unions within unions, and methods within methods."""
_DEPTH: ContextVar[int] = ContextVar("depth", default=0)
"""Methods around the one that is made now, as its `inner`."""
WHOLE = "the configuration"
A_PROFILE = "give the path of a file of sparseprefill fit"
KEYS = ("corrector", "executor", "gate", "method", "name", "parameters", "profile", "recall", "refiners", "union")


def from_config(
    source: Mapping[str, Any] | str | Path, *, registry: Registry | None = None, at: str = ""
) -> Pipeline | Route:
    """The pipeline that a table describes.

    source: the table, or the path of a ``.toml`` or ``.json`` file that holds it. Its keys are ``method`` with its
    ``parameters`` and ``profile``, or ``union``, a list of such tables; then ``refiners``, a list of tables with a
    ``name`` and the refiner's own parameters; ``recall``, the target of a floor behind all of them, or a table of its
    parameters; ``corrector``, the name of one, or a table with its ``name`` and parameters; ``executor``, a table of
    `AutoExecutor`'s parameters, such as ``precision``; a ``name`` for the pipeline; and its ``gate``, "auto" or the
    path of a break-even table. registry: where methods are looked up, and whose kernels serve; by default all that are
    installed. at: path of keys that leads to the table, for messages.

    Raises ParameterError, or UnknownMethodError, whose message begins with the path of the key at fault.
    """
    registry = default_registry() if registry is None else registry
    if not isinstance(source, str | Path):
        with registry.building():
            return _Reader(registry, Path()).pipeline(source, at)
    if source == "":
        raise ParameterError("the configuration is '': pass the path of a .toml or .json file")
    path = Path(source)
    with _located(str(source)), as_data(), registry.building():
        return _Reader(registry, path.parent).pipeline(_load(path), at)


@contextmanager
def as_data() -> Iterator[None]:
    """While a table is read that somebody wrote as JSON or TOML, not in Python: errors say ``true or false``."""
    try:
        yield
    except (ParameterError, UnknownMethodError) as error:
        raise type(error)(structure.for_data(str(error))) from error


@contextmanager
def _one_deeper() -> Iterator[None]:
    """While a method's `inner` is made; ParameterError where these are nested too deeply, or in a circle."""
    depth = _DEPTH.get() + 1
    if depth > DEEPEST:
        raise ParameterError(f"inner is nested too deeply, or contains itself: use at most {DEEPEST} levels of inner")
    before = _DEPTH.set(depth)
    try:
        yield
    finally:
        _DEPTH.reset(before)


def inner_method(given: str | Mapping[str, Any] | Pipeline | PatternEstimator, why: str) -> Pipeline:
    """The method that another one takes as its parameter `inner`: its estimator and refiners are what runs.

    given: a method's name, a table as of `from_config`, or, from Python, a pipeline or an estimator. why: what an inner
    method cannot have here, for the message.

    Raises UnknownMethodError, or ParameterError: also for a method with a profile or a gate, which choose for the whole
    call; with observers, which would see what ran in its place; with a corrector, or with SkipSoftmax, which work on
    what is executed; and for a table with an executor.
    """
    if isinstance(given, str | Mapping):
        with _one_deeper():
            table = {"method": given} if isinstance(given, str) else given
            made = from_config(table, registry=registry_at_work(), at="inner")
    else:
        made = given if isinstance(given, Runner) else Pipeline(given, name=type(given).__name__)
    if not isinstance(made, Pipeline):
        words = "has a profile or a gate, which choose for the whole call; pass a method and its parameters"
    elif made.remembers:
        seen = ", ".join(type(one).__name__ for one in made.observers)
        words = f"remembers what it has seen from layer to layer ({seen}), and {why}; pass a method without observers"
    elif any(isinstance(one, SkipSoftmax) for one in made.refiners):
        words = (
            "skips tiles while its plan is executed, but only its mask is used here; put SkipSoftmax on the method "
            "that takes inner"
        )
    elif isinstance(given, Mapping) and "executor" in given:
        words = "has an executor, which would not run; put it on the method that takes inner"
    elif made.corrects:
        words = "has a corrector, which would not run; put it on the method that takes inner"
    else:
        return made
    raise ParameterError(f"inner: {made.name} {words}")


def check_keys(
    table: Mapping[str, Any], known: Collection[str], at: str = "", registry: Registry | None = None
) -> None:
    """ParameterError for a table of a pipeline with another key than these, with the nearest; for a parameter of the
    table's method it says where parameters stand.

    registry: where the method is looked up; by default all that are installed.
    """
    registry = default_registry() if registry is None else registry
    method = table.get("method")
    offered = registry.methods()
    parameters = _names(offered[method].config) if isinstance(method, str) and method in offered else []
    astray = next((key for key in table if key in parameters and key not in known), None)
    if astray is not None:
        raise ParameterError(
            f'{join(at, astray)} is a parameter of {method}: did you mean "parameters": {{"{astray}": ...}}?'
        )
    if "schema" in table and not at:
        raise ParameterError(
            f"it is {printed(table['schema'])} and no configuration: pass a profile as `profile` of one, or to a "
            "command's --profile"
        )
    check_names(table, known, at)


def _load(path: Path) -> Any:
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": structure.loads}
    kind = path.suffix.lower()
    if kind not in readers:
        raise ParameterError(f"is a file of kind {printed(path.suffix)}: pass the path of a .toml or .json file")
    try:
        return structure.parsed(structure.read(path), readers[kind], kind[1:].upper())
    except ParameterError as error:
        raise ParameterError(f"cannot be read: {error}") from error


@frozen
class _Reader:
    """Turns tables into pipelines. folder: where paths in them start."""

    registry: Registry
    folder: Path

    def pipeline(self, given: Any, at: str, above: tuple[object, ...] = ()) -> Pipeline | Route:
        """above: the tables that this one is part of."""
        if any(given is one for one in above):
            raise ParameterError(f"{at} contains itself: a union cannot be part of itself")
        if len(above) >= DEEPEST:
            raise ParameterError(f"{at} is nested too deeply: use at most {DEEPEST} levels of union")
        table = structure.table(given, at or WHOLE)
        check_keys(table, KEYS, at, self.registry)
        alone = "method" in table or "profile" in table  # a profile holds its method
        if alone == ("union" in table):
            one = "method" if "method" in table else "profile"
            both = f"both {one} and union" if alone else "neither method nor union"
            raise ParameterError(f"{at or WHOLE} has {both}: give one of them")
        made = self._union(table, at, (*above, given)) if "union" in table else self._method(table, at)
        refiners = [self._stage("refiner", one, join(at, f"refiners[{i}]")) for i, one in _items(table, "refiners", at)]
        name = _text(table["name"], join(at, "name")) if "name" in table else made.name
        made = made.each(lambda one: evolve(one, refiners=(*one.refiners, *refiners), name=name))
        if "recall" in table:
            with _located(at, ["recall"]):
                made = made.with_recall(floor_of(table["recall"]))
        if "corrector" in table:
            made = made.with_corrector(self._corrector(table["corrector"], at))
        if "executor" in table:
            executor = self._executor(table["executor"], join(at, "executor"))
            made = made.each(lambda one: evolve(one, executor=executor))
        return self._gated(made, table["gate"], at) if "gate" in table else made

    def _gated(self, made: Pipeline | Route, given: Any, at: str) -> Pipeline | Route:
        here = join(at, "gate")
        if given is False:
            return made
        if not isinstance(given, str) or not given:
            raise ParameterError(f'{here} is {printed(given)}: give "auto", the path of a break-even table, or false')
        with _located(here):
            return gated(made, AUTO if given == AUTO else self.folder / given)

    def _executor(self, given: Any, at: str) -> AutoExecutor:
        """The executor with a table's parameters."""
        parameters = structure.table(given, at)
        check_names(parameters, [name for name in _names(AutoExecutor) if name != "kernels"], at)  # the registry's
        with _located(at, parameters):
            executor: AutoExecutor = configured("executor", AutoExecutor, parameters)
            return executor

    def _corrector(self, given: Any, at: str) -> Any:
        """A corrector by its name, or by a table of it and its parameters."""
        here = join(at, "corrector")
        if isinstance(given, str):
            self._class("corrector", given, here)
            given = {KEY: given}
        return self._stage("corrector", given, here)

    def _stage(self, kind: str, table: Any, at: str) -> Any:
        """A refiner or corrector of the class that a table names, with the table's parameters."""
        table = structure.table(table, at)
        here = join(at, KEY)
        if KEY not in table:
            raise ParameterError(f"{here} is missing{nearest('', self.registry.offered(kind))}")
        name = _text(table[KEY], here)
        made = self._class(kind, name, here)
        parameters = {key: value for key, value in table.items() if key != KEY}
        check_names(parameters, _names(made), at)
        lacking = [key for key in _names(made, required=True) if key not in parameters]
        if lacking:
            raise ParameterError(f"{join(at, lacking[0])} is missing: {name} needs it")
        with _located(at, parameters):
            return configured(name, made, parameters)

    def _class(self, kind: str, name: str, at: str) -> type:
        with _located(at):
            found: type = self.registry.find(kind, name)
        return found

    def _method(self, table: Mapping[str, Any], at: str) -> Pipeline | Route:
        here, name = join(at, "parameters"), None
        parameters = structure.table(table.get("parameters", {}), here)
        if "method" in table:
            name = _text(table["method"], join(at, "method"))
            with _located(join(at, "method")):
                method = self.registry.get(name)
            check_names(parameters, [*_names(method.config), FLOOR], here)
            parameters = self._placed(method.config, parameters)
        elif parameters:
            raise ParameterError(f"{here} belong to one method: give its name as method")
        profile = self.folder / _text(table["profile"], join(at, "profile"), A_PROFILE) if "profile" in table else None
        with _located(here, parameters) if profile is None else _located(at, ["profile", *parameters]):
            return self.registry.build(name, profile=profile, **parameters)

    def _placed(self, kind: type, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parameters with relative paths taken from the folder, where a field says that it holds paths (`FILE`)."""
        words = {str(one.alias): one.metadata[FILE] for one in fields(kind) if FILE in one.metadata}
        return {
            name: str(self.folder / value)
            if name in words and isinstance(value, str) and value and value not in words[name]
            else value
            for name, value in parameters.items()
        }

    def _union(self, table: Mapping[str, Any], at: str, above: tuple[object, ...]) -> Pipeline:
        for key in ("parameters", "profile"):
            if key in table:
                raise ParameterError(f"{join(at, key)} has no meaning next to union: each of its tables has its own")
        remedies = {key: f"put {key} next to union" for key in ("gate", "corrector", "executor")}
        remedies["profile"] = "give a method and its parameters"
        for i, one in _items(table, "union", at):
            for key, remedy in remedies.items():
                if isinstance(one, Mapping) and key in one:
                    raise ParameterError(f"{join(at, f'union[{i}].{key}')} has no meaning there: {remedy}")
        made = [self.pipeline(one, join(at, f"union[{i}]"), above) for i, one in _items(table, "union", at)]
        if not made:
            raise ParameterError(f"{join(at, 'union')} is empty: give the tables of the methods to unite")
        parts = [part for one in made for part in one.known]  # each is one pipeline: only profiles and gates make more
        observers = tuple(one for part in parts for one in part.observers)
        return Pipeline(UnionEstimator(*parts), observers=observers, name=" + ".join(part.name for part in parts))


def _names(kind: type, *, required: bool = False) -> list[str]:
    """Names of a refiner's parameters; those without a default alone if `required`."""
    known = [attribute for attribute in fields(kind) if attribute.init]
    return [str(attribute.alias) for attribute in known if attribute.default is NOTHING or not required]


@contextmanager
def _located(at: str, fields: Iterable[str] = ()) -> Iterator[None]:
    """Errors inside get the path in front. fields: names that messages may begin with; the path then leads to them."""
    try:
        yield
    except (ParameterError, UnknownMethodError) as error:
        text = str(error)
        named = any(re.match(rf"{re.escape(name)}\b(?!-)", text) for name in fields)
        raise type(error)(join(at, text) if named else f"{at}: {text}" if at else text) from error


def _text(value: Any, at: str, remedy: str = "give a name") -> str:
    if not isinstance(value, str) or not value:
        raise ParameterError(f"{at} is {printed(value)}: {remedy}")
    return value


def _items(table: Mapping[str, Any], key: str, at: str) -> Iterable[tuple[int, Any]]:
    value = table.get(key, ())
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ParameterError(f"{join(at, key)} is {printed(value)}: give a list of tables")
    return enumerate(value)
