"""Multi-head latent attention in transformers: heads of 192 for queries and keys, and of 128 for values."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.huggingface import attach
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import sparseprefill as sp
from sparseprefill.executors.triton import TritonExecutor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOKENS = 700
METHODS: dict[str, dict[str, Any]] = {
    "streaming": {"sink": 64, "window": 64, "block": 64},
    "rowmax": {},
    "bfla": {},
    "flexprefill": {},
    "xattention": {},
    "anchor-attention": {},
    "sample-attention": {},
    "vertical-slash": {},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers as DeepSeek-V3 has them, the second with experts; made-up weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 97}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    given: dict[str, Any] = {**sizes, **experts, **latent, **heads, "max_position_embeddings": 2048}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**given)).eval()


@pytest.fixture(scope="module")
def stock(model: Any) -> torch.Tensor:
    """Logits of the whole prompt."""
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    prompt = torch.randint(97, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return cast(torch.Tensor, model(prompt).logits)


def test_the_full_mask_is_the_stock_model(model: Any, stock: torch.Tensor) -> None:
    with attach(model, "dense", gate=None) as handle:
        assert float((logits(model) - stock).abs().max()) < 1e-5
        assert [one.mode for one in handle.report().layers] == ["sparse", "sparse"]


@pytest.mark.parametrize("method", METHODS)
def test_methods_run_sparse(method: str, model: Any, stock: torch.Tensor) -> None:
    with attach(model, method, gate=None, **METHODS[method]) as handle:
        found = logits(model)
        layers = handle.report().layers
    assert [one.mode for one in layers] == ["sparse", "sparse"]
    assert bool(found.isfinite().all())
    if method == "streaming":
        assert all(one.density is not None and one.density < 0.8 for one in layers)
        assert torch.allclose(found[:, :64], stock[:, :64], atol=1e-5), "rows that see everything"
        assert float((found[:, -1] - stock[:, -1]).abs().max()) > 1e-4


def test_the_portable_kernel_gives_the_same(model: Any) -> None:
    pipeline = sp.build("streaming", **METHODS["streaming"])
    made = []
    for executor in (sp.ReferenceExecutor(), TritonExecutor()):
        with attach(model, evolve(pipeline, executor=executor), gate=None) as handle:
            made.append(logits(model))
            kernels = handle.report().kernels
    assert torch.allclose(made[0], made[1], atol=1e-4)
    assert set(kernels) == {"portable"}
