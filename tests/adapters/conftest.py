"""The embedded model, and its tokenizer once a session: with each new one the filler text would be measured anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def embedded_tokenizer() -> Any:
    """As a command loads it."""
    from sparseprefill.adapters.demo.model import load_tokenizer

    return load_tokenizer()


@pytest.fixture(scope="module")
def embedded() -> Any:
    """The embedded model in float32."""
    import torch
    from sparseprefill.adapters.demo.model import load_model

    return load_model(torch.float32)


@pytest.fixture(scope="module")
def _one_tokenizer(embedded_tokenizer: Any) -> Iterator[None]:
    """Commands and captures of this module take that one; measuring its text is most of a short run."""
    from sparseprefill.adapters.demo import model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_tokenizer", lambda: embedded_tokenizer)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, embedded_tokenizer: Any) -> Path:
    """A random model of two layers with the embedded tokenizer, saved; it reads 1,024 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    embedded_tokenizer.save_pretrained(path)
    return path
