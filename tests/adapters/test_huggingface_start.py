"""What attaching asks of a model first: weights that come layer by layer, and whose fault a failed dry run is."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from torch import nn

import sparseprefill as sp

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


def test_weights_on_meta_without_hooks_are_the_stock_models_failure() -> None:
    model = hf_models.build("llama").to("meta")
    with pytest.raises(sp.AttachError, match="does not run on plain token ids as it is, before it is attached"):
        attach(model, "dense")


def failing(model: Any, on: set[int]) -> list[int]:
    """Make some of the model's forwards fail, by their number from 0."""
    forwards: list[int] = []

    def count(*_: object) -> None:
        forwards.append(len(forwards))
        if forwards[-1] in on:
            raise RuntimeError("out of luck")

    model.register_forward_pre_hook(count)
    return forwards


@pytest.mark.parametrize("on", [{0}, {1, 2}])
def test_a_stock_model_that_fails_is_named_as_such(on: set[int]) -> None:
    """At once, or in the middle: what fails with our attention is run once more without it."""
    model = hf_models.build("llama")
    failing(model, on)
    with pytest.raises(sp.AttachError, match=r"as it is, before it is attached: RuntimeError: out of luck.*verify="):
        attach(model, "dense")
    assert "sdpa" == model.config._attn_implementation


def test_a_failure_with_our_attention_alone_is_ours() -> None:
    model = hf_models.build("llama")
    forwards = failing(model, {1})
    with pytest.raises(sp.AttachError, match="fails with another attention function: RuntimeError: out of luck"):
        attach(model, "dense")
    assert [0, 1, 2] == forwards


def test_a_model_that_differs_from_itself_is_not_said_to_differ_through_us() -> None:
    model = hf_models.build("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out + torch.randn_like(out) * out.std())
    with pytest.raises(sp.AttachError, match="gives other logits from run to run"):
        attach(model, "dense")


def test_logits_that_are_not_finite_verify_nothing() -> None:
    model = hf_models.build("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out * torch.inf)
    with pytest.raises(sp.AttachError, match="before it is attached, gives logits that are not finite"):
        attach(model, "dense")
