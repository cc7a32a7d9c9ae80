"""The library's messages, in a server's log."""

from __future__ import annotations

import copy
import logging


def show(level: str, server: str = "") -> None:
    """Give the library's loggers a level, and the handlers of a server's logger, such as ``vllm``: by themselves they
    would be silent below a warning. Where the server logs through the root, they need no handlers."""
    ours, theirs = logging.getLogger("sparseprefill"), logging.getLogger(server)
    if server and not ours.handlers:
        for handler in theirs.handlers:
            mine = copy.copy(handler)  # the server's own drop what its level leaves out
            mine.setLevel(logging.NOTSET)
            ours.addHandler(mine)
            ours.propagate = False
    ours.setLevel(level.upper())
