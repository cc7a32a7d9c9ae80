"""The cases of each table of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from sparseprefill.errors import ParameterError, nearest
from sparseprefill.registry import Registry

from .case import Case, of_mask, of_method
from .shape import Shape

MASKS = (
    "full",
    *(f"tiles:{share}" for share in (0.5, 0.25, 0.1, 0.05, 0.02)),
    *(f"stripes:{share}" for share in (0.1, 0.05, 0.02)),
    "tiles:0.05+stripes:0.05",
    *(f"diagonal+columns:{share}" for share in (0.1, 0.05, 0.02)),
)
EIGHT_MASKS = ("full", *(f"tiles:{share}" for share in (0.5, 0.25, 0.1, 0.05, 0.02)))
CHUNKS, CHUNK_MASKS = (2048, 8192), ("full", "tiles:0.1", "diagonal+stripes:0.1")
"""New tokens behind cached ones."""
BEHIND = "chunks"
"""The table of these, which may be given other numbers of them, and pages."""
SHAPE_MASKS = ("full", "tiles:0.1", "stripes:0.05")
SWEEPS: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType(
    {
        "anchor-attention": [{"theta": theta} for theta in (8.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0)],
        "bfla": [
            {},
            *({"score_norm": "mean", "keep_mass": mass} for mass in (0.8, 0.95, 0.99)),
            *({"score_norm": "mean", "keep_mass": mass, "block": 128, "group": 16} for mass in (0.8, 0.95, 0.99)),
        ],
    }
)
"""Settings whose recall and time make a curve."""
Make = Callable[[Registry, Shape], Iterable[Case]]


@frozen
class Table:
    """One table: lengths by default, on a GPU and on a CPU, and its cases at one shape."""

    lengths: tuple[int, ...]
    short: tuple[int, ...]
    make: Make
    doc: str


def names(registry: Registry) -> list[str]:
    """Every method but dense, which is the executor's row of a full mask."""
    return [name for name in registry.methods() if name != "dense"]


def _executor(registry: Registry, shape: Shape) -> Iterable[Case]:
    return [of_mask(mask, shape, "executor") for mask in MASKS]


def _eight(registry: Registry, shape: Shape) -> Iterable[Case]:
    pairs = product(EIGHT_MASKS, ("call", "int8"))
    return [of_mask(mask, shape, "eight", precision=precision) for mask, precision in pairs]


def _methods(registry: Registry, shape: Shape) -> Iterable[Case]:
    return [of_method(registry, name, shape, "methods") for name in names(registry)]


def _curves(registry: Registry, shape: Shape) -> Iterable[Case]:
    return [
        of_method(registry, name, shape, "curves", parameters=parameters)
        for name, settings in SWEEPS.items()
        for parameters in settings
    ]


def _shapes(registry: Registry, shape: Shape) -> Iterable[Case]:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"head_dim": 64},
        {"head_dim": 256},
        {"dtype": "float16"},
        {"kv_heads": shape.heads},
        {"kv_heads": max(1, shape.heads // 8)},
        {"batch": 4},
    )
    shapes = [evolve(shape, **change) for change in changes]
    return [of_mask(mask, one, "shapes") for one, mask in product(shapes, SHAPE_MASKS)]


def _short(registry: Registry, shape: Shape) -> Iterable[Case]:
    pairs = product(names(registry), (False, True))
    return [of_method(registry, name, shape, "short", gate=gate) for name, gate in pairs]


def _long(registry: Registry, shape: Shape) -> Iterable[Case]:
    return [of_method(registry, name, shape, "long") for name in names(registry)]


def _chunks(registry: Registry, shape: Shape) -> Iterable[Case]:
    news = [shape.new] if shape.new is not None else dict.fromkeys(min(new, shape.length // 2) for new in CHUNKS)
    shapes = [evolve(shape, new=new) for new in news]
    return [
        case
        for one in shapes
        for case in (
            *(of_mask(mask, one, "chunks") for mask in CHUNK_MASKS),
            *(of_method(registry, name, one, "chunks") for name in names(registry)),
        )
    ]


def _captured(registry: Registry, shape: Shape) -> Iterable[Case]:
    from sparseprefill.adapters.demo.model import PARAMETERS as SUITED

    # One call of heads from several layers: tables of the embedded model's own layers mean nothing in it.
    return [
        of_method(
            registry,
            name,
            shape,
            "captured",
            input="captured",
            parameters={**SUITED.get(name, {}), **registry.get(name).stand_in},
        )
        for name in names(registry)
    ]


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "executor": Table((32768, 131072), (1024,), _executor, "random masks through the executor alone"),
        "eight": Table((65536, 131072), (1024,), _eight, "random masks of tiles in 16 bits and in 8"),
        "methods": Table((32768, 131072), (1024,), _methods, "methods at their defaults"),
        "curves": Table((131072,), (1024,), _curves, "recall against time over a method's parameters"),
        "shapes": Table((65536,), (512,), _shapes, "other head dimensions, dtypes, groups and batches"),
        "short": Table((1024, 2048, 4096, 8192), (256, 512), _short, "short prompts, without and with the gate"),
        "long": Table((1048576,), (2048,), _long, "a million tokens"),
        BEHIND: Table((131072,), (1024,), _chunks, "new tokens after cached ones"),
        "captured": Table((32768,), (1024,), _captured, "q, k, v of the embedded model"),
    }
)


def cases(table: str, registry: Registry, shapes: Iterable[Shape]) -> list[Case]:
    """Every case of a table at these shapes; ParameterError for a table that is none."""
    if table not in TABLES:
        raise ParameterError(f"table is {table!r}{nearest(table, TABLES)}")
    return [case for shape in shapes for case in TABLES[table].make(registry, shape)]


def lengths(table: str, device: str) -> tuple[int, ...]:
    """The lengths of a table by default: what a GPU does in minutes, and far less on a CPU."""
    found = TABLES[table]
    return found.lengths if device == "cuda" else found.short
