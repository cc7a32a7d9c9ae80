"""Weights that other libraries put into a model: LoRA by PEFT, 4 and 8 bits by bitsandbytes. Skipped without them.

``pip install peft bitsandbytes`` brings both; bitsandbytes runs on a CPU, too.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach

from helpers import hf_models

transformers = pytest.importorskip("transformers")
HEADS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=hf_models.prompt(), use_cache=False).logits
    return found


def same(model: Any, attached: Any) -> None:
    """Logits of the full mask are the model's own, and every layer ran sparse."""
    wanted = logits(model)
    with attach(attached, "dense", block=32, gate=None) as handle:
        torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=1e-3)
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]
    assert torch.equal(wanted, logits(model)), "detached"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inner", [False, True], ids=["PeftModel", "the model inside"])
def test_lora_by_peft(inner: bool) -> None:
    peft = pytest.importorskip("peft")
    base = hf_models.build("llama")
    before = logits(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=HEADS, init_lora_weights=False)).eval()
    assert not torch.allclose(before, logits(model), atol=0.1), "the adapter does something"
    same(model, model.base_model.model if inner else model)
    with attach(model, "dense", block=32, gate=None), model.disable_adapter():
        torch.testing.assert_close(logits(model), before, atol=2e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = hf_models.build("llama")
    base.save_pretrained(tmp_path)
    options = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, quantization_config=options, dtype=torch.float32).eval()
    kind = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}[bits]
    assert isinstance(model.model.layers[0].self_attn.q_proj, kind)
    assert not torch.allclose(logits(base), logits(model), atol=0.01), "the weights are rounded"
    same(model, model)
