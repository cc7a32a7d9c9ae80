"""Decoders with cross attention: it is no prefill, and what the layer's own attention did is what the report says."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.session import Session
from transformers import AutoModelForCausalLM

import sparseprefill as sp
from helpers.tiny import config_of

STREAMING: dict[str, Any] = {"sink": 16, "window": 16, "block": 16}


def decoder(model_type: str) -> Any:
    config = config_of(model_type)
    if hasattr(config, "add_cross_attention"):
        config.add_cross_attention = True
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("model_type", ["gpt2", "bart", "bert"])
@pytest.mark.parametrize("encoded", [40, 90])
@torch.no_grad()
def test_layers_that_ran_sparse_are_reported_so(model_type: str, encoded: int) -> None:
    model = decoder(model_type)
    inputs = {"input_ids": torch.randint(3, 90, (1, 90)), "encoder_hidden_states": torch.randn(1, encoded, 64)}
    wanted = model(**inputs).logits
    with attach(model, "dense", block=32, gate=None, strict=True) as handle:
        torch.testing.assert_close(model(**inputs).logits, wanted, atol=5e-5, rtol=1e-4)
    for layer in handle.report().layers:
        assert ("sparse", 1, 0, 1) == (layer.mode, layer.sparse_calls, layer.dense_calls, layer.cross_calls)
        assert (90, 90, 1.0, 1) == (layer.query_length, layer.key_length, layer.density, layer.calls)
        assert "and 1 of cross attention" in str(layer)
    assert {} == handle.report().fallbacks


def test_what_is_not_causal_alone_is_no_cross_attention() -> None:
    session = Session(sp.build("streaming", **STREAMING))
    assert not session.cross(3)
    session.decline(3, "the mask is custom", (1, 90, 90))
    assert session.cross(3)
    assert not session.cross(4)
    assert [(3, 1)] == [(layer.layer, layer.cross_calls) for layer in session.report("none", "none").layers]
