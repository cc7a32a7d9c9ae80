"""A law of this refiner alone, on calls that Hypothesis draws."""

import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill_first_layers import FirstLayers

import sparseprefill as sp
from sparseprefill.testing import allowed_pairs, calls

BEFORE = sp.build("streaming", sink=16, window=32, block=16)
"""Any method will do."""


@settings(max_examples=25, deadline=None)
@given(calls(max_batch=2, max_heads=4, head_dims=(8,)), st.integers(0, 3))
def test_nothing_is_taken_away_and_first_layers_keep_everything(call: sp.AttentionCall, layer: int) -> None:
    call = evolve(call, layer=layer)
    after = evolve(BEFORE, refiners=(FirstLayers(layers=2),))
    kept, before = after.run(call).mask.to_dense(), BEFORE.run(call).mask.to_dense()
    assert not torch.any(before & ~kept)
    if layer < 2:
        assert torch.equal(kept, allowed_pairs(call)[:, None].expand_as(kept))
