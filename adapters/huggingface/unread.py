"""Rows of a forward that anybody reads: a model that makes logits of its last rows alone needs no others of its last
layer, since nothing behind that layer looks from row to row.

Only a stock model of transformers says so reliably: by `logits_to_keep`, which `generate` sets. Whoever asks for hidden
states, router logits or a loss reads every row.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from attrs import define
from transformers import PreTrainedConfig, PreTrainedModel

from sparseprefill.errors import AttachError

from .inspection import asks, configurations

WANTED = "output_hidden_states", "output_router_logits", "output_attentions"


def check(model: torch.nn.Module, decoder: PreTrainedModel, layers: tuple[int, ...] | None) -> int:
    """The index of the layer whose rows may be left out; AttachError where the model does not say which are read.

    layers: indices of the attention layers that reach the adapter; None where nobody has looked.
    """
    name, last = type(model).__name__, int(decoder.config.get_text_config().num_hidden_layers) - 1
    stock = type(model).__module__.startswith("transformers.") and type(decoder).__module__.startswith("transformers.")
    if model is decoder or not stock or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise AttachError(
            f"skip_unread is True, but {name} does not say which rows it reads: pass a causal LM of transformers, "
            "whose forward takes logits_to_keep, or leave skip_unread out"
        )
    if layers is not None and last not in layers:
        shown = ", ".join(map(str, layers)) or "none"
        raise AttachError(
            f"skip_unread is True, but the last of {name}'s {last + 1} layers is no attention layer that runs through "
            f"the adapter ({shown} are): leave skip_unread out"
        )
    return last


@define(eq=False)
class Reader:
    """The model that a decoder belongs to, and what says which rows of the decoder's forward it reads.

    Asked while the decoder's forward begins: everything is told by the forward of the model that is on the stack, so
    that nothing has to be forgotten, whatever ends it.
    """

    _model: weakref.ref[torch.nn.Module]
    _decoder: weakref.ref[torch.nn.Module]
    _configs: tuple[PreTrainedConfig, ...]
    _switches: tuple[str, ...]

    @classmethod
    def of(cls, model: torch.nn.Module, decoder: torch.nn.Module) -> Reader:
        """Any configuration that a part of the model has may ask for further outputs."""
        recorded = (getattr(part, "_can_record_outputs", None) or {} for part in model.modules())
        switches = dict.fromkeys((*WANTED, *(f"output_{key}" for keys in recorded for key in keys)))
        return cls(weakref.ref(model), weakref.ref(decoder), configurations(model), tuple(switches))

    def rows(self) -> int | None:
        """Number of last rows that are read of the decoder's forward that begins now; None for all of them."""
        given = self._given()
        keep = given.get("logits_to_keep")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep <= 0 or given.get("labels") is not None:
            return None
        if any(value for name, value in given.items() if name.startswith("output_")):
            return None
        return None if asks(self._configs, *self._switches) else keep

    def _given(self) -> dict[str, Any]:
        """The arguments of the model's forward that calls the decoder; nothing where it is called by anything else.

        Between the two stand forwards of modules that hold the decoder. A module on the stack whose forward has not
        begun, or has ended, runs a hook of somebody, who may read every row.
        """
        model, decoder, begun = self._model(), self._decoder(), set[int]()
        calls = 0
        for frame, _ in walk_stack(sys._getframe().f_back):
            name = frame.f_code.co_name
            if name in ("forward", "_call_impl"):
                module = frame.f_locals.get("self")
                if name == "forward" and module is model and "logits_to_keep" in frame.f_locals:
                    return _arguments(frame)
                if name == "forward":
                    begun.add(id(module))
                elif module is decoder:
                    calls += 1
                elif id(module) not in begun:
                    return {}
                if calls > 1:
                    return {}
        return {}


def _arguments(frame: FrameType) -> dict[str, Any]:
    """Of a function, by name, those that it takes by `**` included."""
    known, code = dict(frame.f_locals), frame.f_code
    if code.co_flags & inspect.CO_VARKEYWORDS:
        last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        known.update(known.get(code.co_varnames[last]) or {})
    return known
