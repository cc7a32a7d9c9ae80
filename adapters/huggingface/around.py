"""What may stand around a forward and change what torch computes: a transform of torch.func, or a mode.

Within, tensors may hold no numbers, or be wrapped for as long as it lasts, and its owner counts on the operations of
the stock model. So the stock model runs, and nothing of such a forward is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

BINDINGS: Any = torch._C
TRANSFORM = "within a transform of torch.func (jvp, vmap, grad, functionalize and the like) the stock model runs"
MODE = "within {name}, a mode of torch that sees every operation, the stock model runs"
FORWARD = "gradients are recorded forward (torch.func.jvp, or dual tensors): call the model without tangents"
EXPORT = "the model is exported or traced: what comes of that is the stock model"
META = "tensors on the meta device hold no numbers: load the model's weights, with device_map or to_empty"
SUBCLASS = "its tensors are {name}, which compute in their own way: pass plain tensors"


def surroundings() -> str:
    """Reason for which every forward is the stock model's here, in this thread; empty where nothing stands around it.

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


def without_numbers(*tensors: Tensor) -> str:
    """Reason for which tensors of a layer are the stock model's to compute, by what they are; empty for usual ones."""
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return SUBCLASS.format(name=type(x).__name__)
        if x.is_meta:
            return META
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return FORWARD
    return ""
