"""Handle: one model's attachment, and how to undo it."""

from __future__ import annotations

import itertools
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sparseprefill.errors import AttachError

from ..session.report import Report
from ..session.session import Session
from .attention import make_attention, make_mask
from .hooks import install
from .inspection import implementations
from .original import Original

PREFIX = "sparseprefill_"
_numbers = itertools.count()


class Handle:
    """A model whose prefill runs through a pipeline, until `detach` or the end of the ``with`` block.

    Holds the model weakly: the model keeps its handle, and a model that is dropped takes it along.
    """

    def __init__(self, model: torch.nn.Module, decoder: PreTrainedModel, session: Session) -> None:
        self.session = session
        self.original = Original(str(decoder.config._attn_implementation))
        self.name = f"{PREFIX}{next(_numbers)}"
        self.active = False
        self._host = type(model).__name__
        self._decoder = weakref.ref(decoder)
        self._modules = weakref.WeakSet(decoder.modules())
        self._before = implementations(decoder)
        self._hooks: list[Any] = []

    def bind(self) -> None:
        """Register both functions, switch the decoder to them, hook its forward. AttachError if it does not switch."""
        decoder, ref = self._decoder(), weakref.ref(self)
        if decoder is None:
            raise AttachError("the model is gone")
        AttentionInterface.register(self.name, make_attention(ref, self.original, self.session.min_query))
        AttentionMaskInterface.register(self.name, make_mask(ref, self.original, self.session.min_query))
        self.active = True
        try:
            decoder.set_attn_implementation(self.name)
            if decoder.config._attn_implementation != self.name:
                raise AttachError(f"{type(decoder).__name__} did not accept another attention implementation")
            self._hooks = install(self, decoder)
        except BaseException:
            self.detach()
            self.forget()
            raise

    def owns(self, module: torch.nn.Module) -> bool:
        """Whether the module belongs to the attached decoder; models built from one config share its functions."""
        return module in self._modules

    def detach(self) -> None:
        """Restore the model. Further calls do nothing.

        The name stays registered and runs the host's own attention, for copies made of the model while attached.
        """
        self.active = False
        while self._hooks:
            self._hooks.pop().remove()
        while self._before:
            config, name = self._before.pop()
            config._attn_implementation_internal = name

    def forget(self) -> None:
        """Take the name out of both registries; only where no copy of the model can use it."""
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether a hook speaks of the attached decoder, and not of a copy of it."""
        return self.active and module is self._decoder()

    def report(self) -> Report:
        """What every layer did, and why (measures densities that wait: host sync). Works after detaching, too."""
        return self.session.report(self._host, self.original.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.active else "detached"
        return f"<{state}: {self.session.pipeline.name} on {self._host} as {self.name}>"
