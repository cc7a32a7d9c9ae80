"""Autocast: attention runs in its type, and nothing of ours is rounded to it by the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type in which autocast lets attention run on a device; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def autocast_off(like: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within, autocast is off on the tensor's device; gives what casts queries, keys and values as it does.

    An estimator's sums, and an executor's, are no operations of the model: autocast would round them.
    """
    dtype = autocast_type(like.device)
    if dtype is None:
        yield _same
        return
    with torch.autocast(like.device.type, enabled=False):
        yield lambda x: x if x.dtype == torch.float64 else x.to(dtype)


def _same(x: Tensor) -> Tensor:
    return x
