"""Tensors kept from call to call: one per size and device, usable with and without gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseprefill.mask.geometry import kept

CPU = torch.device("cpu")


def test_one_tensor_per_size() -> None:
    made: list[int] = []

    @kept
    def numbers(size: int, device: torch.device) -> Tensor:
        """Counts."""
        made.append(size)
        return torch.arange(size, device=device)

    assert numbers(3, CPU) is numbers(3, CPU)
    assert numbers(4, CPU).tolist() == [0, 1, 2, 3]
    assert made == [3, 4]
    assert numbers.__doc__ == "Counts."


def test_what_inference_mode_made_serves_training() -> None:
    @kept
    def ones(size: int) -> Tensor:
        return torch.ones(size)

    with torch.inference_mode():
        ones(3)
    x = torch.randn(3, requires_grad=True)
    (x * ones(3)).sum().backward()
    assert x.grad is not None


def test_each_stream_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    @kept
    def ones(size: int) -> Tensor:
        return torch.ones(size)

    class Stream:
        cuda_stream = 1

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    first = ones(3)
    assert ones(3) is first
    monkeypatch.setattr(Stream, "cuda_stream", 2)
    assert ones(3) is not first


@pytest.mark.gpu
def test_a_captured_graph_leaves_nothing_behind() -> None:
    @kept
    def ones(size: int, device: torch.device) -> Tensor:
        return torch.ones(size, device=device)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = ones(1000, torch.device("cuda"))
    assert ones(1000, torch.device("cuda")) is not inside
    assert bool((ones(1000, torch.device("cuda")) == 1).all())
