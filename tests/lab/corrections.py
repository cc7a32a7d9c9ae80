"""What a corrector brings: `python -m lab.corrections`, run in tests, prints the table.

The embedded model's own queries, keys and values on one of its prompts, all layers. Of each method the density, and the
relative error of the output against dense attention, alone and with each corrector, over the heads of all layers; then
the time of the correction beside that of the method. `python -m lab.corrections fidelity` attaches each to the
model instead, and prints what it does to the next token: KL divergence, and how often the most likely token stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from attrs import frozen
from sparseprefill.adapters.demo.model import load_model, load_tokenizer
from sparseprefill.adapters.demo.tasks import key_value_prompts
from sparseprefill.adapters.evaluation.comparison import Comparison
from sparseprefill.adapters.evaluation.outcome import Contender, pooled
from sparseprefill.adapters.evaluation.prompts import Prompt
from torch import Tensor

import sparseprefill as sp
from lab.frontier.layers import layer_calls
from sparseprefill.executors.dense import dense

METHODS: Mapping[str, Mapping[str, Any]] = {
    "streaming": {"sink": 128, "window": 256},
    "bfla": {"local_tiles": 1},
    "xattention": {"threshold": 0.8},
    "vertical-slash": {"gamma": 0.8},
}
"""Of each method parameters that keep it at about a tenth of the pairs."""
CORRECTORS: Mapping[str, sp.Corrector | None] = {
    "alone": None,
    "proxy": sp.Proxy(),
    "proxy, tiles of 32": sp.Proxy(tile=32),
    "delta": sp.Delta(),
    "delta, every 16th": sp.Delta(gamma=16),
}


@frozen
class Reading:
    """What a method makes of all layers: density, and by corrector the relative error and the seconds."""

    method: str
    density: float
    errors: tuple[float, ...]
    seconds: tuple[float, ...]


@frozen(eq=False)
class Trial:
    """The calls of one prompt."""

    tokens: int = 8192
    seed: int = 0

    @cached_property
    def calls(self) -> Sequence[sp.AttentionCall]:
        """One of each layer."""
        model = load_model(torch.float32, torch.device("cpu"))
        ids = torch.tensor(key_value_prompts(load_tokenizer(), self.tokens, 1, self.seed))
        return tuple(layer_calls(model, ids))

    @cached_property
    def truth(self) -> Sequence[Tensor]:
        """Dense attention of each."""
        return [dense(call, sp.AutoExecutor()).out for call in self.calls]

    def read(self, name: str, parameters: Mapping[str, Any]) -> Reading:
        """A method with every corrector, over one plan of each layer."""
        pipeline = sp.build(name, **parameters)
        wrong, seconds, density = [0.0] * len(CORRECTORS), [0.0] * len(CORRECTORS), 0.0
        norm = sum(float(x.double().square().sum()) for x in self.truth)
        for call, truth in zip(self.calls, self.truth, strict=True):
            memory = sp.Memory()
            plan = pipeline.plan(call, memory)
            begin = perf_counter()
            result = pipeline.executor.execute(call, plan)
            took = perf_counter() - begin
            density += result.density / len(self.calls)
            for i, corrector in enumerate(CORRECTORS.values()):
                begin = perf_counter()
                made = result if corrector is None else corrector.correct(call, plan, result, memory)
                seconds[i] += took if corrector is None else perf_counter() - begin
                wrong[i] += float((made.out.double() - truth.double()).square().sum())
        return Reading(name, density, tuple((x / norm) ** 0.5 for x in wrong), tuple(seconds))

    def readings(self) -> Iterator[Reading]:
        """Of every method."""
        for name, parameters in METHODS.items():
            yield self.read(name, parameters)


def table(trial: Trial) -> str:
    """A row for each method, errors and then seconds."""
    names = list(CORRECTORS)
    lines = [f"| Method | Density | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    found = list(trial.readings())
    lines += [f"| {one.method} | {one.density:.3f} | {' | '.join(f'{x:.3f}' for x in one.errors)} |" for one in found]
    lines += ["", f"| Method | execution | {' | '.join(names[1:])} |", "|---" * (1 + len(names)) + "|"]
    lines += [f"| {one.method} | {' | '.join(f'{x:.2f} s' for x in one.seconds)} |" for one in found]
    return "\n".join(lines)


def fidelity(tokens: int = 8192, prompts: int = 2) -> str:
    """A row for each method and corrector: the model's own next tokens against dense, a dense tail of 64 rows."""
    model = load_model(torch.float32, torch.device("cpu"))
    ids = key_value_prompts(load_tokenizer(), tokens, prompts, 1)
    against = [Comparison.of(model, Prompt(str(n), tuple(one))) for n, one in enumerate(ids)]
    lines = ["| Method | Corrector | KL | worst | same token |", "|---" * 5 + "|"]
    for name, parameters in METHODS.items():
        for words in ("alone", "proxy", "delta"):
            pipeline = sp.build(name, **parameters).with_corrector(CORRECTORS[words])
            found = [one.run(Contender(name, pipeline, dense_tail=64)).fidelity for one in against]
            all_ = pooled([one.end for one in found if one is not None])
            lines.append(f"| {name} | {words} | {all_.kl:.5f} | {all_.worst:.3f} | {all_.agreement:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    given = sys.argv[1:]
    shown = fidelity(*map(int, given[1:3])) if given[:1] == ["fidelity"] else table(Trial(*map(int, given[:2])))
    print(shown)  # noqa: T201
