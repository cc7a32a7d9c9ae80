"""Tiny models of any type that transformers knows: its own default configuration, shrunk by the names of its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

VOCABULARY, LARGEST = 128, 30_000_000

SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "lru_width", "backbone_hidden_size"), 64),
    "hidden_size_global": 64,
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "pronunciation_embed_dim", "mamba_d_ssm"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("n_inner", "dff", "d_inner", "dim_ff", "feed_forward_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "classifier_proj_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "router_hidden_size", "shape_embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_encoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "attention_head_dim", "attention_head_size", "dim_head", "d_head"), 16
    ),
    **dict.fromkeys(("kv_channels", "d_kv", "global_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("index_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "rotary_dim", "d_rel"), 16),
    **{"qk_rope_head_dim": 8, "qk_head_dim": 24, "query_pre_attn_scalar": 16, "rel_extent": 64},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **{"linear_num_value_heads": 4, "num_query_groups": 2},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "n_group"), 1),
    **dict.fromkeys(("topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **{"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_expert": 1},
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "window_size"), 24),
    **dict.fromkeys(("attention_window_size", "attention_chunk_size", "keep_window_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length"), 512),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "index_topk", "index_block_size", "block_size"), 16),
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_headdim": 16},
    **{"mamba_n_groups": 1, "n_groups": 1, "mamba_ngroups": 1, "n_mamba_heads": 2},
    **{"hidden_size_per_layer_input": 16, "laurel_rank": 8, "num_kv_shared_layers": 0, "adapter_rank": 8},
    **{"gated_norm_rank": 8, "hc_lowrank": 8, "hc_sinkhorn_iters": 4, "o_groups": 2, "ple_embed_dim": 16},
    **{"ngram_vocab_size_base": 128, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 8},
    **{"num_layers_per_stack": 2, "prompt_length": 8, "prompt_mid_dim": 32, "num_centroids": 32},
    **{"encoder_hash_byte_group_vocab": 128, "image_size": 32, "patch_size": 8, "num_mel_bins": 16},
    **{"num_codebooks": 2, "position_bias_num_buckets": 32, "position_bias_max_distance": 64, "mem_len": 0},
    **{"image_seq_length": 16, "mm_tokens_per_image": 16, "audio_soft_tokens_per_image": 16, "lora_rank": 8},
}
"""What a whole number becomes, by the name of its field; a default that is smaller stays."""

# Not the smaller of the two: a window, a rank, a head or a vocabulary that means something else when it is larger.
EXACT = frozenset({"vocab_size", "hidden_size", "num_hidden_layers", "sliding_window", "max_position_embeddings"})

NOTHING: Mapping[str, Any] = {}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MARKS = ("_token_id", "_token_index")
RANGES = ("initializer_range", "init_std")

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 32, "indexer_compress_ratio": 8},
}
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [4, 2, 2]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "zamba": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4, "n_mamba_heads": 8},
}
"""What the names do not tell, by type."""


def config_of(model_type: str) -> Any:
    """A small configuration of a type; whatever transformers raises where there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    owner, changes = CONFIG_MAPPING[model_type], OTHERS.get(model_type, {})
    default = owner()
    try:
        return owner(**shrunk(default, changes))
    except Exception:
        if not _lists(default):
            raise
        return owner(**shrunk(default, changes, lists=False))


def shrunk(config: Any, changes: Mapping[str, Any] = NOTHING, *, lists: bool = True) -> dict[str, Any]:
    """Arguments that make the same configuration small.

    changes: go over them. lists: one layer of each kind that its lists by layer name, as far as they fit.
    """
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in config.sub_configs:
            if value is not None:
                inner = shrunk(value, changes.get(name, {}), lists=lists)
                made[name] = {**inner, "model_type": value.model_type}
        elif name in SPECIAL and value is not None:
            made[name] = SPECIAL[name]
        elif name in RANGES:
            made[name] = 0.2
        elif name == "is_decoder":
            made[name] = True
        elif isinstance(value, int) and not isinstance(value, bool):
            if name.endswith(MARKS):
                made[name] = VOCABULARY - 1 - sum(other.endswith(MARKS) for other in made)
            elif name in SIZES:
                made[name] = SIZES[name] if name in EXACT else min(SIZES[name], value)
    if "qk_rope_head_dim" in made:  # one latent serves all heads, and the rotary part is what some call a head
        made.update({name: size for name, size in (("head_dim", 8), ("num_key_value_heads", 4)) if name in made})
    by_layer = _lists(config) if lists else {}
    if by_layer:
        kinds: dict[Any, int] = {}
        for i, kind in enumerate(zip(*by_layer.values(), strict=True)):
            kinds.setdefault(str(kind), i)
        chosen = list(kinds.values())
        chosen = (chosen * 2)[: max(2, len(chosen))][:6]
        made.update({name: [values[i] for i in chosen] for name, values in by_layer.items()})
        made["num_hidden_layers"] = len(chosen)
    return {**made, **{name: value for name, value in changes.items() if name not in config.sub_configs}}


def _lists(config: Any) -> dict[str, list[Any]]:
    """The fields that have an entry for each layer."""
    layers = getattr(config, "num_hidden_layers", None)
    found = {name: value for name, value in vars(config).items() if isinstance(value, list)}
    return {name: value for name, value in found.items() if len(value) == layers}


def model_of(model_type: str, implementation: str | None = None, seed: int = 0) -> Any:
    """A causal language model of a type with random weights, in evaluation mode.

    implementation: of its attention; None for what transformers picks. ValueError for one that stayed too large.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(model_type)
    options: dict[str, Any] = {} if implementation is None else {"attn_implementation": implementation}
    with torch.device("meta"):
        count = sum(x.numel() for x in AutoModelForCausalLM.from_config(config, **options).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters are left: no rule of helpers.tiny shrinks its fields")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(model_type), **options).float().eval()
    with torch.no_grad():
        for parameter in _constant(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _constant(model: Any) -> Iterator[Any]:
    """Parameters that start as one number, such as norms, biases and sinks: they would hide what is dropped."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() > 1 and bool((parameter == parameter.view(-1)[0]).all()):
            yield parameter
