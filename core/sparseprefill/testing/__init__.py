"""For authors of methods: contract checks, hypothesis strategies for calls and masks, and a plain yardstick.

`calls` and `masks` need hypothesis (the extra ``test``) and are imported when they are asked for. Of the rest of the
library only what makes up inputs, benchmarks and calibration, imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparseprefill.testing.cases import standard_calls
from sparseprefill.testing.contracts import (
    Report,
    assert_batch_rows_independent,
    assert_causal,
    assert_chunk_invariant,
    assert_consistent,
    assert_density,
    assert_disjoint,
    assert_full_mask_is_dense,
    assert_nan_stays_out,
    assert_no_empty_row,
    assert_no_nan,
    assert_parts_equal_whole,
    check_method,
    check_refiner,
)
from sparseprefill.testing.heads import head_tensors
from sparseprefill.testing.inputs import tensors
from sparseprefill.testing.truth import allowed_pairs, attention

if TYPE_CHECKING:
    from sparseprefill.testing.strategies import calls, masks

__all__ = [
    "Report",
    "allowed_pairs",
    "assert_batch_rows_independent",
    "assert_causal",
    "assert_chunk_invariant",
    "assert_consistent",
    "assert_density",
    "assert_disjoint",
    "assert_full_mask_is_dense",
    "assert_nan_stays_out",
    "assert_no_empty_row",
    "assert_no_nan",
    "assert_parts_equal_whole",
    "attention",
    "calls",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
