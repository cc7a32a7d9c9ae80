"""Tensors are made where the caller's are, in a type that is named: torch's defaults belong to the application."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import ast

from house.test_rooms import FILES

ANYWHERE = frozenset(
    [
        "arange",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    ]
)
"""Functions of torch that take the default device where none is named."""
FLOATS = frozenset(
    ["empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros"]
)
"""Of these, those that take the default dtype."""


def _is_of_torch(function: ast.Attribute) -> bool:
    return isinstance(function.value, ast.Name) and function.value.id == "torch"


def unnamed(source: str) -> list[tuple[int, str, str]]:
    """Line, function and what is not named, of each tensor that torch's defaults decide about."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, given = node.func.attr, {one.arg for one in node.keywords}
        if not _is_of_torch(node.func) or None in given:
            continue
        found += [(node.lineno, name, "device")] if name in ANYWHERE and "device" not in given else []
        found += [(node.lineno, name, "dtype")] if name in FLOATS and "dtype" not in given else []
    return sorted(found)


def test_no_default_of_torch_decides() -> None:
    found = {str(path): unnamed(path.read_text(encoding="utf-8")) for _, path in FILES}
    assert {} == {path: some for path, some in found.items() if some}


def test_an_unnamed_default_would_be_found() -> None:
    assert [(1, "zeros", "device"), (1, "zeros", "dtype")] == unnamed("torch.zeros(3)")
    assert [(1, "arange", "device")] == unnamed("torch.arange(3)")
    assert [(1, "full", "dtype")] == unnamed("torch.full((3,), 1.0, device=x.device)")
    assert [] == unnamed("torch.zeros(3, **options)")


def tensors_at_import(source: str) -> list[int]:
    """Lines on which importing a module makes a tensor, in whatever mode the application is then."""
    functions = (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)

    def walk(node: ast.AST) -> list[ast.AST]:
        inner = [] if isinstance(node, functions) else list(ast.iter_child_nodes(node))
        return [node, *(found for one in inner for found in walk(one))]

    made = []
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_of_torch(node.func):
            made += [node.lineno] if node.func.attr in ANYWHERE else []
    return made


def test_no_tensor_is_made_at_import() -> None:
    found = {str(path): tensors_at_import(path.read_text(encoding="utf-8")) for _, path in FILES}
    assert {} == {path: some for path, some in found.items() if some}
    assert [1] == tensors_at_import("x = torch.ones(3)")
    assert [] == tensors_at_import("def f(): return torch.ones(3)")
