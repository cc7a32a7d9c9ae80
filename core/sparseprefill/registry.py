"""Registry: finds plugins, keeps a record of each, and builds pipelines by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, overload

import pluggy
from attrs import evolve, frozen

from sparseprefill import hookspecs
from sparseprefill.errors import (
    MethodCollisionError,
    PluginLoadError,
    UnknownMethodError,
    nearest,
    printed,
    told,
)
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.profile import Profile
from sparseprefill.route import Route

GROUP = hookspecs.PROJECT
ONLY = "SPARSEPREFILL_PLUGINS"
REMEDY = f"uninstall one, or name the plugins to load in {ONLY}"
log = logging.getLogger(__name__)


@frozen
class PluginRecord:
    """What became of one plugin: its name, distribution, version, methods, and the error that stopped it."""

    name: str
    distribution: str
    version: str
    methods: tuple[str, ...] = ()
    error: BaseException | None = None

    @property
    def source(self) -> str:
        """Where it comes from, for messages."""
        return f"plugin {self.name!r} of {self.distribution} {self.version}".rstrip()


class Registry:
    """Owns a PluginManager of its own; `default_registry()` is the one that the public functions use."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._methods: dict[str, Method] = {}
        self._records: list[PluginRecord] = []
        self._left_out: set[str] = set()

    def load_entry_points(self, points: Iterable[EntryPoint] | None = None) -> None:
        """Load every installed plugin of the group. A broken one is recorded and never takes the others down.

        The environment variable SPARSEPREFILL_PLUGINS narrows what loads: names of entry points, comma-separated.
        Plugins that are loaded already stay as they are.
        Raises MethodCollisionError where two of them offer one method or go by one name.
        """
        found = list(entry_points(group=GROUP) if points is None else points)
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
        name or one of its methods is taken, PluginLoadError if it implements no hook, misspells it, raises, or
        offers something that is no Method.
        """
        record = PluginRecord(name, distribution, version)
        known = self._known(plugin, record)
        if known is not None:
            return known
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
            offered = self._offered(name)
            self._check_free(offered, record)
        except BaseException as error:
            if self._manager.get_plugin(name) is plugin:  # pluggy keeps a plugin whose validation failed
                self._manager.unregister(plugin)
            if isinstance(error, PluginLoadError | MethodCollisionError) or not isinstance(error, Exception):
                raise
            raise PluginLoadError(f"{record.source}: {type(error).__name__}: {told(error)}") from error
        self._methods.update({method.name: method for method in offered})
        record = evolve(record, methods=tuple(method.name for method in offered))
        self._keep(record)
        return record

    def _keep(self, record: PluginRecord) -> None:
        """Add a record; an earlier failure of the same plugin is history."""
        same = (record.name, record.distribution)
        self._records = [old for old in self._records if old.error is None or (old.name, old.distribution) != same]
        self._records.append(record)

    def _known(self, plugin: object, record: PluginRecord) -> PluginRecord | None:
        taken = self._manager.get_name(plugin) or record.name
        for known in self._records:
            if known.error is not None or known.name != taken:
                continue
            if known.name == record.name and self._manager.get_plugin(taken) is plugin:
                return known
            what = "come from the same module" if known.name != record.name else "have the same name"
            raise MethodCollisionError(f"{known.source} and {record.source} {what}: {REMEDY}")
        return None

    def _offered(self, name: str) -> list[Method]:
        hooks = self._manager.hook.sparseprefill_methods.get_hookimpls()
        impls = [impl for impl in hooks if impl.plugin_name == name]
        if not impls:
            raise PluginLoadError(f"plugin {name!r} implements no hook: add @hookimpl def sparseprefill_methods()")
        answer = impls[0].function()
        offered: list[Any] = list(answer) if isinstance(answer, Iterable) else [answer]
        for method in offered:
            if not isinstance(method, Method):
                raise PluginLoadError(
                    f"plugin {name!r} offers {printed(method)}: sparseprefill_methods() must return Methods"
                )
        names = [method.name for method in offered]
        if len(set(names)) < len(names):
            raise PluginLoadError(f"plugin {name!r} offers the same name twice: {', '.join(sorted(names))}")
        return offered

    def _check_free(self, offered: Iterable[Method], record: PluginRecord) -> None:
        for method in offered:
            if method.name in self._methods:
                owner = next(known for known in self._records if method.name in known.methods)
                both = f"{owner.source} and by {record.source}"
                raise MethodCollisionError(f"method {method.name!r} is offered by {both}: {REMEDY}")

    def unregister(self, name: str) -> None:
        """Forget a plugin and its methods."""
        for record in self._records:
            if record.name == name:
                for method in record.methods:
                    del self._methods[method]
        self._records = [record for record in self._records if record.name != name]
        plugin = self._manager.get_plugin(name)
        if plugin is not None:
            self._manager.unregister(plugin)

    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every plugin found, in order of loading, broken ones with their error."""
        return tuple(self._records)

    def methods(self) -> Mapping[str, Method]:
        """Method by name, sorted."""
        return dict(sorted(self._methods.items()))

    def get(self, name: str | None) -> Method:
        """The method of this name; UnknownMethodError lists the nearest, PluginLoadError a plugin that broke.

        A plugin that failed to load could not say what it offers: it answers for the method of its own name.
        """
        if not isinstance(name, str):
            raise UnknownMethodError(f"name is {printed(name)}: pass the name of a method{nearest('', self._methods)}")
        if name in self._methods:
            return self._methods[name]
        broken = [record for record in self._records if record.error is not None]
        for record in broken:
            if str(name).replace("_", "-") == record.name.replace("_", "-"):
                shown = f"{type(record.error).__name__}: {told(record.error)}"
                raise PluginLoadError(f"method {name!r}: {record.source} failed to load: {shown}") from record.error
        more = f" (failed to load: {'; '.join(record.source for record in broken)})" if broken else ""
        if self._left_out:
            more += f" (excluded by {ONLY}: {', '.join(sorted(self._left_out))})"
        raise UnknownMethodError(f"no method is named {name!r}{nearest(str(name), self._methods)}{more}")

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
        """A pipeline by name. ParameterError where a parameter is wrong, StageError where the plugin's build fails.

        profile: a file of ``sparseprefill fit`` or ``tune``; each call's method and parameters then follow its length,
        under `parameters`. name: may be left out with a profile, which holds it.
        """
        if profile is None:
            return self.get(name).pipeline(**parameters)
        if name is not None:
            self.get(name)
        return Route.by_length(Profile.load(profile), self.get, parameters, name)


@cache
def default_registry() -> Registry:
    """The registry of all installed plugins, loaded on first use."""
    registry = Registry()
    registry.load_entry_points()
    return registry
