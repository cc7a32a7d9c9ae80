"""Rotary embedding of made-up queries and keys, and noise for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.errors import ParameterError

THETA, TRAINED = 500_000.0, 8192
"""Base of Llama 3, and the length that it was made for."""
LEAST = 32
FASTEST, SLOWEST = 1.0, 1 / 2048
"""Radians per token of the pairs that tell positions apart."""
STILL = 0.25
"""Radians that a pair may turn over the whole prompt and count as still."""
POOL = 4096
HOST = torch.device("cpu")
FLOATS: Any = {"dtype": torch.float32, "device": HOST}
"""Of tensors drawn from a CPU generator, whatever torch's defaults are."""


@frozen(eq=False)
class Rotary:
    """Angles of the pairs (f, f + D/2) of a head dimension D. speeds: float64 ``[D/2]``, radians per token."""

    speeds: Tensor

    @classmethod
    def of(cls, head_dim: int, tokens: int) -> Rotary:
        """Pairs of a head dimension, by Llama 3's base, stretched for longer prompts as NTK-aware scaling does."""
        if head_dim < LEAST or head_dim % 2:
            raise ParameterError(f"head_dim is {head_dim}: pass an even number >= {LEAST}")
        base = THETA * max(1.0, tokens / TRAINED) ** (head_dim / (head_dim - 2))
        return cls(base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=HOST) / head_dim))

    @property
    def fast(self) -> Tensor:
        """bool ``[D/2]``: the pairs that tell positions apart."""
        return (self.speeds <= FASTEST) & (self.speeds >= SLOWEST)

    def still(self, tokens: int, least: int) -> Tensor:
        """bool ``[D/2]``: pairs that hardly turn over so many tokens, at least `least` of them."""
        count = max(least, int((self.speeds * tokens <= STILL).sum()))
        return torch.arange(len(self.speeds), device=HOST) >= len(self.speeds) - count

    def angles(self, first: int, last: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 ``[n, D/2]``, of the positions from `first` to before `last`."""
        return turn(torch.arange(first, last, dtype=torch.float64, device=device)[:, None] * self.speeds.to(device))


def turn(radians: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32."""
    return torch.cos(radians).float(), torch.sin(radians).float()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``[*, D]`` turned by the cosine and sine ``[*, D/2]`` of its angles."""
    cos, sin = angles
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@frozen(eq=False)
class Noise:
    """Gaussian rows on a device, cheap and the same on all: each is the sum of two of a pool of rows."""

    pool: Tensor
    source: torch.Generator

    @classmethod
    def of(cls, source: torch.Generator, width: int, device: torch.device | str) -> Noise:
        """A pool of rows of `width`; `source` is a CPU generator."""
        return cls(torch.randn(POOL, width, generator=source, **FLOATS).mul_(math.sqrt(0.5)).to(device), source)

    def __call__(self, rows: int, width: int) -> Tensor:
        """float32 ``[rows, width]`` of unit variance."""
        picked = torch.randint(POOL, (2, rows), generator=self.source, device=HOST).to(self.pool.device)
        pool = self.pool[:, :width]
        return pool[picked[0]] + pool[picked[1]]
