"""What a recall floor brings beside each method's own knob: `python -m lab.floors`, run in tests, prints the table.

Made-up heads of a whole layer. Of each setting the density, the mean recall of 512 rows spread evenly, few of which a
floor samples, and of these rows the recall that 5 % lie below.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

import sparseprefill as sp
from sparseprefill.testing.heads import head_tensors

METHODS: Mapping[str, tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]] = {
    "streaming": ({"sink": 128, "window": 512}, ({"window": 2048}, {"window": 4096})),
    "bfla": ({}, ({"keep_mass": 0.999}, {"keep_mass": 0.9999})),
    "xattention": ({}, ({"threshold": 0.95}, {"threshold": 0.98})),
    "sample-attention": ({}, ({"alpha_c": 0.98, "alpha_s": 0.98}, {"alpha_c": 0.99, "alpha_s": 0.99})),
    "vertical-slash": ({}, ({"gamma": 0.95}, {"gamma": 0.98})),
}
"""Of each method its parameters, and what its own knob offers."""
TARGETS = (0.8, 0.9, 0.95)


@frozen
class Reading:
    """What a setting keeps, and at which density."""

    setting: str
    density: float
    mean: float
    low: float


@frozen(eq=False)
class Trial:
    """32 query heads over 8 KV heads, as a layer has them. measured: rows whose attention is worked out in full."""

    tokens: int = 16384
    seed: int = 0
    measured: int = 512

    @cached_property
    def call(self) -> sp.AttentionCall:
        """The call."""
        return sp.AttentionCall(*head_tensors(q_len=self.tokens, head_dim=64, seed=self.seed))

    @cached_property
    def rows(self) -> Tensor:
        """int64 ``[n]``: the rows that are measured."""
        return torch.linspace(0, self.tokens - 1, self.measured).round().long()

    @cached_property
    def attention(self) -> Tensor:
        """``[1, 32, n, N]``: their attention over all keys."""
        call, found = self.call, []
        seen = call.geometry.visible(self.rows)[:, None]
        for head in range(call.q.shape[1]):  # one at a time, for memory
            q, k = call.q[:, head : head + 1, self.rows], call.k[:, head // call.group][:, None]
            logits = (q @ k.transpose(-1, -2)) * call.softmax_scale
            found.append(logits.masked_fill_(~seen, -torch.inf).softmax(-1))
        return torch.cat(found, 1)

    def read(self, setting: str, pipeline: sp.Pipeline) -> Reading:
        """What a pipeline's plan keeps; nothing is executed."""
        masks = pipeline.plan(self.call, sp.Memory()).computed()
        keep = masks[0].to_dense(self.rows)
        for mask in masks[1:]:
            keep |= mask.to_dense(self.rows)
        recall = (self.attention * keep).sum(-1)
        return Reading(setting, sum(mask.density for mask in masks), float(recall.mean()), float(recall.quantile(0.05)))

    def readings(self, name: str) -> Iterator[Reading]:
        """A method alone, with more of its own knob, and over floors."""
        own, knobs = METHODS[name]
        yield self.read("alone", _built(name, own))
        for knob in knobs:
            words = ", ".join(f"{key}={value:g}" for key, value in knob.items())
            yield self.read(words, _built(name, {**own, **knob}))
        for target in TARGETS:
            yield self.read(f"recall={target:g}", _built(name, {**own, "recall": target}))


def _built(name: str, parameters: Mapping[str, Any]) -> sp.Pipeline:
    made = sp.build(name, **parameters)
    if not isinstance(made, sp.Pipeline):
        raise TypeError(name)
    return made


def table(trial: Trial) -> str:
    """A row for each setting of each method."""
    lines = ["| Method | Setting | Density | Mean recall | 5 % of the rows below |", "|---" * 5 + "|"]
    for name in METHODS:
        for one in trial.readings(name):
            lines.append(f"| {name} | {one.setting} | {one.density:.3f} | {one.mean:.3f} | {one.low:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Trial(*map(int, sys.argv[1:2]))))  # noqa: T201
