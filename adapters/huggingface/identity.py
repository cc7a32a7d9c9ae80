"""The model's identity, as a tuned file remembers it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

from sparseprefill.errors import AttachError, printed
from sparseprefill.profiles.identity import ModelIdentity

SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "layer_types"),
)
"""Fields of a configuration that the digest covers, where a model has them."""


def identity(decoder: PreTrainedModel) -> ModelIdentity:
    """The identity of a model's decoder. A fine-tuned copy has that of its base: weights play no part."""
    config = decoder.config.get_text_config()
    name = str(getattr(config, "_name_or_path", "") or type(decoder).__name__)
    return of_config(config, type(decoder).__name__, name)


def of_config(config: Any, architecture: str, name: str) -> ModelIdentity:
    """The identity by a text configuration. architecture: class of the decoder. name: of the model, or its path.

    Raises AttachError as `check_attention` does.
    """
    check_attention(config, architecture)
    heads = int(config.num_attention_heads)
    sizes = {field: getattr(config, field, None) for field in SIZES}
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True, default=str).encode()).hexdigest()
    return ModelIdentity(
        name=name.rstrip("/").rpartition("/")[2],
        architecture=architecture,
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        digest=digest[:16],
    )


def check_attention(config: Any, architecture: str) -> None:
    """AttachError for a text configuration without heads or without layers, such as Mamba's. architecture: a class."""
    for size in ("num_attention_heads", "num_hidden_layers"):
        found = getattr(config, size, None)
        if not isinstance(found, int) or found < 1:
            raise AttachError(
                f"{architecture} has no attention (its configuration says {size} = {printed(found)}), and so nothing "
                "to gain: pass a model with attention"
            )
