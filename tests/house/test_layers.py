"""The layers, read from the imports of every file: core <- plugins, core <- adapters, and nothing sideways.

What stays in the repository, `tests/lab`, stands on them; nothing shipped imports it.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {"core": ROOT / "core" / "sparseprefill", "plugins": ROOT / "plugins", "adapters": ROOT / "adapters"}
FACE = "sparseprefill"
PREFIX = {"core": "sparseprefill", "plugins": "sparseprefill.plugins", "adapters": "sparseprefill.adapters"}


def module_name(layer: str, path: Path) -> str:
    parts = path.relative_to(PLACES[layer]).with_suffix("").parts
    return ".".join([PREFIX[layer], *(part for part in parts if part != "__init__")])


def imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            target = ".".join(part for part in (base, node.module) if part)
            yield target
            yield from (f"{target}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offences(layer: str, module: str, names: Iterator[str]) -> list[str]:
    bad = []
    for name in names:
        # The face names what plugins of ours define, for type checkers: a test holds that it imports none of them.
        to_plugins = within(name, PREFIX["plugins"]) and module != FACE
        upward = layer == "core" and (to_plugins or within(name, PREFIX["adapters"]))
        to_plugin = layer == "adapters" and within(name, PREFIX["plugins"])
        sideways = layer == "plugins" and (
            within(name, PREFIX["adapters"])
            or (within(name, PREFIX["plugins"]) and not within(name, ".".join(module.split(".")[:3])))
        )
        if upward or to_plugin or sideways or within(name, "lab"):
            bad.append(name)
    return bad


def files(layer: str) -> Iterator[tuple[str, Path]]:
    """Each file of a layer, with the name of its module."""
    for path in sorted(PLACES[layer].rglob("*.py")):
        yield module_name(layer, path), path


def names_of(module: str, path: Path) -> Iterator[str]:
    return imported(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


@pytest.mark.parametrize("layer", PLACES)
def test_imports_respect_the_layers(layer: str) -> None:
    found = {module: offences(layer, module, names_of(module, path)) for module, path in files(layer)}
    assert {} == {module: bad for module, bad in found.items() if bad}


@pytest.mark.parametrize("layer", PLACES)
def test_modules_import_from_the_file_that_defines_a_name(layer: str) -> None:
    """The face is for users; inside, an import through it would make loops."""
    modules = {file.stem for file in PLACES["core"].iterdir()} | {"plugins", "adapters", "__version__"}
    from_face = [
        (module, alias.name)
        for module, path in files(layer)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "sparseprefill" and node.level == 0
        for alias in node.names
        if alias.name not in modules and module != FACE
    ]
    assert [] == from_face


SERVERS = ("vllm", "sglang")


def test_what_servers_share_imports_none() -> None:
    theirs = (*SERVERS, *(f"{PREFIX['adapters']}.{server}" for server in SERVERS))
    shared = [(module, path) for module, path in files("adapters") if within(module, f"{PREFIX['adapters']}.serving")]
    assert shared
    names = [(module, name) for module, path in shared for name in names_of(module, path)]
    assert [] == [one for one in names if any(within(one[1], server) for server in theirs)]


@pytest.mark.parametrize(
    ("layer", "module", "source", "bad"),
    [
        ("core", "sparseprefill.method", "from sparseprefill.plugins import classic", True),
        ("core", "sparseprefill.method", "def f():\n    import sparseprefill.adapters.cli", True),
        ("core", "sparseprefill.method", "from . import adapters", True),
        ("core", "sparseprefill", "from sparseprefill.plugins.stem.values import ValueWeights", False),
        ("core", "sparseprefill", "from sparseprefill.adapters import session", True),
        ("core", "sparseprefill.executors.auto", "from ..method import Method", False),
        ("adapters", "sparseprefill.adapters.cli.app", "from sparseprefill import plugins", True),
        ("adapters", "sparseprefill.adapters.cli.app", "from ..session import Session", False),
        ("adapters", "sparseprefill.adapters.cli.app", "from lab.peers import app", True),
        ("plugins", "sparseprefill.plugins.classic.stages", "from .config import X", False),
        ("plugins", "sparseprefill.plugins.classic.stages", "from ..anchor_attention import regions", True),
        ("plugins", "sparseprefill.plugins.classic.stages", "from sparseprefill.adapters import session", True),
    ],
)
def test_the_rule_itself(layer: str, module: str, source: str, bad: bool) -> None:
    assert bad == bool(offences(layer, module, imported(source, module, False)))
