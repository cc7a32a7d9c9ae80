"""Files made for a whole model, where a process holds a share of its heads.

Calls say where their share begins (`AttentionCall.first_head`), so tables keep the model's own numbers. What has to
go is their check that a call has all of the model's heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve, fields

from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.clusters import ClusterTable
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import Profile
from sparseprefill.registry import Registry, default_registry
from sparseprefill.route import Route


class LocalRegistry(Registry):
    """The installed methods, built for a share of a model's heads.

    whole, local: the model, and the model as this process sees it. Tables and profiles are checked against the whole.
    """

    def __init__(self, whole: ModelIdentity, local: ModelIdentity) -> None:
        super().__init__()
        self._whole, self._local = whole, local

    def get(self, name: str | None) -> Method:
        """The method of this name, whose tables know the model's heads by number alone."""
        method = default_registry().get(name)

        def build(config: Any) -> Pipeline:
            return method.build(self._config(config))

        return evolve(method, build=build)

    def build(
        self, /, name: str | None = None, *, profile: str | Path | Profile | None = None, **parameters: Any
    ) -> Any:
        """See Registry."""
        if profile is None:
            return self.get(name).pipeline(**parameters)
        if name is not None:
            self.get(name)
        loaded = Profile.load(profile)
        loaded.check_model(self._whole)
        return Route.by_length(evolve(loaded, model=self._local), self.get, parameters, name)

    def _config(self, config: Any) -> Any:
        tables = {
            str(one.alias): getattr(config, one.name)
            for one in fields(type(config))
            if isinstance(getattr(config, one.name), ClusterTable)
        }
        for table in tables.values():
            table.check_model(self._whole)
        changed = {name: evolve(table, model=None) for name, table in tables.items()}
        return evolve(config, **changed) if changed else config
