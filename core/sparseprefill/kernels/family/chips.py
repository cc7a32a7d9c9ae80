"""The GPU at hand: one row of facts for each chip, by name. Kernels, launchers and plugins ask here alone.

A fact that was measured on one chip stands in its row alone; a new chip is a new row.
"""

from __future__ import annotations

from functools import cache

import torch
from attrs import evolve, frozen

from sparseprefill.breakeven.points import device_type

Capability = tuple[int, int]
NONE: Capability = (0, 0)
"""In place of a capability, where there is none: in Triton's interpreter, and on AMD's GPUs."""


@frozen(eq=False, kw_only=True)
class Chip:
    """Facts of one kind of GPU.

    capability: NVIDIA's, or `NONE`. large: a program may have 227 KB of shared memory, and reads by tensor descriptors;
    what has less has 99 KB or 163. e4m3: matrix products of e4m3fn (AMD's gfx942 multiplies e4m3fnuz, another format).
    cudnn: cuDNN's dense attention is the fastest that torch has. registers: cap on those of a thread with which two
    programs share a multiprocessor, None where that was not measured. deep: three steps of keys fit where rows are
    sampled, measured. wgmma: products of a whole warpgroup, for which Gluon kernels are written; no other chip has them.
    """

    capability: Capability
    large: bool = False
    e4m3: bool = False
    cudnn: bool = False
    registers: int | None = None
    deep: bool = False
    wgmma: bool = False


PLAIN = Chip(capability=NONE)
"""Facts where nothing is known: the interpreter, AMD's GPUs, and NVIDIA's before 8.9."""
NEWER = Chip(capability=(12, 0), e4m3=True, cudnn=True)
"""GPUs with less shared memory than the large ones, and those that are not out yet."""
CHIPS = {
    chip.capability: chip
    for chip in (
        Chip(capability=(8, 9), e4m3=True),
        Chip(capability=(9, 0), large=True, e4m3=True, cudnn=True, registers=128, deep=True, wgmma=True),
        Chip(capability=(10, 0), large=True, e4m3=True, cudnn=True),
        Chip(capability=(11, 0), large=True, e4m3=True, cudnn=True),
        NEWER,
    )
}
"""Rows that differ from `PLAIN`, by capability."""


@cache
def row(capability: Capability) -> Chip:
    """The row of a capability: its own, that of its family, such as 10.0's for 10.3, or `NEWER` or `PLAIN`."""
    own = max((known for known in CHIPS if known[0] == capability[0] and known <= capability), default=None)
    chip = CHIPS[own] if own is not None else NEWER if capability > max(CHIPS) else PLAIN
    return evolve(chip, capability=capability)


def amd(device: torch.device) -> bool:
    """True if a GPU is AMD's."""
    return device_type(device) == "rocm"


@cache
def capability(device: torch.device) -> Capability:
    """NVIDIA's compute capability; `NONE` where there is none.

    For AMD's GPUs PyTorch reports other numbers in the same place: gfx90a is (9, 0), as the H100 is, and gfx942 (9, 4).
    """
    if device_type(device) != "cuda":
        return NONE
    return torch.cuda.get_device_capability(device)


def chip(device: torch.device) -> Chip:
    """The row of a device."""
    return row(capability(device))


@cache
def multiprocessors(device: torch.device) -> int:
    """Number that a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
