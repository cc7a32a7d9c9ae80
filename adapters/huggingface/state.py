"""What an attached model's attention, mask and hooks share, with the handle that made it."""

from __future__ import annotations

import weakref

import torch
from attrs import define, field
from transformers import PreTrainedModel

from ..session.session import Session
from .original import Original


@define(eq=False)
class Attachment:
    """One model's attachment. Holds the model weakly: the model's hooks keep the attachment, and it goes with them.

    name: under which both functions are registered with transformers. active: whether prefill runs through the session.
    """

    session: Session
    original: Original
    name: str
    active: bool = field(default=False, init=False)
    _decoder: weakref.ref[PreTrainedModel]
    _modules: weakref.WeakSet[torch.nn.Module]

    @classmethod
    def of(cls, decoder: PreTrainedModel, session: Session, name: str) -> Attachment:
        """Of a decoder that is not switched yet."""
        original = Original(str(decoder.config._attn_implementation))
        return cls(session, original, name, weakref.ref(decoder), weakref.WeakSet(decoder.modules()))

    @property
    def decoder(self) -> PreTrainedModel | None:
        """The decoder, None where the model is gone."""
        return self._decoder()

    def owns(self, module: torch.nn.Module) -> bool:
        """Whether the module belongs to the attached decoder; models built from one config share its functions."""
        return module in self._modules

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether a hook speaks of the attached decoder, and not of a copy of it."""
        return self.active and module is self._decoder()
