"""Launches of kernels, all by `enqueue`, so that a recording hears of each (`recording`)."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from sparseprefill.mask.recorded import RECORDING, OfLayer


def enqueue(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, which a recording hears of where one listens.

    args: of the signature's beginning: tensors, descriptors, numbers and None. options: constants and what Triton is
    told.
    """
    recording = RECORDING.get()
    if recording is None:
        kernel[grid](*args, **options)
        return
    with _disable_current_modes():  # the interpreter copies tensors to and fro
        made = kernel[grid](*(int(x) if type(x) is OfLayer else x for x in args), **options)
    recording.launched(kernel, grid, args, options, made)
