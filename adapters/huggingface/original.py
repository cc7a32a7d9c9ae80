"""The host's own attention: what decoding, fallbacks and detached models run."""

from __future__ import annotations

import sys
from typing import Any

import torch
from attrs import Factory, field, frozen
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masks import Compact, MaskFunction, decode, rebuild


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

    def dense(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]
    ) -> Any:
        """Its attention for a call whose mask is compact."""
        compact = decode(mask)
        return self.dense_with(module, query, key, value, self.expand(module, query, compact), compact.used, kwargs)

    def expand(self, module: torch.nn.Module, query: Tensor, compact: Compact) -> Any:
        """The mask in its own format."""
        make = self.mask()
        config = getattr(module, "config", None)
        return None if make is None else rebuild(compact, make, query.shape[2], query.dtype, config)

    def dense_with(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        used: int,
        kwargs: dict[str, Any],
    ) -> Any:
        """Its attention over the `used` first keys with a mask in its own format."""
        return self.attention(module)(module, query, *first_keys(used, key, value), mask, **kwargs)


def first_keys(used: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The `used` first keys and values; the tensors themselves where all slots are in use."""
    return (key, value) if used == key.shape[2] else (key[:, :, :used], value[:, :, :used])
