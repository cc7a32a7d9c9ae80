"""An index that lies outside is an error here: `torch.take_along_dim` wraps it without a word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def strict(patch: pytest.MonkeyPatch) -> None:
    """From now on."""
    take = torch.take_along_dim

    def checked(x: Tensor, index: Tensor, dim: int) -> Tensor:
        assert bool(((index >= 0) & (index < x.shape[dim])).all()), f"an index is not in 0 .. {x.shape[dim] - 1}"
        return take(x, index, dim)

    patch.setattr(torch, "take_along_dim", checked)
