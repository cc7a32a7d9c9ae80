"""What a process of torchrun sets up: its device and the group of all processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparseprefill.errors import ParameterError


def connect(device: torch.device, timeout: float, **where: Any) -> None:
    """The default group on a device's backend. where: of `init_process_group`; by default what torchrun has set."""
    wait: dict[str, Any] = {"timeout": timedelta(seconds=2 * timeout + 30)}  # ours comes first, and says more
    if device.type != "cuda":
        dist.init_process_group("gloo", **wait, **where)
        return
    # Otherwise torch's watchdog ends the process as soon as ours aborts a wait, before an error is raised.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **wait, **where)


@contextmanager
def started(device: str, timeout: float) -> Iterator[torch.device]:
    """torch.distributed, as torchrun's environment says, on this process's device; ended behind the block."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device is 'cuda': PyTorch sees no GPU; pass cpu or auto")
    here = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    connect(here, timeout)
    yield here
    dist.destroy_process_group()  # not after an error: it would wait for collectives that others never join
