"""The host's own attention: what decoding, fallbacks and detached models run, in which type, and outside graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from attrs import Factory, field, frozen
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masks import MaskFunction

P = ParamSpec("P")
T = TypeVar("T")


@frozen
class Original:
    """An implementation by the name that transformers knows it by, such as ``sdpa`` or ``eager``."""

    name: str
    applies_extras: bool = field(default=Factory(lambda self: "sdpa" not in self.name, takes_self=True), init=False)
    """Whether it honours softcap and sinks; sdpa drops both in silence, and equality means to drop them too."""

    def attention(self, module: torch.nn.Module) -> Any:
        """Its attention function for this module; ``eager`` is the one in the file of the module's class."""
        for owner in type(module).__mro__:
            file = sys.modules.get(owner.__module__)
            eager = getattr(file, "eager_attention_forward", None)
            if eager is not None:
                registry = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
                return registry.get_interface(self.name, eager)
        return ALL_ATTENTION_FUNCTIONS[self.name]

    def mask(self) -> MaskFunction | None:
        """Its mask function; None for an implementation that takes no mask."""
        found: MaskFunction | None = ALL_MASK_ATTENTION_FUNCTIONS.get(self.name)
        return found


def eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` outside of compiled graphs: context variables and weak references cannot be traced."""
    return cast(Callable[P, T], torch.compiler.disable(function))


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
