"""The keys of the tokens behind the context, which one rank keeps: batch rows of unequal length, aligned at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor


@define(eq=False)
class Tail:
    """One layer's k ``[B, Hkv, T, D]`` and v since the end of the context; of row b the `counts[b]` last are real."""

    k: Tensor | None = None
    v: Tensor | None = None
    counts: tuple[int, ...] = ()

    def append(self, k: Tensor, v: Tensor, real: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Add new tokens, of which the `real[b]` last ones of row b are no padding; returns all keys and values."""
        if self.k is None or self.v is None:
            self.k, self.v, self.counts = k, v, tuple(real)
            return k, v
        if min(real) == k.shape[2]:
            self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        else:
            self.k, self.v = _joined(self.k, self.counts, k, real), _joined(self.v, self.counts, v, real)
        self.counts = tuple(old + new for old, new in zip(self.counts, real, strict=True))
        return self.k, self.v

    def starts(self, device: torch.device) -> Tensor | None:
        """int32 ``[B]``: first real slot of each row; None where all slots are real."""
        if self.k is None or min(self.counts) == self.k.shape[2]:
            return None
        return torch.tensor([self.k.shape[2] - count for count in self.counts], dtype=torch.int32, device=device)

    def keep(self, counts: Sequence[int]) -> None:
        """Drop all but the first `counts[b]` tokens of each row."""
        if self.k is None or self.v is None or tuple(counts) == self.counts:
            return
        self.k, self.v = _first(self.k, self.counts, counts), _first(self.v, self.counts, counts)
        self.counts = tuple(counts)


def _joined(x: Tensor, old: Sequence[int], y: Tensor, new: Sequence[int]) -> Tensor:
    width = max(a + b for a, b in zip(old, new, strict=True))
    out = x.new_zeros(x.shape[0], x.shape[1], width, x.shape[3])
    for row, (a, b) in enumerate(zip(old, new, strict=True)):
        out[row, :, width - a - b : width - b] = x[row, :, x.shape[2] - a :]
        out[row, :, width - b :] = y[row, :, y.shape[2] - b :]
    return out


def _first(x: Tensor, old: Sequence[int], kept: Sequence[int]) -> Tensor:
    width = max(*kept, 1)
    out = x.new_zeros(x.shape[0], x.shape[1], width, x.shape[3])
    for row, (a, b) in enumerate(zip(old, kept, strict=True)):
        begin = x.shape[2] - a
        out[row, :, width - b :] = x[row, :, begin : begin + b]
    return out
