"""Kernels of two libraries as records: FlashAttention-4 and FlashInfer, each asked where it is installed.

Both take masks of tiles alone. Their calls are written from the sources of flash-attn-4 4.0.0b36, which keeps the laws
of `check_kernel` on an H200, and of flashinfer-python 0.7.2, which was not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparseprefill.method import hookimpl

if TYPE_CHECKING:
    from sparseprefill.kernels.family.record import Family


@hookimpl
def sparseprefill_kernels() -> Iterable[Family]:
    """The two records; the libraries are imported when they are launched."""
    from .flash_attention_4 import FLASH_ATTENTION_4
    from .flashinfer import FLASHINFER

    return FLASH_ATTENTION_4, FLASHINFER
