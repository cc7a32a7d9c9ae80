"""Autocast: attention runs in its type, and nothing of ours is rounded to it by the way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type in which autocast lets attention run on a device; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def lowered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as autocast casts them; themselves where it is off."""
    dtype = autocast_type(q.device)
    if dtype is None:
        return q, k, v
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Within, autocast is off on a device: it would round an estimator's sums, and an executor's."""
    return nullcontext() if autocast_type(device) is None else torch.autocast(device.type, enabled=False)
