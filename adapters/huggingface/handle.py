"""Handle: one model's attachment, and how to undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

from attrs import Factory, define, field
from transformers import PreTrainedModel

from sparseprefill.errors import AttachError

from ..session.report import Report
from .attention import register
from .drafts import decoding
from .hooks import install
from .state import Attachment, Original, attachments
from .switch import LOCK, Switch, claim
from .unread import Reader


@define(eq=False, repr=False)
class Handle(Attachment):
    """A model whose prefill runs through a pipeline, until `detach` or the end of the ``with`` block.

    session: the rules for when the pipeline runs, and the record of what happened. name: under which transformers runs
    the model's attention while it is attached. active: whether it is.
    """

    _blocks: int = field(default=0, init=False)
    _host: str = field(default=Factory(lambda self: type(self.model).__name__, takes_self=True), init=False)

    def bind(self) -> None:
        """Hook the decoder and switch it, so that its next forwards run through the pipeline; nothing if they do.

        Forwards that run already end as they began. Raises AttachError if the model is gone or attached by another
        handle, or does not switch.
        """
        decoder = self.decoder
        with LOCK:
            if self.active:
                return
            if decoder is None:
                raise AttachError("the model is gone: nothing holds it any more; load it again and attach that")
            claim(decoder)
            switch = Switch.of(decoder)
            self.original = Original.of(decoder)
            name = register(self.original, self.session.min_query)
            try:
                model = self.model
                self.reader = None if self.last is None or model is None else Reader.of(model, decoder)
                self.hooks = self.hooks or install(self, decoder)
                switch.take(self, decoder, name)
            except BaseException:
                self.switch = switch
                self.end()
                raise
            self.begin(decoder, name, switch)

    def detach(self) -> None:
        """Restore the model: new forwards are its own. Further calls do nothing.

        Forwards that run meanwhile, in other threads or around this call, end as they began; the model's configuration
        is switched back when the last of them has ended. An implementation that was set since attaching stays.
        """
        self.end()

    def decoding(self) -> AbstractContextManager[None]:
        """Forwards of the model in this ``with`` block, in this thread, are decoding: they run dense, whatever their
        length. For loops that check drafts of `min_query` tokens or more; `generate` is known without.
        """
        return decoding(self)

    def report(self) -> Report:
        """Report what every layer did, and why (measures densities that wait: host sync); detached, too."""
        return self.session.report(self._host, self.original.name)

    def __enter__(self) -> Self:
        """Attach again, if the handle was detached. Blocks may be nested: the outermost detaches."""
        with LOCK:
            self.bind()
            self._blocks += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with LOCK:
            self._blocks = max(0, self._blocks - 1)
            inside = self._blocks > 0
        if not inside:
            self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.active else "detached"
        return f"<{state}: {self.session.route.name} on {self._host} as {self.name}>"


def handles_of(decoder: PreTrainedModel) -> list[Handle]:
    """The handles by which a decoder is attached now; the last is the newest."""
    return [one for one in attachments() if isinstance(one, Handle) and one.active and one.decoder is decoder]


@contextmanager
def replacing(decoder: PreTrainedModel) -> Iterator[None]:
    """Detach whatever the decoder is attached by; attach that again if the block fails."""
    before = handles_of(decoder)
    for one in before:
        one.detach()
    try:
        yield
    except BaseException:
        for one in before:
            one.bind()
        raise
