"""Failure of one call: the fate of its request, and the reason that is written down."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from sparseprefill.errors import UnsupportedCallError

from ..session.kinds import Code

ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
LONGEST = 300
"""Characters of a reason: it stands in a report and is a label of a metric."""
DEAD = re.compile(r"\b(CUDA|HIP|CUDNN|CUBLAS|NCCL) error\b|Triton Error \[(CUDA|HIP)\]", re.IGNORECASE)


def ends_engine(error: BaseException) -> bool:
    """True if nobody can compute the call after this error: the device, or the processes' connection, is lost.

    After such an error the host's own attention fails as well, with a message that hides the first. A stage's own
    error is none of them, and neither is memory that ran out, which the host may still have enough of.
    """
    return any(_lost(one) for one in _chain(error))


def reason(error: BaseException) -> str:
    """The error's class and the first line of its message, if it can be printed, as one text for all calls alike."""
    try:
        said = str(error).strip().splitlines()
        text = ADDRESS.sub("0x...", said[0]) if said else "no message"
    except Exception as another:  # a plugin's error may be as broken as the plugin
        text = f"its message cannot be printed ({type(another).__name__})"
    return f"{type(error).__name__}: {text}"[:LONGEST]


def code_of(error: BaseException) -> Code:
    """The code of an error that left a call to the host."""
    if isinstance(error, UnsupportedCallError):
        return Code.UNSUPPORTED
    return Code.MEMORY if any(_short_of_memory(one) for one in _chain(error)) else Code.ERROR


def _short_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in reason(error).lower()


def _lost(error: BaseException) -> bool:
    if _short_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError) or type(error).__name__ in ("DistError", "DistBackendError"):
        return True
    return isinstance(error, RuntimeError) and DEAD.search(reason(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
