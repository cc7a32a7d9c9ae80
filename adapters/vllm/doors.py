"""vLLM's endpoints: where each takes a request's arguments, and a guard in front of them (`serving.doors`).

vLLM has no place for one that is there whenever a backend is selected: its endpoint plugins are those that
``VLLM_PLUGINS`` names. So `watch` goes around the function that loads them, and adds one that has no endpoint.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import Any

from ..serving.doors import Doors, Scope, guard
from .runtime import selected

LOADER = "load_endpoint_plugins"
MARK = "sparseprefill"
FIELD = ("vllm_xargs",)
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
RENDERED = tuple(f"{path}/render" for path in OPENAI)
"""They compute nothing themselves, but what they answer carries the arguments on to ``/inference/v1/generate``."""
DOORS = Doors(
    places={
        **dict.fromkeys((*OPENAI, *RENDERED, "/v1/chat/completions/batch", "/invocations"), FIELD),
        "/inference/v1/generate": ("sampling_params", "extra_args"),
    },
    idle=frozenset(
        {
            *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
            *("/v1/completions/derender", "/v1/chat/completions/derender"),
        }
    ),
    losing=("use_beam_search",),
)
POOLING = Doors(places={}, idle=DOORS.idle)
"""Of a server whose model answers with vectors: vLLM has no place for arguments of such requests."""


class DoorPlugin:
    """An `EndpointPlugin` of vLLM's that adds no endpoint."""

    name = "sparseprefill-doors"
    required_tasks: tuple[str, ...] | None = None

    def attach_router(self, app: Any) -> None:
        """Put the guard into vLLM's application."""
        guard(app, doors_of)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing is kept: the application's own state has the engine's configuration."""


def doors_of(scope: Scope) -> Doors | None:
    """The doors of the server that a request has come to; None where the backend is not selected."""
    config = getattr(scope["app"].state, "vllm_config", None)
    if config is None or not selected(config):
        return None
    return DOORS if getattr(config.model_config, "runner_type", "generate") == "generate" else POOLING


def watch(plugins: Any) -> str | None:
    """Go around ``load_endpoint_plugins``, once; why that cannot be, or None. plugins: the module ``vllm.plugins``."""
    loading = getattr(plugins, LOADER, None)
    if loading is None:
        return f"this vLLM has no {LOADER}"
    if not hasattr(loading, MARK):

        @functools.wraps(loading)
        def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
            return [*loading(*args, **kwargs), DoorPlugin()]

        setattr(load_endpoint_plugins, MARK, True)
        setattr(plugins, LOADER, load_endpoint_plugins)
    return None
