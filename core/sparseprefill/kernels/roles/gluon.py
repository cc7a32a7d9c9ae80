"""The few names of Gluon that changed between Triton 3.6 and 3.9, under one name each."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All warps of the partition meet."""

load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Tensor descriptor, coordinates, barrier, shared memory: one block through the copy engine."""

load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Shared memory, pointers: 16 bytes a lane, asynchronously."""

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
"""Shared memory, type, shape, layout: the same memory seen as another block."""
