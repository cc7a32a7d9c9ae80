"""The recording of a layer's launches, for those who have something to say to it; `kernels.recording` makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """A recording under way."""

    def refuse(self, why: str) -> None:
        """The call cannot be repeated."""

    def launched(self, kernel: Any, grid: tuple[int, ...], args: Any, options: dict[str, Any], made: Any) -> None:
        """A kernel was launched; see `kernels.launch.enqueue`."""

    def gathered(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tensors of which a table says how far they lie apart, such that every step has the same distances."""
        ...

    def told(self, table: Tensor, numbers: Sequence[int], entries: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """A table of numbers that say so. entries: the number of each, and its two tensors."""


RECORDING: ContextVar[Recorder | None] = ContextVar("recording", default=None)
"""The recording of a layer's launches that this thread makes, if it does: see `kernels.recording`."""


class OfLayer(int):
    """A number that a layer's index decides, `of` which it is; a recording repeats it for each layer anew."""

    of: Callable[[int], int]

    @classmethod
    def at(cls, layer: int, of: Callable[[int], int]) -> OfLayer:
        """That of a layer."""
        made = cls(of(layer))
        made.of = of
        return made

    def then(self, change: Callable[[int], int]) -> int:
        """The number changed, as a number of the layer still where somebody records."""
        now = change(int(self))
        if RECORDING.get() is None:
            return now
        made = OfLayer(now)
        made.of = lambda layer: change(self.of(layer))
        return made


def apart(run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``run(*args, **kwargs)``, which is no part of a recording: what it returns is a constant there."""
    if RECORDING.get() is None:
        return run(*args, **kwargs)
    from torch.utils._python_dispatch import _disable_current_modes

    token = RECORDING.set(None)
    try:
        with _disable_current_modes():
            return run(*args, **kwargs)
    finally:
        RECORDING.reset(token)
