"""How the command line starts: what it imports before it knows what is asked, by which doors, and the completion."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sparseprefill.adapters.cli.commands import app
from typer.main import get_command

import sparseprefill as sp

HEAVY = ("torch", "numpy", "transformers", "triton", "matplotlib", "jinja2", "pydantic", "rich")
SCRIPT = """
import sys
from sparseprefill.adapters.cli.app import main
sys.argv = ["sparseprefill", *{arguments!r}]
try:
    main()
finally:
    print("imported:", *sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)
"""
COMMANDS = sorted(get_command(app).list_commands(None))  # type: ignore[attr-defined]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), (), *((name, "--help") for name in COMMANDS)], ids=" ".join
)
def test_help_and_version_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    done = run("-c", SCRIPT.format(arguments=arguments, heavy=HEAVY))
    assert (done.returncode, done.stderr) == (0, "imported:\n")
    assert done.stdout


def test_a_command_imports_them() -> None:
    """Else the test above would look at names that are never there."""
    done = run("-c", SCRIPT.format(arguments=("methods",), heavy=HEAVY))
    assert {"torch", "rich"} <= set(done.stderr.split())


@pytest.mark.parametrize("module", ["sparseprefill", "sparseprefill.adapters.cli"])
def test_python_m(module: str) -> None:
    done = run("-m", module, "--version")
    assert (0, f"{sp.__version__}\n", "") == (done.returncode, done.stdout, done.stderr)
    done = run("-m", module, "shwo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no command 'shwo'; did you mean 'show'?")


def test_completion() -> None:
    """What a shell gets when somebody presses the tabulator behind `sparseprefill cal`."""
    script = "from sparseprefill.adapters.cli.app import main; import sys; sys.argv[0] = 'sparseprefill'; main()"
    words = {"_SPARSEPREFILL_COMPLETE": "complete_bash", "COMP_WORDS": "sparseprefill cal", "COMP_CWORD": "1"}
    done = run("-c", script, **words)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["calibrate"], "")
    words |= {"COMP_WORDS": "sparseprefill calibrate --kv", "COMP_CWORD": "2"}
    assert run("-c", script, **words).stdout.split() == ["--kv-heads"]
