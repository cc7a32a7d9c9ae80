"""The kernels of core itself. A kernel for another chip is one line more."""

from __future__ import annotations

from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.hopper.record import HOPPER, HOPPER_INT8

SHIPPED = (HOPPER_INT8, HOPPER, PORTABLE)
