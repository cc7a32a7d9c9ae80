"""Triton's interpreter without its dearest habit.

At a launch the interpreter swaps the functions of Triton's language for its own; it swaps them again at each call of a
device function, which finds them swapped. That takes as long as the kernel itself. Nothing is swapped back before the
launch ends, so once per launch is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def swap_once_per_launch() -> None:
    """For the life of this process; kernels that a GPU runs know nothing of it."""
    import triton.language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    swap: Callable[[Any], Any] = module._patch_lang
    launch: Callable[..., Any] = module.GridExecutor.__call__
    seen_by: dict[Any, frozenset[int]] = {}
    swapped: set[frozenset[int]] = set()

    def once(function: Any) -> Any:
        """A function's globals hold `tl`, `tl.core` or both; what it sees is what is swapped."""
        if function not in seen_by:
            seen_by[function] = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if seen_by[function] in swapped:
            return None  # asked for at the launch alone, which swaps
        swapped.add(seen_by[function])
        return swap(function)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        swapped.clear()
        return launch(self, *args, **kwargs)

    module._patch_lang, module.GridExecutor.__call__ = once, launched
