"""For authors of methods: contract checks, hypothesis strategies for calls and masks, and a plain yardstick.

Needs hypothesis (the extra ``test``); nothing else in the library imports this package.
"""

from __future__ import annotations

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
    check_method,
)
from sparseprefill.testing.inputs import tensors
from sparseprefill.testing.strategies import calls, masks
from sparseprefill.testing.truth import allowed_pairs, attention

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
    "attention",
    "calls",
    "check_method",
    "masks",
    "standard_calls",
    "tensors",
]
