"""What attaching asks of a model first: weights that come layer by layer, and whose fault a failed dry run is."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from torch import nn

from . import hf_models
from .hf_models import logits


class Bringer:
    """What accelerate's AlignDevicesHook does: weights wait elsewhere and come for the module's forward alone."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.execution_device = device
        self._waiting = {name: x.detach().clone() for name, x in module.named_parameters(recurse=False)}
        self.after(module)
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: Any = None) -> tuple[Any, ...] | None:
        for name, x in self._waiting.items():
            setattr(module, name, nn.Parameter(x.to(self.execution_device), requires_grad=False))
        return tuple(x.to(self.execution_device) if isinstance(x, torch.Tensor) else x for x in args)

    def after(self, module: nn.Module, *_: Any) -> None:
        for name, x in self._waiting.items():
            setattr(module, name, nn.Parameter(x.to("meta"), requires_grad=False))


class Several:
    """Hooks in one, as accelerate's SequentialHook."""

    def __init__(self, *hooks: object) -> None:
        self.hooks = hooks


def offload(model: Any, *, several: bool) -> None:
    """Every weight to the meta device, one hook a module."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hook = Bringer(module, torch.device("cpu"))
            module._hf_hook = Several(object(), hook) if several else hook


@pytest.mark.parametrize("several", [False, True])
def test_an_offloaded_model_attaches_and_is_the_stock_model(several: bool) -> None:
    model = hf_models.build("llama")
    wanted = logits(model)
    offload(model, several=several)
    assert "meta" == model.device.type
    with attach(model, "dense", block=32) as handle:
        torch.testing.assert_close(logits(model), wanted, atol=2e-5, rtol=1e-4)
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]
    assert torch.equal(wanted, logits(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["cpu", "disk", "dispatch"])
def test_accelerate(kind: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, cpu = hf_models.build("llama"), torch.device("cpu")
    wanted = logits(model)
    if kind == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif kind == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=cpu)
    else:
        places = {"model": "disk", "lm_head": "cpu"}
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    with attach(model, "dense", block=32) as handle:
        torch.testing.assert_close(logits(model), wanted, atol=2e-5, rtol=1e-4)
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]
    assert torch.equal(wanted, logits(model))
