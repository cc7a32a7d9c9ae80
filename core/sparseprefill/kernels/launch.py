"""Launches of kernels, all by `enqueue`: sooner where one like it was made before, and told to a recording.

The layers of a model launch the same kernels with the same numbers, and other tensors. What Triton compiles a kernel for
follows from the arguments' types, the numbers' values and how tensors are aligned; a launch with all of that as before
goes to the compiled kernel at once. A step that is repeated (`repeat`) does not even ask.
"""

from __future__ import annotations

import logging
from typing import Any

import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparseprefill.errors import frameless
from sparseprefill.mask.recorded import RECORDING, OfLayer

MOST = 256
"""Launches of one kernel that are remembered; those of one step differ in tensors alone."""
NUMBERS = frozenset({int, float, bool, type(None)})
NOTHING = "nothing known"
SWITCHES = (knobs.runtime, "add_stages_inspection_hook"), (knobs.compilation, "instrumentation_mode")
"""Beside debugging, what makes Triton compile otherwise; not every version has them."""
FAILED: list[Exception] = []
"""The error for which every launch goes Triton's own way; empty while none does."""
_KNOWN: dict[int, tuple[Any, dict[Any, tuple[CompiledKernel, tuple[str, ...]]]]] = {}
"""By the kernel's id: the kernel, and of what it was launched with, the compiled one and its last parameters."""


def enqueue(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, sooner where the kernel was launched like this before.

    args: of the signature's beginning: tensors, descriptors, numbers and None. options: constants and what Triton is
    told. In the interpreter, and where anything is out of the ordinary, nothing but Triton's own launch.
    """
    recording = RECORDING.get()
    if recording is None:
        _launch(kernel, grid, args, options)
        return
    with _disable_current_modes():  # the interpreter copies tensors to and fro
        made = _launch(kernel, grid, tuple(int(x) if type(x) is OfLayer else x for x in args), options)
    recording.launched(kernel, grid, args, options, made)


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The compiled kernel that was launched; what Triton's launch returns where that is something else."""
    key = None
    if isinstance(kernel, JITFunction) and not kernel.pre_run_hooks and not FAILED and not _inspected(kernel):
        key = _key(args, options)
    if key is None:
        return kernel[grid](*args, **options)
    _, known = _KNOWN.setdefault(id(kernel), (kernel, {}))
    active = driver.active
    device = active.get_current_device()
    try:
        found = known.get((device, key))
    except TypeError:  # an option without a hash
        return kernel[grid](*args, **options)
    if found is not None:
        compiled, last = found
        try:
            whole: Any = (*grid, 1, 1)[:3]
            given = (*args, *[options[name] for name in last])
            compiled[whole](*given, stream=active.get_current_stream(device))
        except RuntimeError:  # of the device, or of memory: Triton's own launch would meet it, too
            raise
        except Exception as error:
            made = kernel[grid](*args, **options)  # where it fails, too, the error is of the arguments, or of a hook
            _fail(error)  # else of an interface that another version has changed
            return made
        return compiled
    made = kernel[grid](*args, **options)
    last = tuple(kernel.arg_names[len(args) :])
    if ran(made) and all(name in options for name in last):
        if len(known) >= MOST:
            known.clear()
        known[device, key] = made, last
    return made


def _key(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """All that Triton compiles for; None with an argument of another kind. Numbers that are equal have types."""
    facts = tuple([x if type(x) in NUMBERS else _fact(x) for x in args])
    values = tuple(options.values())
    kinds = tuple(map(type, args)), tuple(map(type, values))
    return None if NOTHING in facts or Tensor in kinds[1] else (kinds, facts, tuple(options), values)


def _fact(x: Any) -> Any:
    """Facts of a tensor, or of a descriptor of one, that a kernel is compiled for; NOTHING of anything else."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    return (x.base.dtype, *x.block_shape, getattr(x, "layout", None)) if hasattr(x, "block_shape") else NOTHING


def _inspected(kernel: Any) -> bool:
    """True while kernels are compiled otherwise than their arguments say: for debugging, or under instruments."""
    switches = kernel.debug, knobs.runtime.debug, *(getattr(place, name, None) for place, name in SWITCHES)
    return any(switches)


def ran(made: Any) -> bool:
    """True if a launch gave the compiled kernel that ran, on a GPU whose compiler looks at nothing else."""
    if not isinstance(made, CompiledKernel) or made.module is None:
        return False
    return bool(made.metadata.target.backend == "cuda")


def _fail(error: Exception) -> None:
    """From now on launches go Triton's own way, which one warning says."""
    FAILED.append(frameless(error))
    text = "launches like one before do not work with triton %s; each goes Triton's own way instead: %s"
    logging.getLogger(__name__).warning(text, triton.__version__, error)
