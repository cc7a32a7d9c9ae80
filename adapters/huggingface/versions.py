"""Versions of torch and transformers that this was tried with; others are used all the same, and named in the log."""

from __future__ import annotations

import logging
import re
from functools import cache

import torch
import transformers

TRIED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 16), (5, 24))}
"""First and last of each, minor versions; see docs/huggingface.md for what ran with which."""
VERSION = re.compile(r"(\d+)\.(\d+)")
log = logging.getLogger(__name__)


def untested(name: str, version: str) -> str | None:
    """A remark on a version outside of those that were tried; None where there is nothing to say."""
    found, (first, last) = VERSION.match(version), TRIED[name]
    if found is not None and first <= (int(found[1]), int(found[2])) <= last:
        return None
    tried = " to ".join(".".join(map(str, one)) for one in (first, last))
    return f"{name} {version} is untested (tried: {tried}); it is used all the same, see docs/huggingface.md"


@cache
def warn_of_untested() -> None:
    """Log each version outside of those that were tried, once a process."""
    for name, version in (("torch", torch.__version__), ("transformers", transformers.__version__)):
        if text := untested(name, str(version)):
            log.warning("%s", text)
