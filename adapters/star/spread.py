"""Spread: a model made ready on every rank, as its contexts use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from .anchor import Keys
    from .attention import Switch
    from .ranks import Ranks


@frozen(eq=False)
class Spread:
    """The model, the ranks that share its contexts, and what switches its attention.

    layers: the attention layers by index, with what their keys are like. fill: token id that stands in for padding.
    """

    model: Any
    ranks: Ranks
    switch: Switch
    layers: dict[int, Keys]
    fill: int
