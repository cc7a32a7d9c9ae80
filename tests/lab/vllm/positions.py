"""Queries and keys of made-up heads for batches of several prompts, chosen by the position of each token alone.

`Structure` follows one prompt chunk by chunk. Here a step may hold chunks of several prompts and rows that decode, so
each row gets the made-up query and key of its token's position, whatever its prompt. Prompts then have the same
attention up to their ends; their values stay the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from lab.bench.shape import ModelShape


@define(eq=False)
class Positions:
    """What the hooks hand out. tokens: of the longest prompt with its answer. heads: whether to hand out anything."""

    shape: ModelShape
    device: torch.device
    tokens: int
    heads: bool = True
    seed: int = 0
    _made: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    _step: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """q ``[tokens, Hq * D]`` and k ``[tokens, Hkv * D]``, made once."""
        if self._made is None:
            q, k = self.shape.structured(self.tokens, self.device, self.seed)
            self._made = q[0].transpose(0, 1).flatten(1), k[0].transpose(0, 1).flatten(1)
        return self._made

    def fit(self, model: torch.nn.Module) -> None:
        """Put the hooks in front of a model and of its attention layers."""
        if not self.heads:
            return
        self.tensors()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for module in model.modules():
            if hasattr(module, "layer_name") and hasattr(module, "impl"):
                module.register_forward_pre_hook(self._hand)

    def _begin(self, _: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A step begins: its rows' queries and keys, the same for all layers. Rows of padding get any."""
        given: Tensor = named["positions"] if "positions" in named else args[1]
        rows = given.clamp(0, self.tokens - 1)
        q, k = self.tensors()
        self._step = q.index_select(0, rows), k.index_select(0, rows)

    def _hand(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """q, k and v of a step's rows, ``[rows, heads * D]``, as the layer is about to get them."""
        if self._step is None or self._step[0].shape[0] != args[0].shape[0]:
            return args
        q, k = self._step
        return (q, k, *args[2:])
