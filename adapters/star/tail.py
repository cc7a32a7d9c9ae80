"""The keys of the tokens behind the context, which one rank keeps: batch rows of unequal length, aligned at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor
from torch.nn import functional


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
            self.k, self.v = (
                _aligned([torch.cat(pair, 1) for pair in zip(_rows(x, self.counts), _rows(new, real), strict=True)])
                for x, new in ((self.k, k), (self.v, v))
            )
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
        self.k, self.v = (
            _aligned([row[:, :count] for row, count in zip(_rows(x, self.counts), counts, strict=True)])
            for x in (self.k, self.v)
        )
        self.counts = tuple(counts)


def _rows(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The last `counts[b]` tokens of each row, ``[Hkv, n, D]``."""
    return [row[:, x.shape[2] - count :] for row, count in zip(x, counts, strict=True)]


def _aligned(rows: Sequence[Tensor]) -> Tensor:
    """Rows of unequal length as one tensor, zeros in front of the shorter."""
    width = max(1, *(row.shape[1] for row in rows))
    return torch.stack([functional.pad(row, (0, 0, width - row.shape[1], 0)) for row in rows])
