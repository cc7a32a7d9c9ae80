"""The OpenAI-compatible server, as a user starts it: processes of its own, one completion, metrics, and its end."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
SPARSE = {
    "method": "streaming",
    "gate": False,
    "parameters": {"sink": 32, "window": 64, "block": 32},
    "tail": 0,
    "log_level": "debug",
    "measure": True,
}
PATIENCE = 240.0  # seconds for a server to be ready


class Server:
    """A running server. ask: a JSON answer of a path."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.log, self._root = process, log, f"http://127.0.0.1:{port}"

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.text("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"not ready after {PATIENCE} s: {self.log.read_text()[-4000:]}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = models.save("llama", tmp_path / "llama")
    (tmp_path / "metrics").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "2048", "--enforce-eager", "--attention-backend", "CUSTOM"),
        *("--additional-config", json.dumps({"sparseprefill": SPARSE})),
    ]
    variables = engine.environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "metrics"))
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=out, stderr=subprocess.STDOUT)
    try:
        started = Server(process, port, log)
        started.wait()
        yield started
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its children, which a kill would leave behind
            process.wait(60)


def test_a_completion_with_the_plugin_on(server: Server) -> None:
    body = {"model": "tiny", "prompt": models.prompt(600), "max_tokens": 4, "temperature": 0}
    answer = json.loads(server.text("/v1/completions", body))
    assert 4 == answer["usage"]["completion_tokens"]
    metrics = server.text("/metrics")
    assert re.search(r'sparseprefill:prefill_calls_total\{mode="sparse"\} 3\.0', metrics)
    assert re.search(r'sparseprefill:pairs_total\{kind="computed"\} \d', metrics)
    assert re.search(r'sparseprefill:recall_count\{layers="2"\} 4\.0', metrics), "the heads of the first prefill"
    log = server.log.read_text()
    assert "sparseprefill: streaming for prefill chunks of 128 tokens and more of LlamaForCausalLM" in log
    assert re.search(r"layer +2 +sparse +1 calls  1 x 600 queries, 600 keys  density 0\.\d+", log)
    family = children(server.process.pid)
    assert family
    server.process.terminate()
    assert 0 == server.process.wait(60)
    end = time.monotonic() + 20
    while any(map(alive, family)) and time.monotonic() < end:
        time.sleep(0.2)
    assert [] == [pid for pid in family if alive(pid)]


def children(parent: int) -> list[int]:
    """Process ids below a process."""
    found: list[int] = []
    for entry in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, entry.read_text().split()):
            found += [pid, *children(pid)]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
