"""What `import sparseprefill` and listing the methods pull in."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sparseprefill as sp

HEAVY = ("transformers", "triton", "matplotlib", "hypothesis", "rich", "typer", "vllm", "sglang")
STEPS = (
    "import sparseprefill as sp",
    "assert 'dense' in sp.methods(); sp.default_registry().plugins()",
    "[m.configure({}) for m in sp.default_registry().methods().values()]",
)
SCRIPT = """
import sys
for step in {steps!r}:
    exec(step)
    found = sorted(set(sys.modules) & set({heavy!r}))
    if found:
        sys.exit(f"{{step}} imports {{found}}")
"""


def test_nothing_heavy_is_imported() -> None:
    command = [sys.executable, "-c", SCRIPT.format(steps=STEPS, heavy=HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


def run(script: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_face_is_sorted_and_complete() -> None:
    assert sorted(sp.__all__) == sp.__all__
    assert [] == [name for name in sp.__all__ if not hasattr(sp, name)]
    assert set(sp.__all__) <= set(dir(sp))


def test_face_at_work_is_the_face_that_checkers_see() -> None:
    """The table from which names are fetched, against the imports that are there for type checkers."""
    tree = ast.parse(Path(sp.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        alias.name: (node.module or "").removeprefix("sparseprefill.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparseprefill.")
        for alias in node.names
    }
    assert {name: file for name, file in seen.items() if name in sp.__all__} == sp._HOMES
    assert set(sp.__all__) - {"build", "methods"} == set(sp._HOMES)


def test_the_face_alone_imports_no_torch() -> None:
    script = "import sys, sparseprefill as sp; print(sp.__version__, 'torch' in sys.modules, 'attrs' in sys.modules)"
    assert (0, f"{sp.__version__} False False\n", "") == run(script)
    assert (0, "True\n", "") == run("import sys; from sparseprefill import Plan; print('torch' in sys.modules)")


def test_core_imports_no_plugin_until_one_is_asked_for() -> None:
    script = (
        "import sys, sparseprefill as sp; sp.Pipeline, sp.Registry(), sp.from_config; "
        "found = [name for name in sys.modules if name.startswith('sparseprefill.plugins')]; "
        "print(found, sp.ValueWeights.__module__)"
    )
    assert (0, "[] sparseprefill.plugins.stem.values\n", "") == run(script)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sparseprefill' has no attribute 'Piplan'"):
        _ = sp.Piplan  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="cannot import name 'Piplan'"):
        exec("from sparseprefill import Piplan")
    assert not hasattr(sp, "_nothing")
    assert not hasattr(sp, "not an identifier")


def test_modules_are_there_without_an_import_of_their_own() -> None:
    script = "import sparseprefill as sp; print(sp.errors.MaskError.__name__, sp.mask.__name__)"
    assert (0, "MaskError sparseprefill.mask\n", "") == run(script)


def test_a_module_that_cannot_be_imported_says_why() -> None:
    code, _, error = run("import sys; sys.modules['torch'] = None; import sparseprefill as sp; sp.call")
    assert code == 1
    assert "ModuleNotFoundError: import of torch halted" in error


@pytest.mark.parametrize(
    "first", ["import sparseprefill as sp", "import sparseprefill.call; import sparseprefill as sp"]
)
def test_without_numpy_nothing_is_warned_of(first: str) -> None:
    """torch does so when it is imported; nothing here needs numpy."""
    script = "import sys; sys.modules['numpy'] = None; {}; print(sp.SparseMask.__name__)"
    assert (0, "SparseMask\n", "") == run(script.format(first))


def test_without_numpy_torch_alone_warns() -> None:
    assert "Failed to initialize NumPy" in run("import sys; sys.modules['numpy'] = None; import torch")[2]
