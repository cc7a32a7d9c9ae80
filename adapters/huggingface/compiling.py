"""Functions that torch.compile may not trace, and the error where it has to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from traceback import walk_stack
from typing import Any, ParamSpec, TypeVar, cast

import torch

from sparseprefill.errors import AttachError

P = ParamSpec("P")
T = TypeVar("T")
WHOLE = (
    "an attached model cannot be compiled as one graph (torch.compile with fullgraph=True, or torch.export with "
    "strict=True): its prefill runs between graphs, one break for each layer. Compile it with fullgraph=False, or "
    "detach it before"
)


def eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` outside of compiled graphs: context variables and weak references cannot be traced. What calls it
    while the compiler traces calls `refuse_one_graph` before."""
    return cast(Callable[P, T], torch.compiler.disable(function, reason=WHOLE))


def _refuse_one_graph() -> bool:
    """AttachError where one graph has to hold everything. The compiler calls it while it traces, so that its frames are
    on the stack."""
    for frame, _ in walk_stack(sys._getframe()):
        tracer = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("symbolic_convert.py") else None
        if tracer is not None and (
            getattr(tracer, "one_graph", False) or getattr(tracer, "error_on_graph_break", False)
        ):
            raise _refusal()(WHOLE)
    return True


refuse_one_graph: Callable[[], bool] = torch.compiler.assume_constant_result(_refuse_one_graph)


@cache
def _refusal() -> type[AttachError]:
    """An AttachError that the compiler lets through as it is, as one of its own, and that says what we say alone."""
    from torch._dynamo.exc import Unsupported

    class OneGraphError(AttachError, Unsupported):
        """An attached model is to be compiled as one graph."""

        def __init__(self, text: str) -> None:
            Unsupported.__init__(self, text)

        def __str__(self) -> str:
            return WHOLE

        def __reduce__(self) -> tuple[Any, ...]:
            return AttachError, (WHOLE,)

    return OneGraphError
