"""Writing the network as a checkpoint in Hugging Face's Llama format."""

import json
from pathlib import Path
from typing import Any

import torch

from .network import Network, Shape
from .tokenizer import END, START


def save_tokenizer(tokenizer: Any, folder: Path, positions: int) -> None:
    """Write the tokenizer's files; `positions` is the longest length that is trained."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": START, "eos_token": END, "pad_token": END}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    _write(folder / "tokenizer_config.json", config)


def save_network(network: Network, tokenizer: Any, folder: Path, positions: int) -> None:
    """Write weights in bfloat16, the configuration and the generation settings."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in network.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    _write(folder / "config.json", _config(network.shape, start, end, positions))
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    generation = {
        "bos_token_id": start,
        "eos_token_id": [end, newline],
        "pad_token_id": end,
        "do_sample": False,
    }
    _write(folder / "generation_config.json", generation)


def _config(shape: Shape, start: int, end: int, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
