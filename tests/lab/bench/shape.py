"""Sizes of what the benches measure: a call, a whole model."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from sparseprefill.adapters.calibration.measure import HeadSizes
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.testing.heads import head_tensors
from sparseprefill.validate import maybe, one_of, whole

DTYPES = ("bfloat16", "float16", "float32")
"""Types of calls and models that are measured."""


@frozen(kw_only=True)
class Shape(HeadSizes):
    """Sizes of a causal prefill call. A batch has rows of unequal lengths, the first of `length` tokens.

    new: how many of the tokens, the last, are queries, behind cached ones; None for all of them. page: tokens of a page
    of keys and values, which then lie in a cache out of order; 0 for tensors. Both are for one prompt, not for a batch.
    """

    length: int = field(validator=whole(2))
    head_dim: int = field(default=128, validator=whole(32))
    dtype: str = field(default="bfloat16", validator=one_of(*DTYPES))
    batch: int = field(default=1, validator=whole(1, 64))
    new: int | None = field(default=None, validator=maybe(whole()))
    page: int = field(default=0, validator=whole(0))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.new is not None and self.new > self.length:
            raise ParameterError(f"new is {self.new}: pass at most the {self.length} tokens of the prompt")
        if self.batch > 1 and (self.new is not None or self.page):
            raise ParameterError(f"batch is {self.batch}: new tokens and pages are measured for one prompt; pass 1")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of q, k, v and the output, in every batch row; of a cache in pages too."""
        pages = 2 * self.kv_heads * self.head_dim * self.torch_dtype.itemsize if self.page else 0
        return self.batch * super().bytes_per_token + pages

    @property
    def queries(self) -> int:
        """Tokens that are queries."""
        return self.length if self.new is None else self.new

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch row: n, n (b - 1) / b, ..., n / b."""
        return tuple(max(1, self.length * (self.batch - row) // self.batch) for row in range(self.batch))

    def __str__(self) -> str:
        rows = f"batch {self.batch}, " if self.batch > 1 else ""
        new = "" if self.new is None else f"{self.new:,} of them new, "
        pages = f"pages of {self.page}, " if self.page else ""
        return f"{rows}{new}{pages}{super().__str__()}"


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
        """Bytes of the cache of all layers, and of what one layer's MLP holds."""
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
        q, k, _ = head_tensors(
            q_len=tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            strided=True,
            device=device,
            dtype=self.torch_dtype,
            seed=seed,
        )
        return q, k
