"""Defaults of hosts. Nothing is imported here: options of the command line show these numbers."""

from __future__ import annotations

MIN_QUERY = 16
"""Query rows from which a forward is prefill, unless the host knows that it checks a draft; fewer are decoding."""
TAIL = 128
"""Last rows of a prompt that get every key: a question there steers the answer, and block methods pool it away."""
