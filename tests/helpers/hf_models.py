"""Tiny random transformers models: fixed seeds, float32, nothing downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

VOCABULARY, WINDOW = 97, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Larger than usual, so that attention is far from uniform and masks matter.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# name: (class prefix, what differs, implementation)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}, "sdpa"),
    "qwen3": ("Qwen3", {"head_dim": 8}, "eager"),
    "mistral": ("Mistral", {"sliding_window": None}, "sdpa"),
    "mistral-sliding": ("Mistral", {"sliding_window": WINDOW}, "sdpa"),
    "gemma2": ("Gemma2", {**MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, "eager"),
    "gemma2-sdpa": ("Gemma2", {**MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, "sdpa"),
    "gemma3": ("Gemma3Text", {**MIXED, "query_pre_attn_scalar": 8}, "sdpa"),
    "phi3": ("Phi3", {"sliding_window": None}, "sdpa"),
    "gpt-oss": ("GptOss", {**MIXED, **EXPERTS}, "eager"),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None}, "sdpa"),
}
STREAMING: dict[str, Any] = {"sink": 16, "window": 16, "block": 16}
SLIDING_LAYERS = {"qwen2": 1, "mistral-sliding": 2, "gemma2": 1, "gemma2-sdpa": 1, "gemma3": 1, "gpt-oss": 1}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A causal language model of one family, in evaluation mode."""
    prefix, differs, implementation = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **differs, **changes})
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    owner = "Gemma3ForCausalLM" if prefix == "Gemma3Text" else f"{prefix}ForCausalLM"
    try:
        model = getattr(transformers, owner)(config).eval()
    except ValueError as error:
        if implementation == "sdpa" and "scaled_dot_product_attention" in str(error):
            pytest.skip(f"transformers {transformers.__version__} refuses {owner} with sdpa")
        raise
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_()
    return model


def llava(seed: int = 0) -> Any:
    """A model of images and text, whose decoder has a configuration inside of the model's. Text is below 96."""
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4),
        image_token_index=VOCABULARY - 1,
    )
    torch.manual_seed(seed)
    return transformers.LlavaForConditionalGeneration(config).eval()


def prompt(length: int = 90, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """int64 [batch, length]: random tokens without the padding token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(length: int = 90, lefts: tuple[int, ...] = (0, 7, 41), seed: int = 2) -> dict[str, torch.Tensor]:
    """A batch with left padding: input_ids and attention_mask."""
    ids = prompt(length, len(lefts), seed)
    mask = torch.ones_like(ids)
    for row, left in enumerate(lefts):
        ids[row, :left], mask[row, :left] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model: Any, length: int = 90) -> Any:
    """The model's logits for a prompt."""
    return model(prompt(length)).logits
