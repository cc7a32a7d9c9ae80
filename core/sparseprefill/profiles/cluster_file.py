"""Tables of head clusters as JSON: written, and read with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseprefill import json_text
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.clusters import NOISE, ClusterTable, Spot
from sparseprefill.profiles.identity import ModelIdentity

SCHEMA = "sparseprefill.clusters"
VERSION = 1


def dump(table: ClusterTable) -> str:
    """The text of a file that `load` reads."""
    facts = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": None if table.model is None else table.model.to_dict(),
        "clusters": table.clusters,
        "noise": table.noise,
        "made": dict(table.made),
    }
    return json_text.by_lines(facts)


def load(path: str | Path) -> ClusterTable:
    """From a JSON file; ParameterError names the file and the field that does not fit."""
    return json_text.load(path, "clusters", "pass the JSON file of a cluster table", parse)


def parse(facts: object) -> ClusterTable:
    """From the content of such a file, or from a mapping ``{(layer, head): cluster}``, in which None is noise."""
    if isinstance(facts, ClusterTable):
        return facts
    if not isinstance(facts, Mapping):
        raise ParameterError(f"clusters is {type(facts).__name__}: pass a path, or a mapping")
    if not facts:
        raise ParameterError("clusters is an empty table: pass {(layer, head): cluster}, or what a cluster file holds")
    if "schema" not in facts and all(isinstance(key, tuple) for key in facts):
        return _by_hand(facts)
    json_text.check_version(facts, SCHEMA, VERSION, "make one with sparseprefill cluster")
    unknown = sorted(set(facts) - {"schema", "version", "model", "clusters", "noise", "made"})
    if unknown:
        raise ParameterError(f"{unknown[0]} is not a field of a cluster table")
    made = facts.get("made", {})
    if not isinstance(made, Mapping):
        raise ParameterError(f"made is {printed(made)}: pass an object")
    groups = _list("clusters", facts.get("clusters"))
    return ClusterTable(
        clusters=tuple(_heads(f"clusters[{i}]", heads) for i, heads in enumerate(groups)),
        noise=_heads("noise", facts.get("noise", [])),
        model=None if facts.get("model") is None else ModelIdentity.of(facts["model"]),
        made=made,
    )


def _by_hand(facts: Mapping[Any, Any]) -> ClusterTable:
    named: dict[int, list[Spot]] = {}
    noise = []
    for key, label in facts.items():
        head = _head(f"clusters[{printed(key)}]", key)
        if label is None or label == NOISE:
            noise.append(head)
        elif isinstance(label, int) and not isinstance(label, bool) and label >= 0:
            named.setdefault(label, []).append(head)
        else:
            raise ParameterError(
                f"clusters[{printed(key)}] is {printed(label)}: pass the number of a cluster, or None for noise"
            )
    return ClusterTable(clusters=tuple(tuple(named[label]) for label in sorted(named)), noise=tuple(noise))


def _list(name: str, value: object) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ParameterError(f"{name} is {printed(value)}: pass a list")
    return value


def _heads(name: str, value: object) -> tuple[Spot, ...]:
    return tuple(_head(f"{name}[{i}]", head) for i, head in enumerate(_list(name, value)))


def _head(name: str, value: object) -> Spot:
    if isinstance(value, list | tuple) and len(value) == 2 and all(_is_index(x) for x in value):
        return value[0], value[1]
    raise ParameterError(f"{name} is {printed(value)}: pass [layer, head], two integers from 0")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
