"""Starts engines in processes of their own. Tests that use this need vLLM and are skipped without it."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `tox -e vllm` runs this"
)
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else a C++ compiler is needed wherever log probabilities are asked for
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # One thread: several would spin while they wait, and take the cores from everything else.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

PATIENCE = 900.0  # seconds; a machine may be busy


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process, which finds tests/ on its path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TRITON_"))}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), inherited.get("PYTHONPATH")]))
    return {**inherited, **ENVIRONMENT, "PYTHONPATH": path, **more}


def run(jobs: list[dict[str, Any]], folder: Path, *flags: str, **more: str) -> list[dict[str, Any]]:
    """The answers of `engine_process` to the jobs, run one after the other in one process; more: environment."""
    asked, answered, log = folder / "jobs.json", folder / "answers.json", folder / "log.txt"
    asked.write_text(json.dumps(jobs))
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "adapters.vllm.engine_process", str(asked), str(answered), *flags],
            cwd=folder,
            env=environment(**more),
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    answers: list[dict[str, Any]] = json.loads(answered.read_text())
    return answers


class Commands:
    """Commands of `lab.vllm`, one after the other in a process that the first of them starts; see `lab_process`.

    folder: holds what the process prints.
    """

    def __init__(self, folder: Path) -> None:
        self._log, self._folder = folder / "log.txt", folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        if self._process is None or self._process.poll() is not None:
            with self._log.open("w") as out:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "adapters.vllm.lab_process"],
                    cwd=self._folder,
                    env=environment(VLLM_CPU_KVCACHE_SPACE="1"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=out,
                    text=True,
                )
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answered is not None
        asked.write(json.dumps(arguments) + "\n")
        asked.flush()
        ready, _, _ = select.select([answered], [], [], PATIENCE)
        line = answered.readline() if ready else ""
        if not line:
            self._process.kill()
        assert line, self._log.read_text()[-4000:]
        status, said = json.loads(line)
        return status, said

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=PATIENCE)


def tokens(answer: dict[str, Any], turn: int = 0) -> list[list[int]]:
    """What one round of prompts was answered."""
    assert "error" not in answer, answer["error"]
    return [one["tokens"] for one in answer["rounds"][turn]]
