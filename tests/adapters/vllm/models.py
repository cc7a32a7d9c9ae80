"""Tiny models on disk for the engine: random weights, or the embedded one, and a tokenizer of single words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY, WINDOW = 256, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Larger than usual, so that logits are not flat and one wrong key changes a token.
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
        },
    ),
    "bert": ("Bert", {}),
    "deepseek": (  # multi-head latent attention
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
}


def save(family: str, folder: Path, **changes: Any) -> Path:
    """A random model of a family in Hugging Face's format, with a tokenizer; returns the folder."""
    import tokenizers
    import torch
    import transformers

    prefix, differs = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **differs, **changes})
    owner = {"Gemma3Text": "Gemma3ForCausalLM", "Bert": "BertModel"}.get(prefix, f"{prefix}ForCausalLM")
    torch.manual_seed(0)
    getattr(transformers, owner)(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w2", pad_token="w1"
    )
    fast.save_pretrained(folder)
    return folder


def prompt(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """Random token ids; the first `shared` are the same for every seed."""
    import random

    common, rng = random.Random(-1), random.Random(seed)
    ids = [common.randrange(3, VOCABULARY) for _ in range(shared)]
    return ids + [rng.randrange(3, VOCABULARY) for _ in range(length - shared)]
