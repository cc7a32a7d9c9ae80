"""Handle: one model's attachment, and how to undo it."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel

from sparseprefill.errors import AttachError

from ..session.report import Report
from ..session.session import Session
from .attention import register
from .drafts import decoding
from .hooks import install
from .state import Attachment, Original
from .switch import LOCK, Switch, claim, named_before


class Handle:
    """A model whose prefill runs through a pipeline, until `detach` or the end of the ``with`` block.

    Holds the model weakly: the model keeps its attachment, and a model that is dropped takes it along. only: the one
    thread whose forwards run so; None for all. last: the layer whose rows are left out that nobody reads.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decoder: PreTrainedModel,
        session: Session,
        only: threading.Thread | None = None,
        last: int | None = None,
    ) -> None:
        self.state = Attachment.of(decoder, session, only, last)
        self._host = type(model).__name__
        self._model = None if last is None else weakref.ref(model)

    @property
    def session(self) -> Session:
        """The rules for when the pipeline runs, and the record of what happened."""
        return self.state.session

    @property
    def name(self) -> str:
        """Under which transformers runs the model's attention while it is attached."""
        return self.state.name

    @property
    def active(self) -> bool:
        """Whether the model is attached."""
        return self.state.active

    def bind(self) -> None:
        """Hook the decoder and switch it, so that its next forwards run through the pipeline; nothing if they do.

        Forwards that run already end as they began. Raises AttachError if the model is gone or attached by another
        handle, or does not switch.
        """
        state, decoder = self.state, self.state.decoder
        with LOCK:
            if state.active:
                return
            if decoder is None:
                raise AttachError("the model is gone: nothing holds it any more; load it again and attach that")
            claim(decoder)
            switch = Switch.of(decoder)
            state.original = Original(str(named_before(decoder.config._attn_implementation)))
            name = register(state.original, state.session.min_query)
            try:
                state.hooks = state.hooks or install(state, decoder, None if self._model is None else self._model())
                switch.take(state, name)
            except BaseException:
                state.switch = switch
                state.end()
                raise
            state.begin(name, switch)

    def detach(self) -> None:
        """Restore the model: new forwards are its own. Further calls do nothing.

        Forwards that run meanwhile, in other threads or around this call, end as they began; the model's configuration
        is switched back when the last of them has ended. An implementation that was set since attaching stays.
        """
        self.state.end()

    def decoding(self) -> AbstractContextManager[None]:
        """Forwards of the model in this ``with`` block, in this thread, are decoding: they run dense, whatever their
        length. For loops that check drafts of `min_query` tokens or more; `generate` is known without.
        """
        return decoding(self.state)

    def report(self) -> Report:
        """What every layer did, and why (measures densities that wait: host sync). Works after detaching, too."""
        return self.session.report(self._host, self.state.original.name)

    def __enter__(self) -> Self:
        """Attach again, if the handle was detached."""
        self.bind()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.active else "detached"
        return f"<{state}: {self.session.route.name} on {self._host} as {self.name}>"
