"""What commands that try many settings share: the methods, the parameters of all settings, the clusters of heads."""

from __future__ import annotations

import json as reader
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseprefill.errors import SparsePrefillError

from .group import CommandError
from .options import DENSE

if TYPE_CHECKING:
    from sparseprefill.method import Method
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.registry import Registry

    from ..evaluation.prompts import Prompt
    from .progress import Bars

SHARING = "share-prefill"
SAMPLED = 4096
"""Tokens of the prompts that heads are clustered on, at most."""


def chosen(registry: Registry, names: Sequence[str] | None) -> list[Method]:
    """The methods that are named; without names every one but `dense`, which computes what the model itself does."""
    return [registry.get(name) for name in dict.fromkeys(names or registry.methods()) if names or name != DENSE]


def fixed_parameters(
    methods: Sequence[Method], given: Sequence[str], model: str | None, floor: float | None = None
) -> dict[str, dict[str, Any]]:
    """Parameters by method that every setting has: those of --set, the floor, and what suits the embedded model."""
    from sparseprefill.profiles.cluster_file import dump, load

    from ..demo.settings import PARAMETERS
    from .options import floored, setting

    suited = PARAMETERS if model is None else {}
    made: dict[str, dict[str, Any]] = {
        one.name: {
            **{name: value for name, value in suited.get(one.name, {}).items() if name not in one.search},
            **floored(one.name, floor),
        }
        for one in methods
    }
    for text in given:
        name, parameter, value = setting(text)
        if name not in made:
            raise CommandError(f"--set {text}: {name!r} is not among the methods of this run: {', '.join(made)}")
        made[name][parameter] = value
    for own in made.values():  # a profile is one file: tables go into it
        table = own.get("clusters")
        if isinstance(table, str) and Path(table).is_file():
            own["clusters"] = reader.loads(dump(load(table)))
    return made


def best_settings(path: Path, seed: int, texts: int) -> dict[str, dict[str, Any]]:
    """Of each method in a file of `frontier --json`, the setting that it recommends at its longest length.

    seed, texts: of the run that wants them; CommandError where its texts are among those of the file, or the file holds
    something else. Tables, such as clusters, are left to the run.
    """
    from ..calibration.frontier import recommended

    try:
        found = reader.loads(path.read_text(encoding="utf-8"))
        seeds = range(found["seed"], found["seed"] + found["texts"])
        longest = max(one["tokens"] for one in found["points"])
        points = [one for one in found["points"] if one["tokens"] == longest]
        names = dict.fromkeys(one["method"] for one in points)
        best = {name: recommended(one for one in points if one["method"] == name) for name in names}
        made = {
            name: {key: value for key, value in one["parameters"].items() if not isinstance(value, dict)}
            for name, one in best.items()
            if one is not None
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(f"--from {path}: {error!r}: pass what `sparseprefill frontier --json FILE` wrote") from error
    if set(seeds) & set(range(seed, seed + texts)):
        raise CommandError(f"--from {path}: its settings were found on the same texts: pass another --seed than {seed}")
    return made


def with_clusters(
    methods: list[Method],
    fixed: dict[str, dict[str, Any]],
    model: Any,
    identity: ModelIdentity,
    prompts: Sequence[Prompt],
    shown: Bars,
) -> tuple[list[Method], dict[str, str]]:
    """The methods, share-prefill with a table of this model's heads made on the prompts; or without it, and why."""
    names = [one.name for one in methods]
    if SHARING not in names or "clusters" in fixed[SHARING]:
        return methods, {}
    length = min(SAMPLED, *(len(one.ids) for one in prompts))
    table, reason = _table(model, identity, [one.ids[:length] for one in prompts], shown)
    if table is None:
        return [one for one in methods if one.name != SHARING], {SHARING: reason}
    fixed[SHARING]["clusters"] = table
    return methods, {}


def _table(
    model: Any, identity: ModelIdentity, prompts: Sequence[Sequence[int]], shown: Bars
) -> tuple[dict[str, Any] | None, str]:
    """Clusters of the model's heads as a file has them; None, and why, where there are none."""
    if find_spec("scipy") is None:
        return None, 'it needs a table of clusters, and that scipy: pip install "sparseprefill[cluster]"'
    from sparseprefill.profiles.cluster_file import dump

    from ..clustering.table import Settings, clustered

    try:
        with shown.contender("clusters of heads") as progress:
            table = clustered(model, identity, prompts, Settings(), progress).table
    except SparsePrefillError as error:
        return None, f"its clusters cannot be made: {error}"
    if not table.clusters:
        return None, "no two heads of this model look alike"
    return reader.loads(dump(table)), ""
