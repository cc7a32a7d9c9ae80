"""The command line: what is installed, and how it fails."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import pytest
from attrs import field, frozen
from sparseprefill.adapters.cli import app as start
from sparseprefill.adapters.cli.commands import app
from typer.main import get_command
from typer.testing import CliRunner, Result

from sparseprefill import Method, MethodCollisionError, Registry, hookimpl
from sparseprefill import registry as registries


def invoke(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), terminal_width=columns)


def refused(result: Result, *words: str, status: int = 1) -> None:
    """One line on standard error, nothing on standard output, no traceback."""
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


@frozen(kw_only=True)
class _Config:
    """width: tokens that a query sees. must: has no default. shape: made anew."""

    must: int
    width: int = 3
    shape: list[int] = field(factory=list)


class _Plugin:
    @hookimpl
    def sparseprefill_methods(self) -> list[Method]:
        return [Method(name="odd", summary="a test", config=_Config, build=lambda config: None)]  # type: ignore[arg-type,return-value]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    fresh = Registry()
    fresh.register(_Plugin(), "mine", "my-distribution", "1.2")
    monkeypatch.setattr(registries, "default_registry", lambda: fresh)
    return fresh


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, version("sparseprefill"))


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    for command in ("demo", "methods", "show", "plugins", "new", "--install-completion"):
        assert command in result.stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_says_each_summary_whole(columns: int) -> None:
    """No summary ends in dots, and no line where the source's does: words go on as far as the terminal does."""
    commands: Any = get_command(app)
    text = _letters(invoke("--help", columns=columns).stdout)
    for name, command in commands.commands.items():
        summary, *paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        assert _letters(f"{name} {summary}") in text
        shown = invoke(name, "--help", columns=columns).stdout
        assert max(map(len, shown.splitlines())) <= columns
        for paragraph in paragraphs:
            lines = _paragraph(shown, paragraph.split()[:2])
            assert _letters("".join(lines)) == _letters(paragraph)
            for line, after in pairwise(lines):  # full lines: the next word would not have fitted
                assert len(f"  {line} {after.split()[0]}") > columns


def _letters(text: str) -> str:
    """The text without its spaces: lines end behind hyphens too."""
    return "".join(text.split())


def _paragraph(text: str, beginning: list[str]) -> list[str]:
    """The lines of the indented paragraph that begins with these words."""
    (found,) = [part for part in text.split("\n\n") if part.split()[:2] == beginning]
    return [line.strip() for line in found.splitlines()]


def test_methods() -> None:
    result = invoke("methods")
    assert result.exit_code == 0
    for name in ("anchor-attention", "streaming", "vertical-slash", "dense"):
        assert name in result.stdout
    rows = json.loads(invoke("methods", "--json").stdout)
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    assert all(set(row) == {"name", "summary", "paper"} for row in rows)


@pytest.mark.parametrize("name", [row["name"] for row in json.loads(invoke("methods", "--json").stdout)])
def test_show_every_method(name: str) -> None:
    assert invoke("show", name).exit_code == 0
    facts = json.loads(invoke("show", name, "--json").stdout)
    assert set(facts) == {"name", "summary", "paper", "grain", "stages", "parameters"}
    assert facts["stages"][0]["role"] == "estimator"
    assert "executor" in [stage["role"] for stage in facts["stages"]]
    for parameter in facts["parameters"]:
        assert set(parameter) == {"name", "type", "default", "bounds", "doc", "required"}
        assert parameter["bounds"], parameter
        assert parameter["doc"], parameter


def test_show_anchor_attention() -> None:
    facts = json.loads(invoke("show", "anchor-attention", "--json").stdout)
    step = next(one for one in facts["parameters"] if one["name"] == "step")
    assert step["default"] == 16
    assert step["bounds"] == "integer >= 1"
    assert step["doc"] == "query blocks per group; the group shares its stripes."
    assert facts["grain"] == 2048
    text = " ".join(invoke("show", "anchor-attention").stdout.split())
    assert "integer >= 1" in text
    assert "AnchorEstimator" in text
    assert "2048 tokens" in text


