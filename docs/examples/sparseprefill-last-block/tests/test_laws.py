"""A law of this method alone, on calls that Hypothesis draws."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparseprefill as sp
from sparseprefill.testing import calls


@settings(max_examples=25, deadline=None)
@given(calls(max_batch=2, max_heads=4, head_dims=(8,)), st.integers(0, 24), st.integers(0, 24))
def test_more_columns_keep_all_that_fewer_keep(call: sp.AttentionCall, keep: int, more: int) -> None:
    fewer, larger = (
        sp.build("last-block", keep=columns, band=16, block=16).run(call).mask.to_dense()
        for columns in (keep, keep + more)
    )
    assert not torch.any(fewer & ~larger)
