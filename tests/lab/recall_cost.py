"""What measuring recall costs: `python -m lab.recall_cost` (from tests/) times it beside a prefill.

A model of Llama-3-8B's shape with random weights, whose attention runs on made-up heads (`lab/bench/ttft`),
prefills one prompt, unmeasured. Then the measuring of one of its layers is timed by itself, until its figures are on
their way to the host. 32 layers and 32,768 tokens on a GPU; on a CPU one layer and 4,096 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from attrs import asdict, frozen
from sparseprefill.adapters.session.watch import RECALL_EVERY, RecallWatch

import sparseprefill as sp
from lab.bench.clock import Clock
from lab.bench.shape import ModelShape
from lab.bench.ttft import injected


@frozen
class RecallCost:
    """prefill: milliseconds of the model. measuring: milliseconds of all its layers. density: of the method."""

    method: str
    layers: int
    tokens: int
    density: float
    prefill: float
    measuring: float

    @property
    def share(self) -> float:
        """Of the prefill that is measured."""
        return self.measuring / self.prefill

    def __str__(self) -> str:
        sizes = f"{self.method}, {self.layers} layers, {self.tokens} tokens, density {self.density:.3f}"
        found = f"prefill {self.prefill:.1f} ms, measuring its recall {self.measuring:.2f} ms"
        return f"{sizes}: {found} ({self.share:.2%}; 1 in {RECALL_EVERY}: {self.share / RECALL_EVERY:.4%})"


@torch.inference_mode()
def measure(shape: ModelShape, tokens: int, method: str, clock: Clock) -> RecallCost:
    """Time both."""
    from sparseprefill.adapters.huggingface import attach

    model: Any = shape.build(tokens, clock.device)
    ids = torch.randint(2, shape.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(clock.device)
    q, k = shape.structured(tokens, clock.device)
    route = injected(sp.build(method), (q, k))
    with attach(model, route, gate=None, verify=False, strict=True, recall_every=0) as handle:
        prefill = clock.median(lambda: model(ids, use_cache=False, logits_to_keep=1))
    density = handle.report().density
    if density is None:
        raise RuntimeError(f"nothing ran sparse:\n{handle.report()}")
    call = sp.AttentionCall(q, k, torch.randn_like(k))
    result, watch = sp.build(method).with_tail(handle.report().tail).run(call), RecallWatch(method, 1)
    one = clock.median(lambda: watch.measure(call, result))
    return RecallCost(method, shape.layers, tokens, density, 1e3 * prefill, 1e3 * one * shape.layers)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--method", default="bfla")
    parser.add_argument("--tokens", type=int, default=32768 if cuda else 4096)
    parser.add_argument("--layers", type=int, default=32 if cuda else 1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    shape = ModelShape(layers=given.layers, dtype="bfloat16" if cuda else "float32")
    found = measure(shape, given.tokens, given.method, Clock(torch.device("cuda" if cuda else "cpu"), budget=10.0))
    print(json.dumps(asdict(found)) if given.json else found)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
