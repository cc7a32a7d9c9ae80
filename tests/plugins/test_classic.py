"""The classic methods against brute force: masks bit for bit, outputs to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.layers import fields_of
from helpers.oracle_calls import call, padded
from oracles import classic

HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2)])


CALLS = st.one_of(
    st.builds(call, st.integers(0, 999), HEADS, length := st.integers(1, 200), length, softcap=st.just(3.0)).filter(
        lambda made: made["q"].shape[2] <= made["k"].shape[2]
    ),
    st.builds(
        padded,
        st.integers(0, 999),
        st.integers(2, 120),
        st.floats(0, 1),
        st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
        st.lists(st.floats(0, 1), min_size=2, max_size=2),
    ),
)


def compare(pipeline: sp.Pipeline, made: dict[str, Any], truth: tuple[torch.Tensor, torch.Tensor]) -> None:
    result = pipeline.run(sp.AttentionCall(**fields_of(made)))
    assert torch.equal(truth[1], result.mask.to_dense())
    torch.testing.assert_close(truth[0], result.out, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(made=CALLS, sink=st.integers(0, 70), window=st.integers(1, 90), block=st.integers(2, 32))
def test_streaming_equals_brute_force(made: dict[str, Any], sink: int, window: int, block: int) -> None:
    truth = classic.classic(**made, make=lambda *_: classic.tiles_streaming(sink, window, block))
    compare(sp.build("streaming", sink=sink, window=window, block=block), made, truth)


@settings(max_examples=60, deadline=None)
@given(made=CALLS, gamma=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 0.99), block=st.integers(2, 40))
def test_vertical_slash_equals_algorithm_5(made: dict[str, Any], gamma: float, block: int) -> None:
    def make(q: torch.Tensor, k: torch.Tensor, first: int, scale: float, softcap: float | None) -> classic.Keep:
        return classic.vertical_slash(q, k, first, gamma, block, scale, softcap)

    compare(sp.build("vertical-slash", gamma=gamma, block=block), made, classic.classic(**made, make=make))


@settings(max_examples=20, deadline=None)
@given(made=CALLS, block=st.integers(1, 40))
def test_dense_keeps_every_causal_key(made: dict[str, Any], block: int) -> None:
    truth = classic.classic(**made, make=lambda *_: lambda query, key: True)
    compare(sp.build("dense", block=block), made, truth)


def test_a_slash_bin_keeps_both_tile_diagonals_that_its_pairs_fall_in() -> None:
    """A key at distance 20 of every sampled query, blocks of 16: bin 1, tile diagonals 1 and 2."""
    q = torch.zeros(1, 1, 96, 96, dtype=torch.float64)
    q[0, 0, range(20, 96), range(76)] = 1.0
    k = torch.eye(96, dtype=torch.float64)[None, None] * 500
    result = sp.build("vertical-slash", gamma=0.5, block=16).run(sp.AttentionCall(q, k, k))
    tiles = result.mask.tile_map()[0, 0]
    expected = [0, 1, 2]
    assert expected == sorted({int(r - c) for r, c in tiles.nonzero()})


@pytest.mark.parametrize(("method", "full"), [("streaming", {"window": 1 << 30}), ("vertical-slash", {"gamma": 1.0})])
def test_full_settings_are_dense(method: str, full: dict[str, Any]) -> None:
    made = call(1, (2, 1), 150, 150)
    truth = classic.classic(**made, make=lambda *_: lambda query, key: True)
    compare(sp.build(method, block=16, **full), made, truth)
