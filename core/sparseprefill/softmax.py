"""SoftmaxState: a softmax in progress, so that no pair is computed twice and parts can be merged exactly."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.errors import MaskError


@frozen(eq=False)
class SoftmaxState:
    """Unnormalised partial attention: running maximum, sum and weighted values, in natural-log units.

    m: ``[B, Hq, Nq]`` row maximum of the logits so far, -inf where none. l: ``[B, Hq, Nq]`` sum of ``exp(s - m)``.
    acc: ``[B, Hq, Nq, Dv]`` sum of ``exp(s - m) * v``. All float32 (float64 for float64 calls).
    """

    m: Tensor
    l: Tensor  # noqa: E741  (the paper's and FlashAttention's name)
    acc: Tensor

    def __attrs_post_init__(self) -> None:
        if self.m.shape != self.l.shape or self.acc.shape[:-1] != self.m.shape:
            shapes = (tuple(self.m.shape), tuple(self.l.shape), tuple(self.acc.shape))
            raise MaskError(f"SoftmaxState shapes are {shapes}: pass m and l [B, H, N] and acc [B, H, N, Dv]")

    @classmethod
    def empty(cls, shape: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device) -> SoftmaxState:
        """Nothing attended to yet."""
        m = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), torch.zeros(*shape, width, dtype=dtype, device=device))

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """The state over both sets of keys, which must be disjoint. Associative and commutative; -inf safe."""
        m = torch.maximum(self.m, other.m)
        base = torch.where(m.isneginf(), 0.0, m)
        mine, theirs = torch.exp(self.m - base), torch.exp(other.m - base)
        acc = self.acc * mine[..., None] + other.acc * theirs[..., None]
        return SoftmaxState(m, self.l * mine + other.l * theirs, acc)

    def finish(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output ``[B, Hq, Nq, Dv]`` and LSE ``[B, Hq, Nq]`` (natural log, sinks left out; -inf for empty rows).

        sinks: ``[Hq]`` logits that join the denominator of the output.
        """
        lse = torch.where(self.m.isneginf(), -torch.inf, self.m + torch.log(self.l))
        total = self.l
        if sinks is not None:
            base = torch.where(self.m.isneginf(), 0.0, self.m)
            total = total + torch.exp(sinks.to(self.m.dtype)[:, None] - base)
        out = self.acc / torch.where(total == 0, 1.0, total)[..., None]
        return out, lse
