"""Tiny random models, prompts, and what one device makes of them with the method `star-attention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from attrs import frozen
from sparseprefill.adapters.huggingface import attach

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # larger than usual, so that masks matter
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPU: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,  # the kernels' smallest
    "initializer_range": 0.07,  # as much for 256 numbers as 0.2 for 32
    "max_position_embeddings": 2048,
}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "attn_implementation": "eager", "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    # A softcap, and a scale of its own; both only where the attention is eager.
    "Gemma2": {**FULL, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1, "final_logit_softcapping": None},
    # Sinks, made larger below.
    "GptOss": {
        **FULL,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def device() -> torch.device:
    """This process's GPU where it is one of NCCL's, else the CPU."""
    cuda = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def build(family: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """A causal language model in evaluation mode, float32, on the process's device."""
    here = device()
    sizes = {**SIZES, **FAMILIES.get(family, {}), **(GPU if here.type == "cuda" else {}), **changes}
    torch.manual_seed(seed)  # and made on the CPU, so that it is the same everywhere
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(2.0)  # as large as the logits
    return made.to(here).eval()


def lines() -> tuple[str, ...]:
    """Filler text: what help() shows of the language, which is there in a moment; the demo reads all of the library."""
    from pydoc_data.topics import topics

    found = (" ".join(line.split()) for text in topics.values() for line in text.splitlines())
    return tuple(dict.fromkeys(x for x in found if 16 <= len(x) <= 120 and x.isascii() and x.isprintable()))[:2000]


def tokens(count: int, seed: int = 1) -> list[int]:
    """Random tokens without the padding token."""
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@frozen
class Case:
    """Parameters of the method, and the context's length."""

    name: str
    parameters: dict[str, Any]
    length: int = 200

    @property
    def context(self) -> list[int]:
        """The context."""
        return tokens(self.length)


INNER = {"method": "vertical-slash", "parameters": {"gamma": 0.6, "block": 16}}
CASES = (
    Case("many blocks, the last short, tokens left over", {"block_size": 32, "tile": 16}),
    Case("quarter blocks", {"tile": 16}),
    Case("a short anchor", {"block_size": 48, "anchor_length": 16, "tile": 16}),
    Case("an anchor of three blocks", {"block_size": 32, "anchor_length": 96, "tile": 16}),
    Case("no anchor", {"block_size": 16, "anchor_length": 0, "tile": 8}),
    Case("fewer blocks than ranks", {"block_size": 128, "tile": 8}),
    Case("no whole block", {"block_size": 64, "tile": 64}, 40),
    Case("a method inside", {"block_size": 48, "tile": 16, "inner": INNER}),
)
QUESTIONS = (tokens(20, seed=9), tokens(7, seed=10))
NEW = 5


def alone(model: Any, context: list[int], questions: tuple[list[int], ...], **parameters: Any) -> list[Any]:
    """One device, the mask of the method: for each turn the logits ``[Q, vocabulary]`` and the greedy answer."""
    known, turns = list(context), []
    for question in questions:
        ids = torch.tensor([[*known, *question]], device=model.device)
        options: dict[str, Any] = {"context_length": len(context), **parameters}
        with torch.no_grad(), attach(model, "star-attention", tail=0, verify=False, gate=None, **options):
            logits = model(ids, logits_to_keep=len(question)).logits[0]
            new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        answer = new[0, ids.shape[1] :].tolist()
        turns.append((logits, answer))
        known += [*question, *answer]
    return turns
