"""Drafts: tokens that somebody guessed and a forward only checks. That is decoding, however many they are.

A draft and a prompt are the same to a model: token ids behind a cache. What tells them apart is who calls. Assisted
decoding in transformers (prompt lookup, an assistant, early exit) is one function, which is looked up on the stack with
two numbers of its; whoever decodes with drafts in a loop of their own says so (`Handle.decoding`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_stack
from typing import Any

ALL = sys.maxsize
"""More rows than a forward has."""
_decoding: ContextVar[tuple[object, ...]] = ContextVar("sparseprefill_decoding", default=())


@contextmanager
def decoding(owner: object) -> Iterator[None]:
    """Forwards of `owner`'s model that begin in this context check drafts."""
    token = _decoding.set((*_decoding.get(), owner))
    try:
        yield
    finally:
        _decoding.reset(token)


def drafted(owner: object, past: int) -> int:
    """Number of last rows of a forward behind `past` tokens that are a draft: 0 for none, `ALL` where it has no prompt.

    The first forward of assisted decoding has the prompt and the first draft, later ones a draft alone. One without a
    past is a prompt all the same: an assistant's that keeps no cache.
    """
    if any(one is owner for one in _decoding.get()):
        return ALL
    known = _assisted()
    if known is None:
        return 0
    if known.get("is_first_iteration", past == 0):
        return int(known.get("candidate_length", 0))  # not there yet while an assistant drafts
    return ALL if past else 0


def _assisted() -> dict[str, Any] | None:
    """The variables of the innermost assisted decoding on this thread's stack, by transformers or by a copy of it."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_name == "_assisted_decoding")
    return next((dict(frame.f_locals) for frame in frames), None)
