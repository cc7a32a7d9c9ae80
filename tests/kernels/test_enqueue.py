"""Launches like one before are the launches that Triton makes itself, and where they fail Triton makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.device import DEVICE
from sparseprefill.kernels import launch as module
from sparseprefill.kernels.lists.order import draws_kernel

SCRIPT = Path(__file__).with_name("enqueued.py")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_driver_gets_what_triton_gives_it(seed: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", str(SCRIPT), str(seed)]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("remembered") > 15
    assert found == {
        **{"compared": 150, "unlike": [], "failed": [], "beyond the most": 1, "compiled for debugging": 1},
        "the device's error": ["Triton Error [CUDA]: out of memory", 0, 0],
        "the caller's error": ["no CUDA tensor", 0, 0],
        **{"launched": 2, "error": "another interface", "frames": False},
    }
    assert "each goes Triton's own way instead: another interface" in done.stderr


def test_a_launch_fills_what_it_is_given_however_often() -> None:
    for count in (5, 64, 5):
        keys, order = torch.arange(count, dtype=torch.int32), torch.empty(1 + 2 * count, dtype=torch.int32)
        given = keys.to(DEVICE), None, None, order.to(DEVICE), count, 0, 1, 0, count, 1
        for _ in range(3):
            given[3].zero_()
            module.enqueue(draws_kernel, (1,), *given, BLOCK=64, AT_ONCE=256, num_warps=4, enable_fp_fusion=True)
            assert given[3].tolist()[1::2] == list(reversed(range(count)))
    assert not module.FAILED


@pytest.mark.gpu
def test_on_a_gpu_launches_are_remembered() -> None:
    keys, order = (torch.zeros(count, dtype=torch.int32, device=DEVICE) for count in (64, 129))
    module._KNOWN.pop(id(draws_kernel), None)
    for _ in range(2):
        module.enqueue(
            draws_kernel, (1,), keys, None, None, order, 64, 0, 1, 0, 9, 1, BLOCK=64, AT_ONCE=256, num_warps=4
        )
    _, known = module._KNOWN[id(draws_kernel)]
    assert len(known) == 1
    assert not module.FAILED
