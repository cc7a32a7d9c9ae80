"""Calls as the oracles take them: float64 tensors and plain options, by name."""

from __future__ import annotations

from typing import Any

import torch


def call(seed: int, heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 1, **options: Any) -> dict[str, Any]:
    """float64 q, k, v and the options, as the oracle takes them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": (heads[0], q_len, 8), "k": (heads[1], kv_len, 8), "v": (heads[1], kv_len, 6)}
    made = {
        name: torch.randn(batch, *size, generator=generator, dtype=torch.float64) * 1.5 for name, size in sizes.items()
    }
    return made | options


def padded(seed: int, kv_len: int, share: float, starts: list[float], ends: list[float]) -> dict[str, Any]:
    """A batch of two rows, padded left and right."""
    first = [int(start * kv_len) for start in starts]
    lengths = [round(end * (kv_len - begin)) for begin, end in zip(first, ends, strict=True)]
    return call(seed, (2, 1), max(1, round(share * kv_len)), kv_len, 2, starts=first, lengths=lengths)
