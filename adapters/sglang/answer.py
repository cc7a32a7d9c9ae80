"""What a server says of its prefill when it is asked: in ``GET /server_info``, and `Engine.get_server_info()`."""

from __future__ import annotations

from typing import Any

from ..serving.wishes import SWITCH
from .runtime import runtimes


def add(result: Any, *args: object, **kwargs: object) -> None:
    """After SGLang's ``Scheduler.get_internal_state``: adds ``sparseprefill``, a report for each model runner, and how
    many prefills are in progress (host sync: densities that wait are counted)."""
    found = [{**one.answer(), "in_progress": len(one.requests)} for one in runtimes()]
    if found:
        result.internal_state[SWITCH] = found
