"""Prefills of a model with its own attention and with a contender, timed one after the other.

Other work on the machine slows both, so their ratio stays; how far the stock model's own times lie apart shows whether
any of it means something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from attrs import frozen

from ..huggingface import attach
from .outcome import Contender
from .reading import Reader


@frozen
class SideBySide:
    """Seconds of single prefills of `tokens` tokens: each of stock's with the contender's that came right after it."""

    tokens: int
    stock: tuple[float, ...]
    own: tuple[float, ...]

    @property
    def speed_up(self) -> float:
        """Stock's time over the contender's: the median of all that stand side by side."""
        return median(stock / own for stock, own in zip(self.stock, self.own, strict=True))

    @property
    def figures(self) -> dict[str, Any]:
        """All of it, as plain data."""
        facts = {"tokens": self.tokens, "dense_seconds": list(self.stock), "seconds": list(self.own)}
        return {**facts, "speed_up": self.speed_up}


@torch.inference_mode()
def side_by_side(
    model: Any,
    ids: Sequence[int],
    contender: Contender,
    rounds: int,
    until: float,
    now: Callable[[], float] = time.monotonic,
) -> SideBySide:
    """Time both, `rounds` times or until the time is up, and once at least.

    ids: of the prompt. contender: has a pipeline. until: on the clock of `now`. On a GPU each runs once before, so that
    its kernels are compiled.
    """
    reader = Reader(model)
    prompt = torch.tensor([list(ids)], dtype=torch.int64, device=reader.device)
    stock: list[float] = []
    own: list[float] = []

    def round_() -> tuple[float, float]:
        dense = reader.timed(prompt)[0]
        with attach(model, contender.pipeline, gate=None, tail=contender.dense_tail, recall_every=0, verify=False):
            return dense, reader.timed(prompt)[0]

    if not reader.on_cpu:
        round_()
    while not own or (len(own) < rounds and now() < until):
        for times, found in zip((stock, own), round_(), strict=True):
            times.append(found)
    return SideBySide(len(ids), tuple(stock), tuple(own))
