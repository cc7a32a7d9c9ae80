"""Which files of the package a call passes, and how often control passes from one to another.

`python -m helpers.walk` (from tests/) prints the files; `python -m house.moves` prints the moves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import define, field

import sparseprefill as sp

NAMES = {"core": "sparseprefill", "plugins": "sparseprefill.plugins", "adapters": "sparseprefill.adapters"}
ROOTS = {str(Path(str(import_module(name).__file__)).parent): layer for layer, name in NAMES.items()}


WRAPPER = "uncast.<locals>.run"


def place(path: str) -> str | None:
    """The file as the repository names it, None for files of others. The longest root wins: a wheel nests them."""
    for root in sorted(ROOTS, key=len, reverse=True):
        if path.startswith(root + "/"):
            return f"{ROOTS[root]}/{path[len(root) + 1 :]}"
    return None


@define
class Walk:
    """What was seen of a call: the files that it ran in, each move: between which files, by which function; and how
    many functions of the package were called.

    Functions of others, code that attrs or Triton generates, and the wrapper of `uncast`, which stands around functions
    and hands on at once, are passed through: a move goes from the file of ours that was left to the next one of ours. A
    return is a move, too.
    """

    moves: list[tuple[str, str, str]] = field(factory=list)
    files: set[str] = field(factory=set)
    calls: int = 0
    _open: list[str] = field(factory=list)

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        if event not in ("call", "return"):
            return
        before = self._open[-1] if self._open else ""
        if event == "call":
            here = place(frame.f_code.co_filename)
            self.calls += here is not None
            self._open.append(before if here is None or frame.f_code.co_qualname == WRAPPER else here)
        elif self._open:
            self._open.pop()
        now = self._open[-1] if self._open else ""
        self.files |= {now} - {""}
        if now not in (before, ""):
            self.moves.append((before, now, frame.f_code.co_qualname))


@contextmanager
def watched() -> Iterator[Walk]:
    """Watches what runs meanwhile."""
    seen = Walk()
    sys.setprofile(seen.watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def pipeline_walk(name: str, device: str = "cpu", tokens: int = 1024) -> Walk:
    """Of the second ``pipeline(q, k, v)``, 4 / 2 heads of 64; the first imports, and keeps what sizes alone decide."""
    q, k, v = (torch.randn(1, heads, tokens, 64, device=device) for heads in (4, 2, 2))
    pipeline = sp.build(name)
    pipeline(q, k, v)
    with watched() as seen:
        pipeline(q, k, v)
    return seen


def layer_walk(
    name: str,
    device: str = "cpu",
    tokens: int = 1024,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype | None = None,
) -> Walk:
    """Of one layer's attention in the second prefill of a Llama: 4 / 2 heads of 64, or so many of 128."""
    from sparseprefill.adapters.huggingface import attach
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 256 if heads == 4 else 128 * heads
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, intermediate_size=64, **sizes)  # type: ignore[arg-type]
    model: Any = LlamaForCausalLM(config).eval()
    model.to(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))
    ids, found = torch.randint(0, 64, (1, tokens), device=device), Walk()
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def watch(*arguments: Any, **options: Any) -> Any:
        nonlocal found
        with watched() as found:
            return forward(*arguments, **options)

    with torch.no_grad(), attach(model, name, gate=None, verify=False):
        model(ids, use_cache=False)
        layer.forward = watch
        model(ids, use_cache=False)
    return found


if __name__ == "__main__":
    at = "cuda" if torch.cuda.is_available() else "cpu"
    for method in ("streaming", "bfla"):
        for label, walk in (("pipeline", pipeline_walk(method, at)), ("transformers", layer_walk(method, at))):
            print(f"{label} {method} {at}: {len(walk.files)} files")  # noqa: T201
            print("  " + "\n  ".join(sorted(walk.files)))  # noqa: T201
