"""The host's own attention: what decoding, fallbacks and detached models run."""

from __future__ import annotations

import sys
from typing import Any

import torch
from attrs import Factory, field, frozen
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masks import MaskFunction


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
