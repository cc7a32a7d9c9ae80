"""Registry: finds plugins, keeps a record of each, and builds pipelines by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy
from attrs import frozen

from sparseprefill import hookspecs
from sparseprefill.errors import MethodCollisionError, PluginLoadError, UnknownMethodError, nearest
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline

GROUP = hookspecs.PROJECT
ONLY = "SPARSEPREFILL_PLUGINS"
log = logging.getLogger(__name__)


@frozen
class PluginRecord:
    """What became of one plugin: its name, distribution, version, methods, and the error that stopped it."""

    name: str
    distribution: str
    version: str
    methods: tuple[str, ...] = ()
    error: Exception | None = None

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
        self._records: dict[str, PluginRecord] = {}

    def load_entry_points(self, points: Iterable[EntryPoint] | None = None) -> None:
        """Load every installed plugin of the group. A broken one is recorded and never takes the others down.

        The environment variable SPARSEPREFILL_PLUGINS narrows what loads: names of entry points, comma-separated.
        Raises MethodCollisionError where two of them offer one method.
        """
        only = os.environ.get(ONLY)
        names = None if only is None else {name.strip() for name in only.split(",") if name.strip()}
        for point in entry_points(group=GROUP) if points is None else points:
            if names is None or point.name in names:
                self._load(point)

    def _load(self, point: EntryPoint) -> None:
        dist = point.dist
        found = (point.name, dist.name if dist else "unknown", dist.version if dist else "")
        try:
            self.register(point.load(), *found)
        except MethodCollisionError:
            raise
        except Exception as error:  # one bad wheel must not take the others down
            log.warning("%s failed to load: %s: %s", PluginRecord(*found).source, type(error).__name__, error)
            self._records[point.name] = PluginRecord(*found, error=error)

    def register(self, plugin: object, name: str, distribution: str = "local", version: str = "") -> PluginRecord:
        """Register a module or object with a hook implementation. Nothing stays registered if it fails.

        Raises MethodCollisionError if one of its methods is taken, PluginLoadError if it offers no valid method.
        """
        known = self._records.get(name)
        if known is not None and known.error is None:
            raise MethodCollisionError(f"plugin {name!r} is registered already, by {known.source}")
        self._manager.register(plugin, name)
        try:
            self._manager.check_pending()
            offered = self._offered(name)
            record = PluginRecord(name, distribution, version, tuple(method.name for method in offered))
            for method in offered:
                self._check_free(method, record)
        except BaseException:
            self._manager.unregister(plugin)
            raise
        self._methods.update({method.name: method for method in offered})
        self._records[name] = record
        return record

    def _offered(self, name: str) -> list[Method]:
        hooks = self._manager.hook.sparseprefill_methods.get_hookimpls()
        impls = [impl for impl in hooks if impl.plugin_name == name]
        if not impls:
            raise PluginLoadError(f"plugin {name!r} implements no hook: add @hookimpl def sparseprefill_methods()")
        answer = impls[0].function()
        offered = list(answer) if isinstance(answer, Iterable) else [answer]
        for method in offered:
            if not isinstance(method, Method):
                raise PluginLoadError(f"plugin {name!r} offers {method!r}: sparseprefill_methods() returns Methods")
        names = [method.name for method in offered]
        if len(set(names)) < len(names):
            raise MethodCollisionError(f"plugin {name!r} offers one name twice: {', '.join(sorted(names))}")
        return offered

    def _check_free(self, method: Method, record: PluginRecord) -> None:
        if method.name in self._methods:
            owner = next(r for r in self._records.values() if method.name in r.methods)
            raise MethodCollisionError(
                f"method {method.name!r} is offered by {owner.source} and by {record.source}: "
                f"uninstall one, or name the plugins to load in {ONLY}"
            )

    def unregister(self, name: str) -> None:
        """Forget a plugin and its methods."""
        record = self._records.pop(name, None)
        for method in record.methods if record else ():
            del self._methods[method]
        plugin = self._manager.get_plugin(name)
        if plugin is not None:
            self._manager.unregister(plugin)

    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every plugin found, in order of loading, broken ones with their error."""
        return tuple(self._records.values())

    def methods(self) -> Mapping[str, Method]:
        """Method by name, sorted."""
        return dict(sorted(self._methods.items()))

    def get(self, name: str) -> Method:
        """The method of this name; UnknownMethodError lists the nearest, PluginLoadError a plugin that broke."""
        if name in self._methods:
            return self._methods[name]
        for record in self._records.values():
            if record.error is not None and name.replace("_", "-") == record.name.replace("_", "-"):
                message = f"method {name!r}: {record.source} failed to load: {record.error}"
                raise PluginLoadError(message) from record.error
        broken = [record.source for record in self._records.values() if record.error is not None]
        more = f" (failed to load: {'; '.join(broken)})" if broken else ""
        raise UnknownMethodError(f"no method is named {name!r}{nearest(str(name), self._methods)}{more}")

    def build(self, name: str, **parameters: Any) -> Pipeline:
        """A pipeline by name. ParameterError where a parameter is wrong, StageError where the plugin's build fails."""
        return self.get(name).pipeline(**parameters)


@cache
def default_registry() -> Registry:
    """The registry of all installed plugins, loaded on first use."""
    registry = Registry()
    registry.load_entry_points()
    return registry
