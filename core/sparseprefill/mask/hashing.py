"""An integer hash with the same bits on every device: 32-bit words in int64 tensors, no product above 2^63."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

WORD = 0xFFFFFFFF
STRIDE, RANDOM = 1, 2
"""What a seed is used for: refiners of one seed do not choose alike."""

Word = TypeVar("Word", int, Tensor)


def mix(x: Word) -> Word:
    """A bijection of 32-bit words in which every input bit moves every output bit with probability about 1/2."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def fold(state: Word, word: Word) -> Word:
    """The hash of one word more."""
    return mix(((state ^ (word & WORD)) + 0x9E3779B9) & WORD)


@cache
def begin(use: int, seed: int, layer: int) -> int:
    """The hash of what all tiles of a layer have in common."""
    state = 0
    for word in (use, seed & WORD, seed >> 32, layer):
        state = fold(state, word)
    return state


def row_hash(geometry: Geometry, tile_q: int, state: int, first_head: int = 0) -> Tensor:
    """int64 ``[B, Hq, R]``: hash of (state, head, index of the query tile on its row's grid).

    first_head: number among the layer's heads of the first one here.
    """
    head = first_head + torch.arange(geometry.heads, device=geometry.device)
    heads = fold(torch.full_like(head, state), head)
    return fold(heads[None, :, None], geometry.tiles(tile_q)[:, None])


def below(states: Tensor, columns: int, bound: int, entries: int = 1 << 22) -> Tensor:
    """bool ``[B, Hq, R, columns]``: where the hash of (state, column) is below `bound`, in chunks of query tiles."""
    column = torch.arange(columns, device=states.device)
    step = max(1, entries // max(1, states.shape[0] * states.shape[1] * columns))
    return torch.cat([fold(part[..., None], column) < bound for part in states.split(step, dim=2)], dim=2)
