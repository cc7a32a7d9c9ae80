"""The public strategies draw what they promise."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from sparseprefill.call import AttentionCall
from sparseprefill.testing import calls, masks

MANY = settings(max_examples=2000, derandomize=True, database=None, phases=[Phase.generate])  # nothing is shrunk


@given(call=calls(max_batch=2, groups=(1, 4), max_heads=4, head_dims=(8,), max_len=50, min_len=3))
def test_bounds_are_kept(call: AttentionCall) -> None:
    assert call.q.shape[0] <= 2
    assert call.group in (1, 4)
    assert call.q.shape[1] <= 4
    assert 8 == call.q.shape[-1]
    assert 3 <= call.k.shape[2] <= 50


@given(call=calls(padding=("none",), prefix=False, features=False, dtypes=(torch.float16,)))
def test_features_can_be_left_out(call: AttentionCall) -> None:
    assert torch.float16 == call.q.dtype
    assert call.q.shape[2] == call.k.shape[2]
    assert (None, None, None, None, None) == (call.starts, call.lengths, call.window, call.softcap, call.sinks)


def test_every_kind_of_call_occurs() -> None:
    wanted = (
        lambda call: call.q.shape[2] != call.k.shape[2],
        lambda call: call.starts is not None and call.lengths is not None,
        lambda call: call.starts is not None and call.lengths is None,
        lambda call: call.group == 8,
        lambda call: call.window is not None,
        lambda call: call.softcap is not None,
        lambda call: call.sinks is not None,
        lambda call: not call.q.is_contiguous(),
        lambda call: call.k.shape[2] == 129,
        lambda call: call.q_offset is not None and call.q_offset + call.q.shape[2] < call.k.shape[2],
    )
    for condition in wanted:
        find(calls(), condition, settings=MANY)


@given(data=st.data())
def test_masks_are_well_formed(data: st.DataObject) -> None:
    call = data.draw(calls(max_len=60, max_heads=2, head_dims=(1,)))
    data.draw(masks(call)).check()


def test_every_kind_of_mask_occurs() -> None:
    call = find(calls(features=False, padding=("none",)), lambda call: call.q.shape[2] > 100, settings=MANY)
    wanted = (
        lambda mask: mask.stripes is not None and mask.group == 3,
        lambda mask: mask.tiles is not None and mask.stripes is None and mask.density < 1,
        lambda mask: mask.tile_q != mask.tile_k,
        lambda mask: mask.density == 1,
        lambda mask: bool((mask.tile_map().any()) & (mask.stripe_map().any())),
    )
    for condition in wanted:
        find(masks(call), condition, settings=MANY)
