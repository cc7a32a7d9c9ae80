"""The layers, read from the imports of every file: core <- plugins, core <- adapters, and nothing sideways.

What stays in the repository, `tests/lab`, stands on them; nothing shipped imports it.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {"core": ROOT / "core" / "sparseprefill", "plugins": ROOT / "plugins", "adapters": ROOT / "adapters"}
FACE = "sparseprefill"
PREFIX = {"core": "sparseprefill", "plugins": "sparseprefill.plugins", "adapters": "sparseprefill.adapters"}


def module_name(layer: str, path: Path) -> str:
    parts = path.relative_to(PLACES[layer]).with_suffix("").parts
    return ".".join([PREFIX[layer], *(part for part in parts if part != "__init__")])


BY_STRING = frozenset({"__import__", "import_module", "find_spec"})
"""Functions that import what a string names, or look for it. None of this: entry points, those of a method (`Later`)
among them, by which a package says what is in it."""


def imported(source: str, module: str, is_package: bool, known: Container[str] = ()) -> Iterator[str]:
    """Absolute names of all modules that a file imports, at any depth of its code, those by a string included.

    known: names of modules. ``from a import b`` names a.b where that is one of them, else a; both where none are given.
    """
    package = module if is_package else module.rpartition(".")[0]
    yield from (name for name in by_string(source, module, package) if name is not None)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            target = ".".join(part for part in (base, node.module) if part)
            names = [f"{target}.{alias.name}" for alias in node.names]
            yield from (name if name in known else target for name in names) if known else (target, *names)


def by_string(source: str, module: str, package: str) -> Iterator[str | None]:
    """What a file imports by a string: absolute names, and None for each that only shows when the code runs."""
    tree = ast.parse(source)
    words: dict[str, str | None] = {"__name__": module, "__package__": package}
    for said in tree.body:
        if isinstance(said, ast.Assign) and isinstance(said.targets[0], ast.Name):
            words[said.targets[0].id] = _text(said.value, words)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in BY_STRING:
            continue
        given = [*node.args[:1], *(one.value for one in node.keywords if one.arg in ("name", "module"))]
        name = _text(given[0], words) if given else None
        yield resolve_name(name, package) if name is not None and name.startswith(".") else name


def _text(node: ast.expr, words: dict[str, str | None]) -> str | None:
    """The string that an expression is: a constant, a constant's name, or a sum or f-string of these; else None."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return words.get(name)
        case ast.FormattedValue(value=value):
            return _text(value, words)
        case ast.JoinedStr(values=values):
            parts = [_text(one, words) for one in values]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_text(left, words), _text(right, words)]
        case _:
            return None
    known = [one for one in parts if one is not None]
    return "".join(known) if len(known) == len(parts) else None


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


def test_core_imports_by_a_string_that_nobody_can_read_in_few_places() -> None:
    """The face's table, which a test holds to its imports; what a plugin has imported later; and packages of others."""
    found = {
        module
        for module, path in files("core")
        if None in by_string(path.read_text(encoding="utf-8"), module, module.rpartition(".")[0])
    }
    assert {FACE, "sparseprefill.method", "sparseprefill.profiles.table"} == found


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
        ("core", "sparseprefill.method", "import_module('sparseprefill.adapters.session')", True),
        (
            "core",
            "sparseprefill.method",
            "P = 'sparseprefill.plugins'\nimportlib.import_module(P + '.dense')",
            True,
        ),
        ("core", "sparseprefill.method", "def f():\n    return find_spec(f'{__package__}.adapters')", True),
        ("core", "sparseprefill.method", "__import__(name='sparseprefill.registry')", False),
        ("adapters", "sparseprefill.adapters.cli.app", "import_module('..session', __package__)", False),
        ("plugins", "sparseprefill.plugins.classic.stages", "from .config import X", False),
        ("plugins", "sparseprefill.plugins.classic.stages", "from ..anchor_attention import regions", True),
        ("plugins", "sparseprefill.plugins.classic.stages", "from sparseprefill.adapters import session", True),
    ],
)
def test_the_rule_itself(layer: str, module: str, source: str, bad: bool) -> None:
    assert bad == bool(offences(layer, module, imported(source, module, False)))
