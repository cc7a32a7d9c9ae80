"""Obstacles of a server: known before its weights are loaded, and asked again when the backend is made."""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from typing import Any

from sparseprefill.errors import AttachError

from ..serving import stores
from ..serving.wishes import SWITCH
from . import known
from .options import given
from .runtime import check_model
from .stores import REMEDY, unsalted

EAGER = ("breakable", "disabled")
"""SGLang's CUDA graphs of prefill that leave attention out."""
log = logging.getLogger(__name__)


def check(runner: Any, *args: object, **kwargs: object) -> None:
    """Before SGLang's ``ModelRunner.load_model``: raises what `make` would raise of options that do not fit the server,
    or the model, and names stores with which nothing may be asked for."""
    if runner.is_draft_worker or not _named(runner.server_args):
        return
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        resolve_attention_backend_strs,
    )

    options, name = given(), resolve_attention_backend_strs(model_runner=runner).decode
    check_host(name)
    check_model(runner, options, name)
    mixed = stores.warning(unsalted(runner.server_args), REMEDY)
    if mixed is not None:
        log.warning("sparseprefill: %s", mixed)


def _named(server_args: Any) -> bool:
    """True if any flag names us, whatever else SGLang makes of it."""
    return known.selected(server_args) or getattr(server_args, "decode_attention_backend", None) == SWITCH


def check_host(name: str) -> None:
    """AttachError where SGLang's own attention cannot stand beside ours. name: of that for decoding."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.runtime_context import get_exec

    if name == SWITCH or name not in ATTENTION_BACKENDS:
        own = ", ".join(sorted(set(ATTENTION_BACKENDS) - {SWITCH}))
        remedy = f"pass one of SGLang's own by --decode-attention-backend: {own}"
        raise AttachError(f"the attention for decoding and for what does not run sparse is {name!r}: {remedy}")
    recorded = get_exec().graph.cuda_graph_config.prefill.backend
    if recorded not in EAGER:
        raise AttachError(
            f"--cuda-graph-backend-prefill is {recorded!r}, whose graphs record attention: use {' or '.join(EAGER)}"
        )
