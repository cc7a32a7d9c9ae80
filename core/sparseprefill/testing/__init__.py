"""For authors of methods: contract checks, hypothesis strategies for calls and masks, and a plain yardstick.

`calls` and `masks` need hypothesis (the extra ``test``) and are imported when they are asked for. Of the rest of the
library only what makes up inputs, benchmarks and calibration, imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparseprefill.testing.cases import standard_calls
from sparseprefill.testing.contracts import (
    Report,
    check_laws,
    check_method,
    check_refiner,
)
from sparseprefill.testing.heads import head_tensors
from sparseprefill.testing.inputs import tensors
from sparseprefill.testing.truth import allowed_pairs, attention

if TYPE_CHECKING:
    from sparseprefill.testing.kernels import check_kernel
    from sparseprefill.testing.strategies import calls, masks

__all__ = [
    "Report",
    "allowed_pairs",
    "attention",
    "calls",
    "check_kernel",
    "check_laws",
    "check_method",
    "check_refiner",
    "head_tensors",
    "masks",
    "standard_calls",
    "tensors",
]


def __getattr__(name: str) -> Any:
    if name in ("calls", "masks"):
        from sparseprefill.testing import strategies

        return getattr(strategies, name)
    if name == "check_kernel":  # imports triton
        from sparseprefill.testing import kernels

        return kernels.check_kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
