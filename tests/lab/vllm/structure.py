"""Queries and keys of made-up heads in place of the model's own, in whatever backend computes the attention.

Random weights give attention without any structure: nothing is sparse there, and a method has nothing to find. Hooks
in front of the attention layers hand them the made-up ones, row by row as the chunks of one prompt come; the layers'
own values stay. The work is that of a model whose layers look so, and the text that comes out means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from lab.bench.shape import ModelShape


@define(eq=False)
class Structure:
    """What the hooks hand out. heads: whether to hand out anything; without, they count steps alone."""

    shape: ModelShape
    device: torch.device
    heads: bool = True
    seed: int = 0
    steps: int = field(default=0, init=False)
    _made: dict[int, tuple[Tensor, Tensor]] = field(factory=dict, init=False)
    _given: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    _at: dict[str, int] = field(factory=dict, init=False)

    def tensors(self, tokens: int) -> tuple[Tensor, Tensor]:
        """q ``[1, Hq, N, D]`` and k ``[1, Hkv, N, D]`` of a prompt of so many tokens, token-major; made once."""
        if tokens not in self._made:
            self._made[tokens] = self.shape.structured(tokens, self.device, self.seed)
        return self._made[tokens]

    def begin(self, tokens: int) -> None:
        """A prompt of so many tokens is next, alone."""
        self._given = None
        if self.heads:
            q, k = (x[0].transpose(0, 1).flatten(1) for x in self.tensors(tokens))
            self._given = q, k
        self._at.clear()
        self.steps = 0

    def fit(self, model: torch.nn.Module) -> None:
        """Put the hooks in front of a model's attention layers."""
        for module in model.modules():
            if hasattr(module, "layer_name") and hasattr(module, "impl"):
                module.register_forward_pre_hook(self._hand)

    def _hand(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """q, k and v of a step's rows, ``[rows, heads * D]``, as the layer is about to get them."""
        name, rows = str(module.layer_name), int(args[0].shape[0])
        begin = self._at.get(name, 0)
        self._at[name] = begin + rows
        self.steps += next(iter(self._at)) == name
        if self._given is None or begin + rows > self._given[0].shape[0]:
            return args
        q, k = (x[begin : begin + rows] for x in self._given)
        return _own(q, args[0].shape[1]), _own(k, args[1].shape[1]), *args[2:]


def _own(x: Tensor, width: int) -> Tensor:
    """The columns of this process's heads, of x ``[rows, heads * D]``: tensor parallelism gives each so many."""
    first = width * (dist.get_rank() if dist.is_initialized() else 0)
    return x[:, first : first + width]
