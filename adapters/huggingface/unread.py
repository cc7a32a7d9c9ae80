"""Which rows of a forward anybody reads: a model that makes logits of its last rows alone needs no others of its last
layer, since nothing behind that layer looks from row to row.

Only a stock model of transformers says so reliably: by `logits_to_keep`, which `generate` sets. Whoever asks for hidden
states, router logits or a loss reads every row.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel

from sparseprefill.errors import AttachError

from .state import eagerly

_read: ContextVar[dict[int, int] | None] = ContextVar("sparseprefill_read", default=None)
WANTED = "output_hidden_states", "output_router_logits", "output_attentions"


def rows_read(decoder: object) -> int | None:
    """How many last rows of the decoder's forward that begins now are read; None for all of them.

    Told once: after a KeyboardInterrupt torch calls no hook that would forget it.
    """
    known = {**(_read.get() or {})}
    rows = known.pop(id(decoder), None)
    _read.set(known)
    return rows


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


@eagerly
def note(model: Any, decoder: int, named: dict[str, Any] | None) -> None:
    """A forward of the model begins with these arguments; None where it ends. decoder: the `id` of its decoder."""
    known = {**(_read.get() or {})}
    known.pop(decoder, None)
    if named is not None and (keep := _kept(model, named)) is not None:
        known[decoder] = keep
    _read.set(known)


def _kept(model: Any, named: dict[str, Any]) -> int | None:
    keep = named.get("logits_to_keep")
    asked = (getattr(model.config, name, False) if named.get(name) is None else named[name] for name in WANTED)
    if not isinstance(keep, int) or keep <= 0 or named.get("labels") is not None or any(asked):
        return None
    return keep
