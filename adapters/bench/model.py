"""A model of Llama-3-8B's shape with random weights, made on the device."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.validate import one_of, whole

from .shape import DTYPES, HeadSizes


@frozen(kw_only=True)
class ModelShape(HeadSizes):
    """A Llama of random weights; by default Llama-3-8B's, with a small vocabulary to save memory."""

    layers: int = field(default=32, validator=whole())
    hidden: int = field(default=4096, validator=whole(32))
    inner: int = field(default=14336, validator=whole())
    head_dim: int = field(default=128, validator=whole(32))
    vocabulary: int = field(default=1024, validator=whole(16))
    dtype: str = field(default="bfloat16", validator=one_of(*DTYPES))

    @property
    def bytes_per_token(self) -> int:
        """Of the cache of all layers, and of what one layer's MLP holds."""
        cache = 2 * self.layers * self.kv_heads * self.head_dim
        return (cache + 2 * self.inner + self.hidden) * self.torch_dtype.itemsize

    def config(self, tokens: int, **more: Any) -> Any:
        """The LlamaConfig for prompts of so many tokens; more: other fields of it. ImportError without transformers."""
        from transformers import LlamaConfig

        fields: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, **more}
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=tokens,
            bos_token_id=0,
            eos_token_id=1,
            **fields,
        )

    def build(self, tokens: int, device: torch.device, seed: int = 0) -> Any:
        """The model, made on the device. ImportError without transformers."""
        from transformers import LlamaForCausalLM

        config = self.config(tokens, attn_implementation="sdpa")
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.torch_dtype)
        try:
            with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def structured(self, tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """q ``[1, Hq, N, D]`` and k ``[1, Hkv, N, D]`` of made-up heads for a layer, token-major (`head_tensors`)."""
        q, k, _ = self.made_up(tokens, device, seed, strided=True)
        return q, k
