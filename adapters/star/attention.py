"""The attention function of a run, and the model's switch to it and back."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from sparseprefill.call import AttentionCall
from sparseprefill.errors import AttachError, UnsupportedCallError

from ..huggingface.attention import further_tensors, layer_of, not_plain
from ..huggingface.inspection import implementations
from ..huggingface.state import Original
from ..huggingface.switch import STAR

_numbers = itertools.count()


class Phase(Protocol):
    """The present work: a block of the context, or rows of a question and its answer."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Output ``[B, Hq, Nq, Dv]`` of a call over the new tokens alone: their queries, keys and values."""
        ...


class Switch:
    """Runs a decoder's attention through a phase, for as long as the phase lasts; the model is its own otherwise.

    No mask function goes with the name, so transformers makes no masks: a phase knows who sees whom.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.decoder, self.name = decoder, f"{STAR}{next(_numbers)}"
        self.original = Original.of(decoder)
        self._phase: Phase | None = None
        me = weakref.ref(self)

        def attention(
            module: torch.nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, None]:
            switch = me()
            if switch is None or switch._phase is None:
                raise AttachError("this model ran outside of Star Attention's phases: it is a copy made during one")
            call = switch._call(module, query, key, value, kwargs)
            return switch._phase.attend(call).transpose(1, 2).contiguous(), None

        AttentionInterface.register(self.name, attention)
        weakref.finalize(self, AttentionInterface._global_mapping.pop, self.name, None)

    @contextmanager
    def to(self, phase: Phase) -> Iterator[None]:
        """Run the model's attention through `phase` inside the block."""
        if self._phase is not None:
            raise AttachError("Star Attention is at work on this model already: one run at a time")
        before = implementations(self.decoder)
        self._phase = phase
        try:
            self.decoder.set_attn_implementation(self.name)
            if self.decoder.config._attn_implementation != self.name:
                raise AttachError(f"{type(self.decoder).__name__} did not accept another attention implementation")
            yield
        finally:
            self._phase = None
            for config, name in before:
                config._attn_implementation_internal = name

    def _call(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> AttentionCall:
        refused = not_plain(module, kwargs) or further_tensors(self.original, module, kwargs)
        if kwargs.get("sliding_window") is not None:
            refused = "a sliding window reaches into the block before, which another rank may hold"
        if refused:
            raise UnsupportedCallError([f"layer {layer_of(module)}: {refused}"])
        extras = self.original.applies_extras(module)  # sdpa drops both in silence, and equality means to drop them too
        return AttentionCall(
            query,
            key,
            value,
            scale=kwargs.get("scaling"),
            layer=layer_of(module),
            softcap=kwargs.get("softcap") if extras else None,
            sinks=kwargs.get("s_aux") if extras else None,
        )
