"""Triton kernels, one family a file. Importing this package does not import triton; its modules do."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Watcher(Protocol):
    """A recording of a layer's launches: see `recording`."""

    def launched(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], made: Any
    ) -> None:
        """A kernel was launched. made: the compiled kernel, where Triton says."""

    def refuse(self, why: str) -> None:
        """What runs now cannot be repeated."""


RECORDING: ContextVar[Watcher | None] = ContextVar("recording", default=None)
"""The recording that this thread makes, if it does."""
WIDEST = 256
"""Largest head dimension of kernels that look at single query rows."""


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


def serve(x: Tensor) -> bool:
    """True if kernels may run on a tensor's device: CUDA, with Triton installed. Else plain PyTorch does the work."""
    return bool(x.is_cuda) and _installed()


def serve_device(device: torch.device) -> bool:
    """True if kernels serve tensors on a device."""
    return device.type == "cuda" and _installed()


def serve_rows(q: Tensor) -> bool:
    """True if kernels that look at single query rows, of q ``[B, Hq, Nq, D]``, may do so; in float64 they do not."""
    return serve(q) and q.element_size() < 8 and q.shape[-1] <= WIDEST


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


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
