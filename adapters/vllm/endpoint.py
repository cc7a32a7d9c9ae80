"""The report over HTTP: ``GET /sparseprefill/report``, an endpoint plugin of vLLM.

vLLM loads it where ``VLLM_PLUGINS`` names it, and its development endpoints may stay closed then.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

ROUTE = "/sparseprefill/report"


class ReportEndpoint:
    """The object behind the entry point in the group ``vllm.endpoint_plugins``: its `EndpointPlugin`."""

    name = "sparseprefill"
    required_tasks: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route to vLLM's application, a FastAPI."""
        app.add_api_route(ROUTE, self.report, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take the client of the engine; None where a server only renders prompts."""
        self._engine = engine_client

    async def report(self) -> dict[str, Any]:
        """The report of each worker, as `/collective_rpc` gives it: ``{"results": [...]}``."""
        if self._engine is None:
            return {"results": []}
        return {"results": await self._engine.collective_rpc("sparseprefill_report")}
