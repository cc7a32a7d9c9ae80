"""What commands that try many settings share: the methods, the parameters of all settings, tables of the model."""

from __future__ import annotations

import json as reader
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseprefill import structure
from sparseprefill.errors import SparsePrefillError

from .group import CommandError
from .options import DENSE, TABLES, changes, floored, suited

if TYPE_CHECKING:
    from sparseprefill.method import Method
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.registry import Registry

    from ..evaluation.prompts import Prompt
    from .progress import Bars

SAMPLED = 4096
"""Tokens of the prompts that tables are made from, at most."""


def chosen(registry: Registry, names: Sequence[str] | None) -> list[Method]:
    """The methods that are named; without names every one but `dense`, which computes what the model itself does."""
    return [registry.get(name) for name in dict.fromkeys(names or registry.methods()) if names or name != DENSE]


def fixed_parameters(
    methods: Sequence[Method], given: Sequence[str], model: str | None, floor: Any = None
) -> dict[str, dict[str, Any]]:
    """Parameters by method that every setting has: those of --set, the floor, and what suits the embedded model."""
    from sparseprefill.profiles import anchors, clusters

    usual, changed = suited(model), changes([one.name for one in methods], given)
    made = {
        one.name: {
            **{name: value for name, value in usual.get(one.name, {}).items() if name not in one.search},
            **floored(one.name, floor),
            **changed[one.name],
        }
        for one in methods
    }
    for own in made.values():  # a profile is one file: tables go into it
        table = own.get("clusters")
        if isinstance(table, str) and Path(table).is_file():
            own["clusters"] = reader.loads(clusters.load(table).to_json())
        layers = own.get("anchors")
        if isinstance(layers, str) and Path(layers).is_file():
            own["anchors"] = reader.loads(anchors.load(layers).to_json())
    return made


def best_settings(path: Path, seed: int, texts: int) -> dict[str, dict[str, Any]]:
    """Of each method in a file of `frontier --json`, the setting that it recommends at its longest length.

    seed, texts: of the run that wants them; CommandError where its texts are among those of the file, or the file holds
    something else. Tables, such as clusters, are left to the run.
    """
    from ..calibration.frontier import recommended

    try:
        found = structure.parsed(structure.read(path))
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
        raise CommandError(f"--from {path}: its settings were found on the same texts: pass a --seed other than {seed}")
    return made


def without_tables(methods: Sequence[Method], fixed: Mapping[str, Mapping[str, Any]]) -> list[Method]:
    """Those that need no table of the model, or are given one: their settings can be checked before it is loaded."""
    return [one for one in methods if one.name not in TABLES or TABLES[one.name][0] in fixed[one.name]]


def with_tables(
    methods: list[Method],
    fixed: dict[str, dict[str, Any]],
    model: Any,
    identity: ModelIdentity,
    prompts: Sequence[Prompt],
    shown: Bars,
) -> tuple[list[Method], dict[str, str]]:
    """The methods, those that need a table of this model with one made on the prompts; or without them, and why."""
    left_out: dict[str, str] = {}
    length = min(SAMPLED, *(len(one.ids) for one in prompts))
    samples = [one.ids[:length] for one in prompts]
    for name in (one.name for one in methods if one.name in TABLES):
        parameter, command, _ = TABLES[name]
        if parameter in fixed[name]:
            continue
        make = _clusters if command == "cluster" else _anchors
        table, reason = make(model, identity, samples, shown)
        if table is None:
            left_out[name] = reason
        else:
            fixed[name][parameter] = table
    return [one for one in methods if one.name not in left_out], left_out


def _anchors(
    model: Any, identity: ModelIdentity, prompts: Sequence[Sequence[int]], shown: Bars
) -> tuple[dict[str, Any] | None, str]:
    """Anchor layers of the model as a file has them; None, and why, where there are none."""
    from ..anchors.table import Settings, anchored

    try:
        with shown.contender("anchor layers") as progress:
            return reader.loads(anchored(model, identity, prompts, Settings(), progress).table.to_json()), ""
    except SparsePrefillError as error:
        return None, f"its anchor layers cannot be chosen: {error}"


def _clusters(
    model: Any, identity: ModelIdentity, prompts: Sequence[Sequence[int]], shown: Bars
) -> tuple[dict[str, Any] | None, str]:
    """Clusters of the model's heads as a file has them; None, and why, where there are none."""
    if find_spec("scipy") is None:
        return None, 'it needs a table of clusters, and making one needs scipy: pip install "sparseprefill[cluster]"'
    from ..clustering.table import Settings, clustered

    try:
        with shown.contender("clusters of heads") as progress:
            table = clustered(model, identity, prompts, Settings(), progress).table
    except SparsePrefillError as error:
        return None, f"its clusters cannot be made: {error}"
    if not table.clusters:
        return None, "no two heads of this model look alike"
    return reader.loads(table.to_json()), ""
