"""Registry: finds plugins, keeps a record of each, finds what they offer by name, and builds pipelines."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pluggy
from attrs import evolve, fields, frozen, has

from sparseprefill import method as hooks
from sparseprefill.errors import (
    MethodCollisionError,
    ParameterError,
    PluginLoadError,
    UnknownMethodError,
    nearest,
    printed,
    told,
)
from sparseprefill.kernels.family.known import handed_down
from sparseprefill.method import PROJECT, Method, hookimpl
from sparseprefill.validate import NAME

if TYPE_CHECKING:
    from sparseprefill.kernels.family.record import Family
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.profiles.profile import Profile
    from sparseprefill.route import Route
    from sparseprefill.stages import Corrector, MaskRefiner

ONLY = "SPARSEPREFILL_PLUGINS"
REMEDY = f"uninstall one, or name the plugins to load in {ONLY}"
CORE = "core"
"""The plugin that every registry begins with: the refiners and kernels of core itself."""
KINDS = ("method", "refiner", "corrector")
"""Kinds that configurations name: Methods, or classes of stages."""
OFFERED = (*KINDS, "kernel")
"""Kinds that plugins offer by name, each through a hook of its own; kernels are chosen by the call and never named."""
KEY = "name"
"""The key by which a table of a configuration calls its refiner or corrector, beside the parameters."""
_BUILDING: ContextVar[Registry | None] = ContextVar("building", default=None)
"""The registry that builds something in this thread now."""
log = logging.getLogger(__name__)


@frozen
class PluginRecord:
    """The fate of one plugin: its name, distribution, version, what it offers, and the error that stopped it."""

    name: str
    distribution: str
    version: str
    methods: tuple[str, ...] = ()
    refiners: tuple[str, ...] = ()
    correctors: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    error: BaseException | None = None

    @property
    def source(self) -> str:
        """The distribution or entry point that the plugin comes from, for messages."""
        return f"plugin {self.name!r} of {self.distribution} {self.version}".rstrip()

    def offers(self, kind: str) -> tuple[str, ...]:
        """The names of one kind: "method", "refiner", "corrector" or "kernel"."""
        names: tuple[str, ...] = getattr(self, f"{kind}s")
        return names


class Registry:
    """Owns a PluginManager of its own; `default_registry()` is the one that the public functions use.

    It begins with one plugin, ``core``: the refiners that belong to no single paper, and the kernels. kinds: what
    plugins are asked for, "method", "refiner", "corrector" and "kernel"; methods alone are listed without importing
    torch, unless a plugin does.
    """

    def __init__(self, kinds: Collection[str] = OFFERED) -> None:
        self._kinds = kinds
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hooks)
        self._known: dict[str, dict[str, Any]] = {kind: {} for kind in OFFERED}
        self._kernels: tuple[Family, ...] = ()
        self._records: list[PluginRecord] = []
        self._left_out: set[str] = set()
        if not {"refiner", "kernel"}.isdisjoint(kinds):
            self.register(_Core(), CORE, PROJECT)

    def load_entry_points(self, points: Iterable[EntryPoint] | None = None) -> None:
        """Load every installed plugin of the group. A broken one is recorded and never takes the others down.

        The environment variable SPARSEPREFILL_PLUGINS narrows what loads: names of entry points, comma-separated.
        Plugins that are loaded already stay as they are.
        Raises MethodCollisionError where two of them offer one method, refiner or corrector, or go by one name.
        """
        found = list(entry_points(group=PROJECT) if points is None else points)
        only = os.environ.get(ONLY)
        if only is not None:
            names = {name.strip() for name in only.split(",") if name.strip()}
            installed = {point.name for point in found}
            self._left_out |= installed - names
            if names - installed:
                log.warning("%s names plugins that are not installed: %s", ONLY, ", ".join(sorted(names - installed)))
            found = [point for point in found if point.name in names]
        for point in found:
            self._load(point)

    def _load(self, point: EntryPoint) -> None:
        dist = point.dist
        record = PluginRecord(point.name, dist.name if dist else "unknown", dist.version if dist else "")
        try:
            with self.building():  # or executors that its modules make would ask for the registry that loads
                self.register(point.load(), record.name, record.distribution, record.version)
        except MethodCollisionError:
            raise
        except (Exception, SystemExit) as error:  # one bad wheel must not take the others down
            cause = error.__cause__ if isinstance(error, PluginLoadError) and error.__cause__ else error
            log.warning("%s failed to load: %s: %s", record.source, type(cause).__name__, told(cause))
            self._keep(evolve(record, error=cause))

    def register(self, plugin: object, name: str, distribution: str = "local", version: str = "") -> PluginRecord:
        """Register a module or object with a hook implementation. Nothing stays registered if it fails.

        Registering the same object under the same name again changes nothing. Raises MethodCollisionError if its
        name or one that it offers is taken, PluginLoadError if it implements no hook, misspells it, raises, or
        offers something that is no Method, and no class of a refiner or corrector.
        """
        if plugin is None:
            raise PluginLoadError("plugin is None: pass a module or object with a hook implementation")
        record = PluginRecord(name, distribution, version)
        known = self._loaded(plugin, record)
        if known is not None:
            return known
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
            answers = self._answers(name)
            self._check_free(answers, record)
        except BaseException as error:
            if self._manager.get_plugin(name) is plugin:  # pluggy keeps a plugin whose validation failed
                self._manager.unregister(plugin)
            if isinstance(error, PluginLoadError | MethodCollisionError) or not isinstance(error, Exception):
                raise
            raise PluginLoadError(f"{record.source}: {type(error).__name__}: {told(error)}") from error
        for kind, found in answers.items():
            self._known[kind].update(found)
        self._kernels = tuple(self._known["kernel"].values())
        offered: dict[str, Any] = {f"{kind}s": tuple(found) for kind, found in answers.items()}
        record = evolve(record, **offered)
        self._keep(record)
        return record

    def _keep(self, record: PluginRecord) -> None:
        """Add a record; an earlier failure of the same plugin is history."""
        same = (record.name, record.distribution)
        self._records = [old for old in self._records if old.error is None or (old.name, old.distribution) != same]
        self._records.append(record)

    def _loaded(self, plugin: object, record: PluginRecord) -> PluginRecord | None:
        taken = self._manager.get_name(plugin) or record.name
        for known in self._records:
            if known.error is not None or known.name != taken:
                continue
            if known.name == record.name and self._manager.get_plugin(taken) is plugin:
                return known
            what = "come from the same module" if known.name != record.name else "have the same name"
            raise MethodCollisionError(f"{known.source} and {record.source} {what}: {REMEDY}")
        return None

    def _answers(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """The answers of a plugin's hooks: by kind, then by name."""
        hooks = {
            kind: one.function
            for kind in OFFERED
            for one in getattr(self._manager.hook, _hook(kind)).get_hookimpls()
            if one.plugin_name == name
        }
        if not hooks:
            known = ", ".join(f"{_hook(kind)}()" for kind in OFFERED)
            raise PluginLoadError(f"plugin {name!r} implements no hook: add @hookimpl to one of {known}")
        return {kind: READERS[kind](answer(), kind, name) for kind, answer in hooks.items() if kind in self._kinds}

    def _check_free(self, answers: Mapping[str, Iterable[str]], record: PluginRecord) -> None:
        for kind, names in answers.items():
            for name in names:
                if name in self._known[kind]:
                    both = f"{self.owner(kind, name).source} and by {record.source}"
                    raise MethodCollisionError(f"{kind} {name!r} is offered by {both}: {REMEDY}")

    def unregister(self, name: str) -> None:
        """Forget a plugin and what it offers."""
        for record in self._records:
            if record.name == name:
                for kind, known in self._known.items():
                    for one in record.offers(kind):
                        del known[one]
        self._kernels = tuple(self._known["kernel"].values())
        self._records = [record for record in self._records if record.name != name]
        plugin = self._manager.get_plugin(name)
        if plugin is not None:
            self._manager.unregister(plugin)

    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every plugin found, in order of loading, broken ones with their error."""
        return tuple(self._records)

    def offered(self, kind: str) -> Mapping[str, Any]:
        """Methods, classes of refiners or correctors, or records of kernels, by name. kind: one of `OFFERED`."""
        return dict(sorted(self._known[kind].items()))

    def methods(self) -> Mapping[str, Method]:
        """Method by name, sorted."""
        return self.offered("method")

    def refiners(self) -> Mapping[str, type[MaskRefiner]]:
        """Class of a refiner by name, sorted."""
        return self.offered("refiner")

    def correctors(self) -> Mapping[str, type[Corrector]]:
        """Class of a corrector by name, sorted."""
        return self.offered("corrector")

    def kernels(self) -> tuple[Family, ...]:
        """Records of attention kernels, in the order in which they were offered; one tuple until that changes."""
        return self._kernels

    def get(self, name: str | None) -> Method:
        """The method of this name; UnknownMethodError lists the nearest, PluginLoadError a plugin that broke.

        A plugin that failed to load could not say what it offers: it answers for the method of its own name.
        """
        method: Method = self.find("method", name)
        return method

    def find(self, kind: str, name: object) -> Any:
        """Look up a name of one kind: a Method, or the class of a refiner or corrector.

        Errors as of `get`; for a refiner or corrector of which nothing is known ParameterError.
        """
        known = self._known[kind]
        if not isinstance(name, str) or name not in known:
            raise self._unknown((kind,), name)
        return known[name]

    def kinds(self, name: str) -> tuple[str, ...]:
        """The kinds that have this name, of "method", "refiner" and "corrector"; the errors of `get` where none has."""
        found = tuple(kind for kind in KINDS if name in self._known[kind])
        if not found:
            raise self._unknown(KINDS, name)
        return found

    def owner(self, kind: str, name: str) -> PluginRecord:
        """The plugin that offers a name that `kinds` knows."""
        return next(record for record in self._records if name in record.offers(kind))

    def _unknown(self, kinds: tuple[str, ...], name: object) -> Exception:
        """The error for a name that no method, refiner or corrector has, whichever were asked for."""
        error = UnknownMethodError if "method" in kinds else ParameterError
        words = " or ".join([", ".join(kinds[:-1]), kinds[-1]] if kinds[1:] else kinds)
        known = {one for kind in kinds for one in self._known[kind]}
        if not isinstance(name, str):
            return error(f"name is {printed(name)}: pass the name of a {words}{nearest('', known)}")
        broken = [record for record in self._records if record.error is not None]
        for record in broken:
            if name.replace("_", "-") == record.name.replace("_", "-"):
                shown = f"{type(record.error).__name__}: {told(record.error)}"
                failed = PluginLoadError(f"{words} {name!r}: {record.source} failed to load: {shown}")
                failed.__cause__ = record.error
                return failed
        more = f" (failed to load: {'; '.join(record.source for record in broken)})" if broken else ""
        if self._left_out:
            more += f" (excluded by {ONLY}: {', '.join(sorted(self._left_out))})"
        return error(f"no {words} is named {name!r}{nearest(name, known)}{more}")

    @overload
    def build(self, /, name: str, *, profile: None = None, **parameters: Any) -> Pipeline: ...

    @overload
    def build(self, /, name: str | None = None, *, profile: str | Path | Profile, **parameters: Any) -> Route: ...

    @overload
    def build(
        self, /, name: str | None = None, *, profile: str | Path | Profile | None = None, **parameters: Any
    ) -> Pipeline | Route: ...

    def build(
        self, /, name: str | None = None, *, profile: str | Path | Profile | None = None, **parameters: Any
    ) -> Pipeline | Route:
        """A pipeline by name, whose executor gets this registry's kernels, as they are now.

        ParameterError where a parameter is wrong, StageError where the plugin's build fails.

        profile: a file of ``sparseprefill fit``; each call's method and parameters then follow its length,
        under `parameters`. name: may be left out with a profile, which holds it.
        """
        if profile is None:
            method = self.get(name)
            with self.building():
                return method.pipeline(**parameters)
        from sparseprefill.profiles.profile import Profile
        from sparseprefill.route import Route

        if name is not None:
            self.get(name)
        with self.building():
            return Route.by_length(Profile.load(profile), self.get, parameters, name)

    @contextmanager
    def building(self) -> Iterator[None]:
        """While something is built: executors that are made get this registry's kernels, as they are now, and methods
        within methods are looked up here.

        Kernels are those of the installed plugins where it does not ask plugins for any.
        """
        before = _BUILDING.set(self)
        try:
            with handed_down(self.kernels()) if "kernel" in self._kinds else nullcontext():
                yield
        finally:
            _BUILDING.reset(before)


class _Core:
    """The plugin of core itself: the refiners that belong to no single paper, and the kernels."""

    @hookimpl
    def sparseprefill_kernels(self) -> Iterable[Family]:
        from sparseprefill.kernels.family.shipped import SHIPPED

        return SHIPPED

    @hookimpl
    def sparseprefill_refiners(self) -> Mapping[str, type[MaskRefiner]]:
        from sparseprefill.refiners.budget import BudgetCeiling, BudgetFloor
        from sparseprefill.refiners.recall import RecallFloor
        from sparseprefill.refiners.rescue import DenseRows, GqaUnion, LocalBand, RandomRescue, Sink, StrideRescue
        from sparseprefill.refiners.skip import SkipSoftmax

        return {
            "budget-ceiling": BudgetCeiling,
            "budget-floor": BudgetFloor,
            "dense-rows": DenseRows,
            "gqa-union": GqaUnion,
            "local-band": LocalBand,
            "random-rescue": RandomRescue,
            "recall-floor": RecallFloor,
            "sink": Sink,
            "skip-softmax": SkipSoftmax,
            "stride-rescue": StrideRescue,
        }


@cache
def default_registry() -> Registry:
    """The registry of all installed plugins, loaded on first use."""
    registry = Registry()
    registry.load_entry_points()
    return registry


def registry_at_work() -> Registry:
    """The registry that builds what this is asked for, else the default one."""
    return _BUILDING.get() or default_registry()


def _hook(kind: str) -> str:
    """The name of the hook through which a plugin offers one kind."""
    return f"sparseprefill_{kind}s"


def _methods(answer: Any, kind: str, plugin: str) -> Mapping[str, Method]:
    """Methods by name; PluginLoadError for an answer that holds something else."""
    return _named(answer, kind, plugin, Method)


def _kernels(answer: Any, kind: str, plugin: str) -> Mapping[str, Family]:
    """Records of kernels by name; PluginLoadError for an answer that holds something else."""
    from sparseprefill.kernels.family.record import Family

    return _named(answer, kind, plugin, Family)


def _named(answer: Any, kind: str, plugin: str, wanted: type) -> Mapping[str, Any]:
    """Objects of one class by their names."""
    given: list[Any] = list(answer) if isinstance(answer, Iterable) else [answer]
    for one in given:
        if not isinstance(one, wanted):
            words = f"{_hook(kind)}() must return {'Methods' if wanted is Method else 'Family records'}"
            raise PluginLoadError(f"plugin {plugin!r} offers {printed(one)}: {words}")
    names = [one.name for one in given]
    if len(set(names)) < len(names):
        raise PluginLoadError(f"plugin {plugin!r} offers the same name twice: {', '.join(sorted(names))}")
    return {one.name: one for one in given}


def _classes(answer: Any, kind: str, plugin: str) -> Mapping[str, type]:
    """Classes of stages by name; PluginLoadError for an answer that holds something else."""
    from sparseprefill.stages import Corrector, MaskRefiner, missing

    if not isinstance(answer, Mapping):
        words = "must return a dict of classes by name"
        raise PluginLoadError(f"plugin {plugin!r} offers {printed(answer)}: {_hook(kind)}() {words}")
    for name, stage in answer.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            words = f"lower-case words joined by hyphens, such as 'my-{kind}'"
            raise PluginLoadError(f"plugin {plugin!r} offers a {kind} named {printed(name)}: use {words}")
        given = f"plugin {plugin!r} offers {printed(stage)} as {kind} {name!r}"
        if not isinstance(stage, type) or not has(stage):
            raise PluginLoadError(f"{given}: pass an attrs class (frozen) whose fields are the parameters")
        lacking = missing(stage, MaskRefiner if kind == "refiner" else Corrector)
        if lacking:
            raise PluginLoadError(f"{given}: the class has no method {lacking[0]}(), which a {kind} needs")
        if KEY in (one.alias for one in fields(stage) if one.init):
            raise PluginLoadError(f"{given}: it has the field {KEY!r}, by which configurations call it: rename it")
    return dict(answer)


READERS = {"method": _methods, "refiner": _classes, "corrector": _classes, "kernel": _kernels}
"""By kind, what makes names and what they stand for of a hook's answer."""
