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
from .state import Attachment

PREFIX = "sparseprefill_"
_numbers = itertools.count()


class Handle:
    """A model whose prefill runs through a pipeline, until `detach` or the end of the ``with`` block.

    Holds the model weakly: the model keeps its handle, and a model that is dropped takes it along.
    """

    def __init__(self, model: torch.nn.Module, decoder: PreTrainedModel, session: Session) -> None:
        self.state = Attachment.of(decoder, session, f"{PREFIX}{next(_numbers)}")
        self._host = type(model).__name__
        self._before = implementations(decoder)
        self._hooks: list[Any] = []

    @property
    def session(self) -> Session:
        """The rules for when the pipeline runs, and the record of what happened."""
        return self.state.session

    @property
    def name(self) -> str:
        """Under which the attention function is registered with transformers."""
        return self.state.name

    @property
    def active(self) -> bool:
        """Whether the model is attached."""
        return self.state.active

    def bind(self) -> None:
        """Register both functions, switch the decoder to them, hook its forward. AttachError if it does not switch."""
        state, decoder, ref = self.state, self.state.decoder, weakref.ref(self.state)
        if decoder is None:
            raise AttachError("the model is gone")
        AttentionInterface.register(state.name, make_attention(ref, state.original, state.session.min_query))
        AttentionMaskInterface.register(state.name, make_mask(ref, state.original, state.session.min_query))
        state.active = True
        try:
            decoder.set_attn_implementation(state.name)
            if decoder.config._attn_implementation != state.name:
                raise AttachError(f"{type(decoder).__name__} did not accept another attention implementation")
            self._hooks = install(state, decoder)
        except BaseException:
            self.detach()
            self.forget()
            raise

    def detach(self) -> None:
        """Restore the model. Further calls do nothing.

        The name stays registered and runs the host's own attention, for copies made of the model while attached.
        """
        self.state.active = False
        while self._hooks:
            self._hooks.pop().remove()
        while self._before:
            config, name = self._before.pop()
            config._attn_implementation_internal = name

    def forget(self) -> None:
        """Take the name out of both registries; only where no copy of the model can use it."""
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)

    def report(self) -> Report:
        """What every layer did, and why (measures densities that wait: host sync). Works after detaching, too."""
        return self.session.report(self._host, self.state.original.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.active else "detached"
        return f"<{state}: {self.session.route.name} on {self._host} as {self.name}>"
