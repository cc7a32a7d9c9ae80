"""Starts engines in processes of their own. Tests that use this need SGLang and are skipped without it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed; `tox -e sglang` runs this"
)
PATIENCE = 900.0  # seconds; a machine may be busy
STUBS = Path(__file__).parent / "stubs"
USUAL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "decode_attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "max_total_tokens": 16384,
    "random_seed": 0,
}
"""Of every engine here. Left to itself, SGLang takes 2048 requests and most of the memory."""


def environment(table: object = None) -> dict[str, str]:
    """The environment of an engine's processes. table: options of the backend; None for no such variable."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "TRITON_"))}
    path = os.pathsep.join(filter(None, [str(STUBS), str(Path(__file__).parents[2]), inherited.get("PYTHONPATH")]))
    # One thread: several would spin while they wait, and take the cores from everything else.
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if table is not None:
        more["SPARSEPREFILL_SGLANG"] = table if isinstance(table, str) else json.dumps(table)
    return {**inherited, **more}


@contextmanager
def running(jobs: dict[str, dict[str, Any]], folder: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The answer of `engine_process` to a job by its name: `model`, `engine` (arguments), `table`, `turns`,
    `environment`. Where SGLang fails it ends the job's process, so the answer is ``{"failed": its log}`` then.
    """
    variables = {}
    for name, job in jobs.items():
        (folder / f"{name}.job.json").write_text(json.dumps(job))
        table = {"SPARSEPREFILL_SGLANG": json.dumps(job["table"])} if "table" in job else {}
        variables[name] = {**table, **job.get("environment", {})}
    asked, log = folder / "jobs.json", folder / "log.txt"
    asked.write_text(json.dumps(variables))
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "adapters.sglang.engine_process", str(asked)],
            cwd=folder,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def answer(name: str) -> dict[str, Any]:
        until, done = time.monotonic() + PATIENCE, folder / f"{name}.done"
        while not done.exists():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, f"{name} runs for longer than {PATIENCE} s"
            time.sleep(0.1)
        said, answered = (folder / f"{name}.{kind}" for kind in ("log.txt", "answer.json"))
        found = json.loads(answered.read_text()) if answered.exists() else {"failed": said.read_text()}
        return {**found, "log": said.read_text()}

    try:
        yield answer
    finally:
        process.terminate()
        process.wait(PATIENCE)


def end(process: subprocess.Popen[Any]) -> None:
    """Stop a process and what it started, which share its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(PATIENCE)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens of the models in `adapters.vllm.models`."""
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(2, 256) for _ in range(length)]
