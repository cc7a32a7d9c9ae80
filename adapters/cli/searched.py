"""What commands that try many settings share: the methods, the parameters of all settings, tables of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseprefill import structure
from sparseprefill.errors import SparsePrefillError

from .group import CommandError
from .options import DENSE, changes, floored, suited

if TYPE_CHECKING:
    from sparseprefill.method import Method
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.profiles.table import ModelReader, NeededTable
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
    usual, changed = suited(model), changes([one.name for one in methods], given)
    made = {
        one.name: {
            **{name: value for name, value in usual.get(one.name, {}).items() if name not in one.search},
            **floored(one.name, floor),
            **changed[one.name],
        }
        for one in methods
    }
    for table, own in ((one.table, made[one.name]) for one in methods):
        path = None if table is None else own.get(table.parameter)
        if table is not None and isinstance(path, str) and Path(path).is_file():
            own[table.parameter] = structure.unstructure(table.read(path))  # a profile is one file: tables go into it
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
    return [one for one in methods if one.table is None or one.table.parameter in fixed[one.name]]


def with_tables(
    methods: list[Method],
    fixed: dict[str, dict[str, Any]],
    model: Any,
    identity: ModelIdentity,
    prompts: Sequence[Prompt],
    shown: Bars,
) -> tuple[list[Method], dict[str, str]]:
    """The methods, those that need a table of this model with one made on the prompts; or without them, and why."""
    from ..huggingface.reader import Reader

    left_out: dict[str, str] = {}
    length = min(SAMPLED, *(len(one.ids) for one in prompts))
    samples = [one.ids[:length] for one in prompts]
    for name, table in ((one.name, one.table) for one in methods):
        if table is None or table.parameter in fixed[name]:
            continue
        if table.lacking:
            reason = f"it needs a table of {table.parameter}, and making one needs {table.lacking}"
        else:
            fixed[name][table.parameter], reason = _made(name, table, Reader(model, identity), samples, shown)
        if reason:
            left_out[name] = reason
    return [one for one in methods if one.name not in left_out], left_out


def _made(
    name: str, table: NeededTable, reader: ModelReader, samples: Sequence[Sequence[int]], shown: Bars
) -> tuple[Any, str]:
    """A table as a file has it; and why there is none, empty where there is."""
    try:
        with shown.contender(f"the table of {name}") as progress:
            made = table.make(reader, samples, table.settings(), progress)
    except SparsePrefillError as error:
        return None, f"its {table.parameter} cannot be made: {error}"
    return structure.unstructure(made.table), made.useless