def test_show_a_method_with_a_required_parameter(registry: Registry) -> None:
    facts = json.loads(invoke("show", "odd", "--json").stdout)
    must, width, shape = facts["parameters"]
    assert (must["required"], must["default"], must["doc"]) == (True, None, "has no default.")
    assert (width["required"], width["default"], width["bounds"]) == (False, 3, "")
    assert shape["default"] == []
    assert facts["stages"] == []
    assert "required" in invoke("show", "odd").stdout


def test_plugins() -> None:
    rows = json.loads(invoke("plugins", "--json").stdout)
    assert all(set(row) == {"name", "distribution", "version", "methods", "error"} for row in rows)
    classic = next(row for row in rows if row["name"] == "classic")
    assert classic["distribution"] == "sparseprefill"
    assert classic["methods"] == ["dense", "streaming", "vertical-slash"]
    assert classic["error"] is None


def test_plugins_shows_what_broke(registry: Registry) -> None:
    class Point:
        name, dist = "broken", None

        def load(self) -> Any:
            raise ImportError("no module named 'gone'")

    registry.load_entry_points([Point()])  # type: ignore[list-item]
    row = next(row for row in json.loads(invoke("plugins", "--json").stdout) if row["name"] == "broken")
    assert row["error"] == "ImportError: no module named 'gone'"
    assert row["methods"] == []
    text = " ".join(invoke("plugins").stdout.split())
    assert "ImportError" in text
    assert "my-distribution" in text


def test_unknown_method_lists_the_nearest() -> None:
    refused(invoke("show", "anchor-atention"), "'anchor-atention'", "did you mean 'anchor-attention'")


def test_an_error_of_the_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def collide() -> Registry:
        raise MethodCollisionError("method 'a' is offered\nby two")

    monkeypatch.setattr(registries, "default_registry", collide)
    for command in ("methods", "plugins"):
        refused(invoke(command), "method 'a' is offered by two")


def test_usage_errors_are_one_line() -> None:
    refused(invoke("shwo"), "there is no command 'shwo'; did you mean 'show'?", status=2)
    refused(invoke("xyzzy"), "there is no command 'xyzzy'. Known: anchors, bench, calibrate, ", status=2)
    refused(invoke("show"), "Missing argument", status=2)
    refused(invoke("methods", "--yaml"), "--yaml", status=2)


def test_missing_extra() -> None:
    """A fresh Python with nothing of it, and then with one part missing at a time."""
    code = f"""
import os, sys
sys.modules.update(dict.fromkeys({start.NEEDED!r}))
from sparseprefill.adapters.cli.app import main
for lacking in {start.NEEDED!r}:
    if not os.fork():
        for name in set({start.NEEDED!r}) - {{lacking}}:
            del sys.modules[name]
        main()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    missing = (*start.NEEDED, ", ".join(start.NEEDED))
    lines = [f'error: the command line needs {name}: pip install "sparseprefill[cli]"' for name in missing]
    assert done.stderr.splitlines() == lines


@pytest.mark.parametrize("command", start.LIGHT)
def test_commands_for_servers_do_without_what_draws(command: str) -> None:
    """vLLM brings the other two."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "jinja2")))
sys.modules.update(dict.fromkeys({{lacking!r}}))
from sparseprefill.adapters.cli.app import main
sys.argv = ["sparseprefill", {command!r}, "--help"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code.format(lacking=())], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert command in done.stdout
    lacking = code.format(lacking=("rich",))
    done = subprocess.run([sys.executable, "-c", lacking], capture_output=True, text=True, check=False)
    assert done.stderr == 'error: the command line needs rich: pip install "sparseprefill[vllm]"\n'
