"""The library's messages, in vLLM's log."""

from __future__ import annotations

import copy
import logging


def show(level: str) -> None:
    """Give the library's loggers vLLM's handlers, and a level: by themselves they would be silent below a warning."""
    ours, theirs = logging.getLogger("sparseprefill"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            mine = copy.copy(handler)  # vLLM's own drop what its level leaves out
            mine.setLevel(logging.NOTSET)
            ours.addHandler(mine)
            ours.propagate = False
    ours.setLevel(level.upper())
