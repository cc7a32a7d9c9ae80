"""The house stays calm: few rooms, no circles of imports, short ways for a call, one list of kernel arguments."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.walk import layer_walk, pipeline_walk
from house.moves import gpu_path, layer_moves, pipeline_moves, vllm_moves
from house.test_layers import FACE, PLACES, ROOT, imported, module_name

FILES = [(layer, path) for layer, place in PLACES.items() for path in sorted(place.rglob("*.py"))]
MODULES = {module_name(layer, path): path for layer, path in FILES}


def arrows() -> dict[str, set[str]]:
    """Which modules each module imports, those for type checkers, inside functions and by a string included."""
    found: dict[str, set[str]] = {}
    for layer, path in FILES:
        module = module_name(layer, path)
        names = imported(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", MODULES)
        # The face is asked for the version alone: its names are for users, and fetched when they are asked for.
        found[module] = {name for name in names if name in MODULES and name not in (module, FACE)}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other (Tarjan's strongly connected components of more than one)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def test_no_circle_of_imports_is_left() -> None:
    assert [] == circles(arrows())


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert [["a", "b", "c"]] == circles(graph)


def test_a_circle_by_a_string_would_be_found() -> None:
    sources = {"a": "def f():\n    import_module('b.c')", "b.c": "from b import d", "b.d": "import a"}
    graph = {module: set(imported(source, module, False)) for module, source in sources.items()}
    assert [["a", "b.c", "b.d"]] == circles(graph)


def test_core_has_few_rooms() -> None:
    places = [path for path in PLACES["core"].iterdir() if path.name != "__main__.py"]  # a door, and no room
    rooms = [path.name for path in places if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len(rooms) <= 25, sorted(rooms)


@pytest.mark.parametrize(("method", "most"), [("streaming", 13), ("bfla", 18)])
def test_a_call_on_a_cpu_passes_few_files(method: str, most: int) -> None:
    files = pipeline_walk(method).files
    assert len(files) <= most, sorted(files)


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "most"), [("streaming", 32), ("bfla", 37)])
def test_a_layer_of_transformers_on_a_gpu_passes_few_files(method: str, most: int) -> None:
    assert torch.cuda.is_available()
    files = layer_walk(method, "cuda").files
    assert len(files) <= most, sorted(files)


def signatures(name: str) -> list[tuple[Path, ast.FunctionDef]]:
    """Every function of this name in core's kernels."""
    files = sorted((PLACES["core"] / "kernels").rglob("*.py"))
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return [(path, node) for path, node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]


def test_the_attention_kernels_arguments_stand_once() -> None:
    ((_, attend),) = signatures("attend")
    assert len(attend.args.args) <= 35
    ((path, kernel),) = signatures("sparse_attention_fwd_kernel")
    flat = {argument.arg for argument in kernel.args.args}
    assert len(flat) > 35
    for other in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(other, ast.FunctionDef) and other.name != kernel.name:
            assert len(flat & {argument.arg for argument in other.args.args}) < len(flat) / 2


def row_of(table: str, row: str) -> list[str]:
    """Cells of a row on the page of the design, in the table that begins so."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    lines = page[page.index(table) :].split("\n\n")[0].splitlines()
    return [cell.strip() for cell in next(line for line in lines if line.startswith(f"| {row}")).split("|")[2:-1]]


PIPELINE = {"dense": 60, "rowmax": 117, "anchor-attention": 165, "flexprefill": 135, "bfla": 125}
LAYER = {"dense": 80, "rowmax": 177, "anchor-attention": 267, "flexprefill": 190, "bfla": 170}
VLLM = {"dense": 100, "rowmax": 193, "anchor-attention": 283, "flexprefill": 202, "bfla": 185}


@pytest.mark.parametrize("method", PIPELINE)
def test_a_call_is_handed_on_few_times(method: str) -> None:
    walk = pipeline_moves(method)
    assert len(walk.moves) <= PIPELINE[method], walk.moves


@pytest.mark.parametrize("method", LAYER)
def test_a_layer_of_transformers_is_handed_on_few_times(method: str) -> None:
    walk = layer_moves(method)
    assert len(walk.moves) <= LAYER[method], walk.moves


@pytest.mark.parametrize("method", VLLM)
def test_a_layer_of_vllm_is_handed_on_few_times(method: str) -> None:
    walk = vllm_moves(method)
    assert len(walk.moves) <= VLLM[method], walk.moves


ON_A_GPU = {"vLLM": (40, 12, 64), "transformers": (40, 12, 84)}
"""Moves, files and calls of a layer that repeats, at most."""
REPEATED = {"vLLM": "one layer in a step of vLLM", "transformers": "one layer of a transformers model"}
"""Its rows on the page of the design."""


def test_a_layer_on_a_gpu_repeats_the_one_before() -> None:
    """One test, since the process that walks there takes a minute."""
    pytest.importorskip("triton")
    line = re.compile(r"gpu (\w+) layer (\S+): (\d+) moves, (\d+) files, (\d+) calls")
    walks = {(host, method): tuple(map(int, each)) for host, method, *each in line.findall(gpu_path("rowmax", "bfla"))}
    assert {(host, method) for host in ON_A_GPU for method in ("rowmax", "bfla")} == set(walks)
    for (host, method), found in walks.items():
        assert all(n <= most for n, most in zip(found, ON_A_GPU[host], strict=True)), (host, method, found)
    told = {host: tuple(map(int, row_of("| Path on a GPU |", row)[:3])) for host, row in REPEATED.items()}
    assert told == {host: walks[host, "rowmax"] for host in ON_A_GPU}


COUNTED = ("`pipeline(q, k, v)`", "one layer of a transformers model", "one layer in a step of vLLM")
NEAR = 4
"""Moves by which the page may be off: a few come and go with what Python has cached."""


@pytest.mark.parametrize(("row", "count"), zip(COUNTED, (pipeline_moves, layer_moves, vllm_moves), strict=True))
def test_the_page_of_the_design_has_these_counts(row: str, count: Any) -> None:
    methods, figures = row_of("| Moves |", "Moves"), row_of("| Moves |", row)
    found = {name: len(count(name).moves) for name in methods}
    told = {name: int(cell) for name, cell in zip(methods, figures, strict=True)}
    assert {} == {name: (told[name], n) for name, n in found.items() if abs(told[name] - n) > NEAR}
