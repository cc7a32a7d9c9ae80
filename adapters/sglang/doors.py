"""SGLang's endpoints: where each takes a request's arguments, and a guard in front of them (`serving.doors`)."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..serving.doors import Doors, Scope, guard
from .known import FIELD, selected

SERVER = "sglang.srt.entrypoints.http_server"
SAMPLING = "sampling_params"
DOORS = Doors(
    places={
        **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/invocations"), (FIELD,)),
        **dict.fromkeys(("/generate", "/encode", "/classify"), (SAMPLING, FIELD)),
        os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"): ("parameters", SAMPLING, FIELD),
    },
    idle=frozenset({*("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens")}),
)


def watch(_: object, manager: Any, *args: object, **kwargs: object) -> None:
    """After SGLang's ``TokenizerManager.__init__``, which the HTTP server waits for before it starts. An engine without
    a server has no such module, and needs no guard."""
    app = getattr(sys.modules.get(SERVER), "app", None)
    if app is not None and selected(manager.server_args):
        guard(app, _doors)


def _doors(_: Scope) -> Doors:
    return DOORS
