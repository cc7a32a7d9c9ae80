"""`sparseprefill new`: the package that it writes works, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sparseprefill.adapters.cli.commands import app
from typer.testing import CliRunner, Result

from .test_cli import refused

PIP = ("pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new", *arguments])


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files(folder: Path) -> dict[str, str]:
    left_out = {"__pycache__", "build"}
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not left_out & set(path.parts) and ".egg-info" not in str(path)
    }


@pytest.mark.thorough
def test_the_package_installs_and_passes_its_own_test() -> None:
    """In each run, tests/docs/test_third_party.py installs what it writes for the examples of docs/."""
    result = invoke("second-2-best")
    assert result.exit_code == 0, result.output
    assert "next: pytest sparseprefill-second-2-best" in result.stdout.splitlines()
    here = Path.cwd()
    assert [path.name for path in here.iterdir()] == ["sparseprefill-second-2-best"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here / "site"), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-m", *arguments], cwd=here, env=environment, capture_output=True, text=True, check=False
        )

    done = run(*PIP, "--target", "site", "./sparseprefill-second-2-best")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("pytest", "-q", "-p", "no:cacheprovider", "sparseprefill-second-2-best")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    done = run("sparseprefill", "show", "second-2-best")
    assert done.returncode == 0, done.stderr
    assert "Second2BestEstimator" in done.stdout
    done = run("sparseprefill", "new", "second-2-best", "--output", "again")
    assert done.returncode == 1
    assert "is installed already, from plugin 'second-2-best' of sparseprefill-second-2-best 0.1.0" in done.stderr


@pytest.mark.parametrize(("name", "options"), [("last-block", ()), ("first-layers", ("--refiner",))])
def test_the_examples_of_the_documentation_are_what_it_writes(name: str, options: tuple[str, ...]) -> None:
    assert invoke(name, "--output", "made", *options).exit_code == 0
    assert files(EXAMPLES / f"sparseprefill-{name}") == files(Path("made"))


@pytest.mark.parametrize(
    ("name", "options", "made"),
    [
        ("none", ("--refiner",), "MyNone"),
        ("sparse-mask", ("--refiner",), "MySparseMask"),
        ("class-var", ("--refiner",), "MyClassVar"),
        ("pattern", (), "MyPatternEstimator"),
        ("nothing", ("--refiner",), "Nothing"),
    ],
)
def test_classes_have_names_that_neither_python_nor_this_library_has(
    name: str, options: tuple[str, ...], made: str
) -> None:
    assert invoke(name, "--output", "made", *options).exit_code == 0
    text = "".join(path.read_text(encoding="utf-8") for path in Path("made").rglob("*.py"))
    assert f"class {made}:" in text


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("MyMethod", "such as my-method"),
        ("my_method", "such as my-method"),
        ("my method", "such as my-method"),
        ("topK", "such as top-k"),
        ("sparseprefill-topk", "such as topk"),
        ("2d", "such as my-method"),
        ("a--b", "such as a-b"),
        ("-", "such as my-method"),
        ("über", "such as ber"),
        ("../topk", "such as topk"),
        ("", "such as my-method"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, remedy: str) -> None:
    refused(invoke("--", name), repr(name), "lower-case words joined by hyphens", remedy)
    assert list(Path.cwd().iterdir()) == []


def test_a_name_that_is_taken_is_refused() -> None:
    refused(invoke("bfla"), "a method 'bfla' is installed already, from plugin 'bfla' of sparseprefill")
    refused(invoke("dense"), "a method 'dense' is installed already, from plugin 'classic' of sparseprefill")
    refused(invoke("classic"), "'classic' is installed already")  # two plugins may not have one name either
    assert list(Path.cwd().iterdir()) == []


def test_a_folder_that_is_there_is_left_alone() -> None:
    Path("sparseprefill-mine").mkdir()
    refused(invoke("mine"), "sparseprefill-mine exists; pass another name, or another folder with --output")
    Path("dangling").symlink_to("nowhere")
    refused(invoke("mine", "--output", "dangling"), "dangling exists")
    assert list(Path("sparseprefill-mine").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    refused(invoke("mine", "-o", "none/mine"), "--output none/mine: there is no folder", "make it with mkdir -p")
    long = "x" * 300
    refused(invoke("mine", "--output", long), "File name too long; pass a folder that can be made")
    assert list(Path.cwd().iterdir()) == []


def test_a_package_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    refused(invoke("mine"), "sparseprefill-mine: No space left on device; pass a folder that can be made")
    assert list(Path.cwd().iterdir()) == []
