"""Parts of an attention, each over its own keys, merged over the ranks of a process group: one buffer, one collective.

A rank sends, for each token and head, its output and its log-sum-exp side by side in float32: 4 (d + 1) bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LARGE = 32 << 20
"""Bytes of all ranks' parts from which each rank merges a share of the rows, instead of every rank all of them."""


class Exchange(Protocol):
    """The collectives that merging needs, on contiguous tensors. Every rank calls them in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """``[R, *x.shape]``: every rank's x, in the order of ranks."""
        ...

    def swap(self, x: Tensor) -> Tensor:
        """x ``[R, ...]``: slice r goes to rank r; returns the slices that came, in the order of ranks."""
        ...


def pack(out: Tensor, lse: Tensor) -> Tensor:
    """Output ``[..., D]`` and LSE ``[...]`` as one float32 tensor ``[..., D + 1]``."""
    return torch.cat([out.to(torch.float32), lse.to(torch.float32)[..., None]], -1)


def weigh(parts: Tensor) -> Tensor:
    """Packed parts ``[R, ..., D + 1]`` as one output ``[..., D]``, float32 (equations 3 and 4).

    A softmax over the parts' log-sum-exps is the weight of each: shifted by their maximum, so nothing overflows. A part
    without keys has LSE -inf, output 0 and weight 0; where no part has any, the output is 0.
    """
    weights = torch.softmax(parts[..., -1].clamp_min(torch.finfo(torch.float32).min), 0)
    return (parts[..., :-1] * weights[..., None]).sum(0)


def merge(parts: Tensor) -> tuple[Tensor, Tensor]:
    """`weigh`, and the LSE ``[...]`` over all parts, -inf where none has a key."""
    return weigh(parts), torch.logsumexp(parts[..., -1], 0)


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` of two parts of one rank, in half as many launches; 0 and -inf where neither has a key."""
    lse, other_lse = lse.to(torch.float32), other_lse.to(torch.float32)
    share = torch.sigmoid(other_lse - lse).nan_to_num_()  # NaN: -inf minus -inf
    joined = torch.lerp(out.to(torch.float32), other.to(torch.float32), share[..., None])
    return joined, torch.logaddexp(lse, other_lse)


def exchange(ranks: Exchange, part: Tensor, *, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Merge this rank's packed part ``[..., D + 1]`` with those of the others: output ``[..., D]`` and LSE ``[...]`` in
    float32, bit for bit the same on every rank.

    One all-gather; for `LARGE` parts, as of a long question on many ranks, an exchange of rows and a gather of what was
    merged, so that bytes and memory do not grow with the number of ranks. lse: whether it is wanted, else None.
    """
    if ranks.size == 1 or ranks.size * part.numel() * part.element_size() <= LARGE:
        parts = part[None] if ranks.size == 1 else ranks.gather(part)
        return merge(parts) if lse else (weigh(parts), None)
    width = part.shape[-1]
    rows = part.reshape(-1, width)
    share = -(-rows.shape[0] // ranks.size)
    padded = rows.new_zeros(ranks.size * share, width)
    padded[: rows.shape[0]] = rows
    mine = pack(*merge(ranks.swap(padded.view(ranks.size, share, width))))
    whole = ranks.gather(mine).view(-1, width)[: rows.shape[0]].view(part.shape)
    return whole[..., :-1], whole[..., -1]
