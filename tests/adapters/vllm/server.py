"""OpenAI-compatible servers of vLLM in processes of their own, as a user starts them. Not a test module."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from . import engine
from .engine import PATIENCE


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.log, self.url = process, log, f"http://127.0.0.1:{port}"

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
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

    def says(self, pattern: str) -> None:
        """Wait until the log holds it: lines of a second come when the machine has time for them."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, self.log.read_text()):
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def started(model: Path, log: Path, *flags: str, **more: str) -> Iterator[Server]:
    """A server of a model, which may not answer yet; it ends with the block. log: of its output. more: environment."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "2048", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), *flags),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=log.parent, env=engine.environment(**more), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its children, which a kill would leave behind
            process.wait(PATIENCE)
