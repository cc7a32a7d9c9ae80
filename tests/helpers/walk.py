"""Which files of the package a call passes: `python -m helpers.walk` (from tests/) prints the counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import sparseprefill as sp

NAMES = {"core": "sparseprefill", "plugins": "sparseprefill.plugins", "adapters": "sparseprefill.adapters"}
ROOTS = {str(Path(str(import_module(name).__file__)).parent): layer for layer, name in NAMES.items()}


def place(path: str) -> str | None:
    """The file as the repository names it, None for files of others. The longest root wins: a wheel nests them."""
    for root in sorted(ROOTS, key=len, reverse=True):
        if path.startswith(root + "/"):
            return f"{ROOTS[root]}/{path[len(root) + 1 :]}"
    return None


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collects the files in which a function runs meanwhile; code that attrs or Triton generates has none."""
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (found := place(frame.f_code.co_filename)) is not None:
            seen.add(found)

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def walk(run: Callable[[], object]) -> set[str]:
    """The files that a second run passes; the first one imports, compiles, and keeps what sizes alone decide."""
    run()
    with watched() as seen:
        run()
    return seen


def pipeline_files(name: str, device: str = "cpu") -> set[str]:
    """Of ``pipeline(q, k, v)``: 4 / 2 heads of 64, 1,024 tokens."""
    q, k, v = (torch.randn(1, heads, 1024, 64, device=device) for heads in (4, 2, 2))
    pipeline = sp.build(name)
    return walk(lambda: pipeline(q, k, v))


def layer_files(name: str, device: str = "cpu") -> set[str]:
    """Of one layer's attention in the prefill of a Llama, 1,024 tokens: 4 / 2 heads of 64."""
    from sparseprefill.adapters.huggingface import attach
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)  # type: ignore[arg-type]
    model: Any = LlamaForCausalLM(config).eval()
    model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    ids, seen = torch.randint(0, 64, (1, 1024), device=device), set[str]()
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def watch(*arguments: Any, **options: Any) -> Any:
        with watched() as files:
            made = forward(*arguments, **options)
        seen.update(files)
        return made

    with torch.no_grad(), attach(model, name, gate=None):
        model(ids, use_cache=False)
        layer.forward = watch
        model(ids, use_cache=False)
    return seen


if __name__ == "__main__":
    at = "cuda" if torch.cuda.is_available() else "cpu"
    for method in ("streaming", "bfla"):
        for label, files in (("pipeline", pipeline_files(method, at)), ("transformers", layer_files(method, at))):
            print(f"{label} {method} {at}: {len(files)} files")  # noqa: T201
            print("  " + "\n  ".join(sorted(files)))  # noqa: T201
