"""What a process of the command line sets up: its device, its groups and its model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch._C._distributed_c10d import HashStore

from sparseprefill.errors import ParameterError


@frozen
class Place:
    """Where this process computes. group: its Star group (None: all). tensor: its mesh for tensor parallelism."""

    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup | None = None
    tensor: Any = None

    @property
    def speaks(self) -> bool:
        """Whether this is the process that prints."""
        return dist.get_rank() == 0


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
def started(device: str, dtype: str, timeout: float, tensor_parallel: int = 1) -> Iterator[Place]:
    """torch.distributed, as torchrun's environment says, or one process alone; ended behind the block."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda"):
        raise ParameterError(f"device is {device!r}: pass cpu, cuda or auto; torchrun's LOCAL_RANK picks the GPU")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device is 'cuda': PyTorch sees no GPU; pass cpu or auto")
    here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    where: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    connect(here, timeout, **where)
    chosen = ("bfloat16" if kind == "cuda" else "float32") if dtype == "auto" else dtype
    group, mesh = _groups(kind, tensor_parallel)
    yield Place(here, getattr(torch, chosen), group, mesh)
    dist.destroy_process_group()  # not after an error: it would wait for collectives that others never join


def _groups(kind: str, tensor_parallel: int) -> tuple[dist.ProcessGroup | None, Any]:
    """Ranks in rows of `tensor_parallel` neighbours, which share one copy of the weights; columns are Star groups."""
    if tensor_parallel == 1:
        return None, None
    size = dist.get_world_size()
    if tensor_parallel < 1 or size % tensor_parallel:
        raise ParameterError(f"tensor_parallel is {tensor_parallel}: pass a divisor of the {size} processes")
    names = ("star", "tensor")
    mesh = dist.device_mesh.init_device_mesh(kind, (size // tensor_parallel, tensor_parallel), mesh_dim_names=names)
    return mesh["star"].get_group(), mesh["tensor"]


def load(path: str, place: Place) -> tuple[Any, Any]:
    """A causal language model of transformers and its tokenizer, on this process's device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=place.dtype)
    if place.tensor is not None:
        from .tensor import shard

        shard(model, place.tensor)
    return model.to(place.device).eval(), AutoTokenizer.from_pretrained(path)
