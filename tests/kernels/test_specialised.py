"""No request waits for a kernel that the engine's start could have compiled, nor a prompt for one of its own length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparseprefill import default_registry

SCRIPT = Path(__file__).with_name("specialised.py")
SOON = ("rowmax",)
"""Of the plain suite; the methods as they are take a minute together."""


def found_of(*methods: str) -> dict[str, dict[str, object]]:
    """What `specialised` says of methods, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", str(SCRIPT), *methods]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(*methods: str) -> None:
    pytest.importorskip("triton.experimental.gluon")
    assert {name: {"served": {}, "lengths": []} for name in methods} == found_of(*methods)


def test_nothing_is_compiled_late() -> None:
    check(*SOON)


@pytest.mark.thorough
def test_nothing_is_compiled_late_by_any_method() -> None:
    check(*default_registry().methods())
