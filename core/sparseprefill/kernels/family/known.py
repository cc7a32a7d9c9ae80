"""The kernels that an executor knows: whoever builds it hands them down, once.

A registry hands down its own to all that it builds. What is built by hand knows those of the installed plugins, which the
package's face can tell: it stands above this room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseprefill.kernels.family.record import Family

_HANDED: ContextVar[tuple[Family, ...] | None] = ContextVar("handed", default=None)


def installed() -> tuple[Family, ...]:
    """The records of all installed plugins. The face, which is imported before all else, puts its own in this place."""
    raise NotImplementedError


@contextmanager
def handed_down(kernels: tuple[Family, ...]) -> Iterator[None]:
    """Executors that are built meanwhile, in this thread, know these kernels."""
    before = _HANDED.set(kernels)
    try:
        yield
    finally:
        _HANDED.reset(before)


def known() -> tuple[Family, ...]:
    """The kernels for an executor that is built now."""
    handed = _HANDED.get()
    return installed() if handed is None else handed
