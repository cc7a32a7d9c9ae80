"""Files made for a whole model, where a process holds a share of its heads.

Calls say where their share begins (`AttentionCall.first_head`), so tables keep the model's own numbers. What has to
go is their check that a call has all of the model's heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve

from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import Profile
from sparseprefill.profiles.table import ModelTable
from sparseprefill.registry import Registry, default_registry
from sparseprefill.route import Route


class LocalRegistry(Registry):
    """The installed methods, built for a share of a model's heads.

    whole, local: the model, and the model as this process sees it. Tables and profiles are checked against the whole.
    """

    def __init__(self, whole: ModelIdentity, local: ModelIdentity) -> None:
        super().__init__(kinds=())
        vars(self).update(vars(default_registry()))  # offers what that does, and shares it
        self._whole, self._local = whole, local

    def get(self, name: str | None) -> Method:
        """The method of this name, whose tables know the model's heads by number alone."""
        method = super().get(name)
        if method.table is None:
            return method
        parameter = method.table.parameter

        def build(config: Any) -> Pipeline:
            table = getattr(config, parameter)
            if isinstance(table, ModelTable):
                table.check_model(self._whole)
                config = evolve(config, **{parameter: evolve(table, model=None)})
            return method.build(config)

        return evolve(method, build=build)

    def build(
        self, /, name: str | None = None, *, profile: str | Path | Profile | None = None, **parameters: Any
    ) -> Any:
        """Do as `Registry.build` does, for this share of the heads."""
        if profile is None:
            method = self.get(name)
            with self.building():
                return method.pipeline(**parameters)
        if name is not None:
            self.get(name)
        loaded = Profile.load(profile)
        loaded.check_model(self._whole)
        with self.building():
            return Route.by_length(evolve(loaded, model=self._local), self.get, parameters, name)
