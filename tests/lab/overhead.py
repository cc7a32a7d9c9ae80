"""What a gated model costs: `python -m lab.overhead` (from tests/) times forwards that all run dense.

A tiny Llama and its copy, which is attached behind a break-even table that finds every call too small, take turns on
one thread of a CPU. The time is the processor's own, so that other programs count little; of all rounds the median.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from statistics import median
from typing import Any

import torch
from attrs import asdict, frozen

from helpers.tables import from_length

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}


@frozen
class Overhead:
    """Milliseconds of processor time a forward: of the stock model, and what being attached adds."""

    layers: int
    tokens: int
    rounds: int
    stock: float
    added: float

    def __str__(self) -> str:
        each = 1000 * self.added / self.layers
        text = f"{self.layers} layers, {self.tokens} tokens: stock {self.stock:.2f} ms a forward"
        share = self.added / self.stock
        return f"{text}, attached and all dense {self.added:+.2f} ms ({each:.0f} us a layer, {share:.0%} of stock)"


def pair(layers: int) -> tuple[Any, Any]:
    """A tiny Llama and a copy with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=layers, pad_token_id=0, **sizes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    return model, copy.deepcopy(model)


@torch.no_grad()
def measure(layers: int = 16, tokens: int = 64, rounds: int = 300) -> Overhead:
    """Alternate forwards of both models."""
    from sparseprefill.adapters.huggingface import attach

    stock, gated = pair(layers)
    ids = torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(1))
    with attach(gated, "streaming", gate=from_length(1 << 20, **HEADS)) as handle:
        turns = [(_timed(stock, ids), _timed(gated, ids)) for _ in range(rounds + 20)][20:]
    report = handle.report()
    if any(layer.dense_calls != layer.calls or not layer.calls for layer in report.layers):
        raise RuntimeError(f"not all calls ran dense:\n{report}")
    added = median(ours - theirs for theirs, ours in turns)
    return Overhead(layers, tokens, rounds, 1e3 * median(theirs for theirs, _ in turns), 1e3 * added)


def _timed(model: Any, ids: torch.Tensor) -> float:
    start = time.process_time()
    model(ids)
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(given.layers, given.tokens, given.rounds)
    print(json.dumps(asdict(found)) if given.json else found)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
