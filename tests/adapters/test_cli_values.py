"""What options take, on every command: a wrong number, device or file is a sentence with option, value and remedy."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.group import CommandError, write
from sparseprefill.adapters.cli.setup import Place
from typer.testing import CliRunner, Result

from .test_cli import refused

SMALL = ("--tokens", "256", "--count", "1", "--method", "streaming", "--device", "cpu", "--threads", "1")
RUNS = {
    "compare": ("compare",),
    "demo": ("demo",),
    "fit": ("fit",),
    "calibrate": ("calibrate",),
    "evaluate": ("evaluate", "--method", "streaming"),
    "anchors": ("anchors",),
    "cluster": ("cluster",),
}
"""Commands that run something on a device."""


def invoke(*given: str) -> Result:
    return CliRunner().invoke(app, given)


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("option", ["--tokens", "--threads"])
@pytest.mark.parametrize("value", ["1k", "1.5", "1e3", "10_0x"])
def test_what_is_no_whole_number(command: str, option: str, value: str) -> None:
    result = invoke(*RUNS[command], option, value)
    refused(result, f"error: {option} {value}: pass a whole number", status=2)
    assert "Input should" not in result.stderr


@pytest.mark.parametrize("given", [
    ("compare", "--prompts"), ("compare", "--config"), ("compare", "--profile"), ("compare", "--html"),
    ("compare", "--picture"), ("demo", "--picture"), ("fit", "--prompts"), ("fit", "--output"),
    ("calibrate", "--output"), ("evaluate", "--output"), ("anchors", "--output"), ("cluster", "--output"),
    ("new", "mine", "--output"), ("try", "a-model", "--output"), ("replay", "http://127.0.0.1:1", "--record"),
    ("vllm-check", "{}", "--model"), ("vllm-check", "--model", "a-model"),
], ids=" ".join)  # fmt: skip
def test_no_name_is_no_file(given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be the working directory, and a file in it be read, or written."""
    (tmp_path / "a.txt").write_text("a prompt")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = invoke(*given, "")
    assert result.exit_code == 1
    assert "'': " in result.stderr
    assert {"a.txt", "config.json"} == {one.name for one in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("compare", "--tail", "-3"), "--tail -3: pass 0 or more"),
        (("fit", "--agreement", "2"), "--agreement 2: pass 1.0 or less"),
        (("fit", "--kl", "small"), "--kl small: pass a number"),
        (("calibrate", "--dtype", "float8"), "--dtype float8: pass one of 'auto', 'float32', 'bfloat16', 'float16'"),
        (("vllm-report", "http://x", "--timeout", "soon"), "--timeout soon: pass a number"),
    ],
)
def test_a_value_out_of_place(given: tuple[str, ...], expected: str) -> None:
    refused(invoke(*given), f"error: {expected}", status=2)


@pytest.mark.parametrize(
    "given",
    [
        ("fit", "--minutes", "inf"),
        ("fit", "--kl", "inf"),
        ("vllm-report", "http://x", "--timeout", "inf"),
        ("sglang-report", "http://x", "--timeout", "inf"),
    ],
)
def test_no_bound_is_infinite(given: tuple[str, ...]) -> None:
    refused(invoke(*given), f"error: {given[-2]} inf: pass a finite number")


@pytest.mark.parametrize("command", RUNS)
def test_more_threads_than_a_machine_can_have(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries below PyTorch end the process where they cannot start so many."""
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    refused(
        invoke(*RUNS[command], "--threads", "100000"), "--threads 100000: this machine has 12 cores; pass 48 or less"
    )


@pytest.mark.parametrize(("cores", "most"), [(1, 16), (None, 16), (64, 256)])
def test_how_many_threads_a_machine_may_have(cores: int | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert most == Place.of("cpu", "auto", most).threads
    with pytest.raises(CommandError, match=f"pass {most} or less"):
        Place.of("cpu", "auto", most + 1)


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("device", ["meta", "hpu", "nothing"])
def test_a_device_that_holds_no_values(command: str, device: str) -> None:
    refused(invoke(*RUNS[command], "--device", device), f"--device {device}: ", "pass cpu, or cuda where PyTorch sees")


def full(patch: pytest.MonkeyPatch) -> None:
    """No file holds anything from now on."""

    def refuse(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(Path, "write_bytes", refuse)


FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "page": ("--html", ("compare", *SMALL)),
    "picture": ("--picture", ("compare", *SMALL)),
    "table": ("--output", ("calibrate", "--tokens", "64", "--chunk", "0", "--method", "streaming", "--device", "cpu")),
}


@pytest.mark.usefixtures("_one_tokenizer")
@pytest.mark.parametrize("what", FILES)
def test_a_full_disk_is_said_in_one_line_and_spares_the_old_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option, given = FILES[what]
    path = tmp_path / "one.png"
    path.write_text("old", encoding="utf-8")
    full(monkeypatch)
    result = invoke(*given, option, str(path))
    assert 1 == result.exit_code, result.output
    assert isinstance(result.exception, SystemExit)
    *_, last = result.stderr.splitlines()
    remedy = "No space left on device; free space, or name a path on another disk"
    assert f"error: {option} {path}: {remedy}" == last
    assert "old" == path.read_text(encoding="utf-8")
    assert [path] == [*tmp_path.iterdir()]


def test_a_file_is_replaced_whole_and_a_link_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "one", tmp_path / "link"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    link.symlink_to(path)
    write("--output", link, "new")
    assert ("new", 0o640, True) == (path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777, link.is_symlink())
    assert {path, link} == {*tmp_path.iterdir()}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_standard_output() -> None:
    script = "from sparseprefill.adapters.cli.commands import app; app()"
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "timeout": 120}
    command = [sys.executable, "-c", script, "methods", "--json"]
    with open("/dev/full", "w", encoding="utf-8") as stream:
        done = subprocess.run(command, stdout=stream, check=False, **options)
    said = "error: standard output: No space left on device; free space, or send it elsewhere\n"
    assert (1, said) == (done.returncode, done.stderr)


def test_standard_output_that_is_closed_or_lacks_letters(tmp_path: Path) -> None:
    script = "import sys; from sparseprefill.adapters.cli.commands import app; app()"
    closed = [sys.executable, "-c", f"import sys; sys.stdout = None; {script}", "methods"]
    done = subprocess.run(closed, check=False, capture_output=True, timeout=120)
    assert (0, b"") == (done.returncode, done.stderr)
    command = [sys.executable, "-c", script, "new", "mine", "--output", "図"]
    done = subprocess.run(
        command, check=False, capture_output=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert (0, b"") == (done.returncode, done.stderr)
    assert rb"written: \u56f3" in done.stdout


def test_paths_and_code_to_paste_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"profile: {'a-long-folder/' * 12}p.json"
    render.line(text, whole=True)
    assert capsys.readouterr().out == f"{text}\n"
