"""Tiny models on disk for the engine: random weights, or the embedded one, and a tokenizer of single words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VOCABULARY, WINDOW = 256, 64
IMAGE, PATCH, PICTURE = 48, 8, 2
"""Pixels of an image's side, and of a patch's; the token that stands for an image."""
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
    "mamba": ("Mamba", {"state_size": 16}),  # no attention at all
    "qwen3.5": (  # linear attention in two of four layers
        "Qwen3_5Text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
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
    import torch
    import transformers

    prefix, differs = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **differs, **changes})
    owners = {"Gemma3Text": "Gemma3ForCausalLM", "Qwen3_5Text": "Qwen3_5ForCausalLM", "Bert": "BertModel"}
    owner = owners.get(prefix, f"{prefix}ForCausalLM")
    torch.manual_seed(0)
    getattr(transformers, owner)(config).save_pretrained(folder)
    tokenize(folder)
    return folder


def tokenize(folder: Path) -> Any:
    """A tokenizer of single words, saved in the folder of a model."""
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w2", pad_token="w1"
    )
    fast.save_pretrained(folder)
    return fast


def save_llava(folder: Path) -> Path:
    """A random LLaVA: a CLIP encoder of two layers before a Llama, and the processor of its images."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE,
        patch_size=PATCH,
    )
    config = transformers.LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=transformers.LlamaConfig(**SIZES).to_dict(),
        image_token_index=PICTURE,
        image_seq_length=(IMAGE // PATCH) ** 2,
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    # As in checkpoints that were published; vLLM knows no other names.
    saved = folder / "model.safetensors"
    tensors = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", k): v for k, v in load_file(saved).items()}
    save_file(tensors, saved, {"format": "pt"})
    size = {"height": IMAGE, "width": IMAGE}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": IMAGE}, crop_size=size)
    transformers.LlavaProcessor(
        images,
        tokenize(folder),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=f"w{PICTURE}",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


GROUP = 32
"""Input channels that share a scale, in 4-bit weights."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def save_in_4_bits(kind: str, folder: Path) -> Path:
    """A random Llama whose linear layers are in 4 bits, in the format of GPTQ ("gptq") or AWQ ("awq")."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    saved = save("llama", folder) / "model.safetensors"
    tensors: dict[str, Any] = {}
    for name, weight in load_file(saved).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.half()
            continue
        w, at = weight.t().float(), name.removesuffix("weight")  # [in, out]
        groups = w.unflatten(0, (-1, GROUP))
        scales = (groups.abs().amax(1) / 7).half()  # [in / GROUP, out]
        values = ((groups / scales[:, None].float()).round() + 8).clamp(0, 15).flatten(0, 1).int()
        tensors[at + "scales"] = scales
        if kind == "gptq":  # along the input; 7 stands for a zero of 8
            tensors[at + "qweight"] = _packed(values.unflatten(0, (-1, 8)), 1, range(8))
            tensors[at + "qzeros"] = _packed(torch.full_like(scales, 7).int().unflatten(1, (-1, 8)), 2, range(8))
            tensors[at + "g_idx"] = torch.arange(len(w), dtype=torch.int32) // GROUP
        else:
            tensors[at + "qweight"] = _packed(values.unflatten(1, (-1, 8)), 2, AWQ_ORDER)
            tensors[at + "qzeros"] = _packed(torch.full_like(scales, 8).int().unflatten(1, (-1, 8)), 2, AWQ_ORDER)
    save_file(tensors, saved, {"format": "pt"})
    more = {"sym": True, "desc_act": False} if kind == "gptq" else {"zero_point": True, "version": "gemm"}
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "quantization_config": {"quant_method": kind, "bits": 4, "group_size": GROUP, **more},
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _packed(values: Any, dim: int, order: Any) -> Any:
    """Eight numbers of 4 bits along `dim` as one int32, the first of `order` in the lowest bits."""
    import torch

    found = torch.zeros_like(values.select(dim, 0), dtype=torch.int64)
    for place, index in enumerate(order):
        found |= values.select(dim, index).long() << (4 * place)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int().contiguous()


def save_lora(folder: Path, layers: int = 3) -> Path:
    """A random adapter of a Llama's query and value projections, in the format of PEFT, large enough to be seen."""
    import json

    import torch
    from safetensors.torch import save_file

    hidden, rank, outs = SIZES["hidden_size"], 8, {"q_proj": SIZES["num_attention_heads"], "v_proj": 2}
    torch.manual_seed(1)
    tensors = {}
    for layer in range(layers):
        for name, heads in outs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            tensors[f"{at}_A.weight"] = torch.randn(rank, hidden) * 0.3
            tensors[f"{at}_B.weight"] = torch.randn(heads * SIZES["head_dim"], rank) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(outs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": ""}))
    return folder


def prompt(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """Random token ids; the first `shared` are the same for every seed."""
    import random

    common, rng = random.Random(-1), random.Random(seed)
    ids = [common.randrange(3, VOCABULARY) for _ in range(shared)]
    return ids + [rng.randrange(3, VOCABULARY) for _ in range(length - shared)]
