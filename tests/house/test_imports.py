"""What `import sparseprefill` and listing the methods pull in."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import subprocess
import sys

HEAVY = ("transformers", "triton", "matplotlib", "hypothesis", "rich", "typer", "vllm")
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


def test_face_is_sorted_and_complete() -> None:
    import sparseprefill as sp

    assert sorted(sp.__all__) == sp.__all__
    assert [] == [name for name in sp.__all__ if not hasattr(sp, name)]
