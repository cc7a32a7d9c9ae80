"""The surroundings of a forward in torch: it is compiled, and some functions may not be traced; or a transform of
torch.func or a mode changes what is computed.

Within the latter tensors may hold no numbers, or be wrapped for as long as it lasts, and its owner counts on the
operations of the stock model. So the stock model runs, and nothing of such a forward is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from traceback import walk_stack
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sparseprefill.errors import AttachError

P = ParamSpec("P")
T = TypeVar("T")
BINDINGS: Any = torch._C
TRANSFORM = "within a transform of torch.func (jvp, vmap, grad, functionalize and the like) the stock model runs"
MODE = "within {name}, a mode of torch that sees every operation, the stock model runs"
FORWARD = "gradients are recorded forward (torch.func.jvp, or dual tensors): call the model without tangents"
EXPORT = "the model is exported or traced: what comes of that is the stock model"
META = "tensors on the meta device hold no numbers: load the model's weights, with device_map or to_empty"
SUBCLASS = "its tensors are {name}, which compute in their own way: pass plain tensors"
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


def surroundings() -> str:
    """The reason for which every forward is the stock model's here, in this thread; empty where nothing is around it.

    A default device is a mode for torch, but changes nothing.
    """
    if BINDINGS._functorch.maybe_current_level() is not None:
        return TRANSFORM
    if BINDINGS._len_torch_dispatch_stack():
        if torch.compiler.is_exporting():
            return EXPORT
        modes = _get_current_dispatch_mode_stack()
        return MODE.format(name=type(modes[-1]).__name__ if modes else "a dispatch mode")
    for index in range(BINDINGS._len_torch_function_stack()):
        mode = BINDINGS._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):
            return MODE.format(name=type(mode).__name__)
    return ""


def unusual(*tensors: Tensor) -> str:
    """The reason for which a layer is the stock model's to compute, by its tensors or by what stands around it."""
    if around := surroundings():
        return around
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return SUBCLASS.format(name=type(x).__name__)
        if x.is_meta:
            return META
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return FORWARD
    return ""
