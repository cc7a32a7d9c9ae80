"""SampleAttention against Algorithm 1 by brute force: masks bit for bit, outputs and CRA to rounding."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.sample_attention.cra import cra
from sparseprefill.plugins.sample_attention.stages import dealt

import sparseprefill as sp
from helpers.layers import fields_of
from helpers.oracle_calls import call, padded
from oracles.sample_attention import sample_attention

HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2)])
ALPHA = st.sampled_from([0.0, 1.0]) | st.floats(0.05, 0.99)
SETTINGS = st.fixed_dictionaries(
    {
        "alpha_c": ALPHA,
        "alpha_s": ALPHA,
        "chunk_n": st.integers(1, 6),
        "block": st.integers(2, 40),
        "extend": st.sampled_from(["chunk", "union"]),
    }
)


SHARES = st.lists(st.floats(0, 0.99), min_size=2, max_size=2)
CALLS = st.one_of(
    st.builds(call, st.integers(0, 999), HEADS, length := st.integers(1, 300), length).filter(
        lambda made: made["q"].shape[2] <= made["k"].shape[2]
    ),
    st.builds(call, st.integers(0, 999), HEADS, short := st.integers(1, 90), short, softcap=st.just(3.0)).filter(
        lambda made: made["q"].shape[2] <= made["k"].shape[2]
    ),
    st.builds(padded, st.integers(0, 999), st.integers(2, 120), st.floats(0, 1), SHARES, SHARES),
)


def attend(made: dict[str, Any], **parameters: Any) -> sp.Result:
    pipeline: sp.Pipeline = sp.build("sample-attention", **parameters)
    return pipeline.run(sp.AttentionCall(**fields_of(made)))


@settings(max_examples=30, deadline=None)
@given(made=CALLS, chosen=SETTINGS)
def test_mask_output_and_cra_equal_algorithm_1(made: dict[str, Any], chosen: dict[str, Any]) -> None:
    out, mask, least = sample_attention(**made, **chosen)
    result = attend(made, **chosen)
    assert torch.equal(mask, result.mask.to_dense())
    torch.testing.assert_close(out, result.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(least, cra(result), rtol=1e-12, atol=1e-12, equal_nan=True)


def planted(lags: dict[int, int], length: int = 96) -> sp.AttentionCall:
    """Queries from a row on look at one key alone: ``{first row: distance}``, later entries override."""
    q = torch.zeros(1, 1, length, length, dtype=torch.float64)
    for begin, lag in lags.items():
        q[0, 0, begin:] = 0
        rows = range(max(begin, lag), length)
        q[0, 0, rows, [row - lag for row in rows]] = 1.0
    k = torch.eye(length, dtype=torch.float64)[None, None] * 500
    return sp.AttentionCall(q, k, k)


def lags_of(mask: sp.SparseMask, rows: range) -> set[int]:
    """Tile diagonals that the query tiles `rows` hold, the first column apart."""
    return {int(r - c) for r, c in mask.tile_map()[0, 0].nonzero() if int(r) in rows and int(c) > 0}


def test_a_slash_bin_keeps_both_tile_diagonals_that_its_pairs_fall_in() -> None:
    """Keys 20 back, blocks of 16: bin 1, tile diagonals 1 and 2. Released code keeps one and loses half the pairs."""
    call = planted({0: 20})
    result = sp.build("sample-attention", alpha_c=0.0, alpha_s=0.9, chunk_n=1, block=16).run(call)
    assert {0, 1, 2} == lags_of(result.mask, range(6))
    assert float(cra(result).min()) > 0.999


def test_columns_and_diagonals_govern_their_own_chunk_or_all() -> None:
    """The upper half looks 20 back, the lower half 40."""
    call = planted({0: 20, 48: 40})
    parameters: dict[str, Any] = {"alpha_c": 0.0, "alpha_s": 0.9, "chunk_n": 2, "block": 16}
    own = sp.build("sample-attention", **parameters).run(call).mask
    assert ({0, 1}, {0, 2, 3}) == (lags_of(own, range(3)), lags_of(own, range(3, 6)))
    shared = sp.build("sample-attention", **parameters, extend="union").run(call).mask
    assert {0, 1, 2, 3} == lags_of(shared, range(6))
    bottom = sp.build("sample-attention", **{**parameters, "chunk_n": 1}).run(call).mask
    assert {0, 2, 3} == lags_of(bottom, range(6))


@pytest.mark.parametrize("offset", [0, 5, 16, 31])
def test_the_diagonal_tile_stays_when_the_offset_is_no_multiple_of_the_block(offset: int) -> None:
    made = call(3, (1, 1), 40, 40 + offset)
    result = attend(made, alpha_c=0.0, alpha_s=0.0, block=16)
    rows = torch.arange(40)
    assert bool(result.mask.to_dense()[0, 0, rows, rows + offset].all())
    assert torch.isfinite(result.lse).all()


@pytest.mark.parametrize("share", [0.3, 0.77, 0.9])
def test_selected_columns_are_not_short_of_the_threshold(share: float) -> None:
    """The element that crosses is part of the prefix: the sampled rows keep alpha of their mass on average."""
    made = call(5, (2, 1), 200, 200)
    result = attend(made, alpha_c=share, alpha_s=0.0, chunk_n=1, block=16)
    rows = torch.arange(200 - 16, 200)
    arguments: dict[str, Any] = made
    kept = sp.recall(sp.AttentionCall(**arguments), result, rows)
    assert float(kept.mean(-1).min()) >= share


def test_more_chunks_than_blocks_make_every_block_a_chunk() -> None:
    made = call(1, (1, 1), 50, 50)
    few, many = (attend(made, alpha_c=0.5, alpha_s=0.5, block=16, chunk_n=n) for n in (4, 1000))
    assert torch.equal(few.mask.to_dense(), many.mask.to_dense())
    geometry = sp.AttentionCall(made["q"], made["k"], made["v"]).geometry
    samples = dealt(geometry, 16, 1000)
    assert [[0, 1, 2, 3]] == samples.part.tolist()
    assert (16, 32, 48, 50) == samples.until


def test_a_chunk_samples_its_own_last_rows() -> None:
    geometry = sp.AttentionCall(*(torch.zeros(1, 1, n, 4) for n in (60, 70, 70))).geometry
    samples = dealt(geometry, 16, 2)  # positions 10 to 69: tiles 0 to 4, three to the first chunk
    assert [[0, 0, 0, 1, 1]] == samples.part.tolist()
    assert (list(range(22, 38)), list(range(44, 60))) == tuple(samples.rows[0].tolist())
    assert bool(samples.real.all())


def test_cra_takes_a_result_of_this_method() -> None:
    made = call(1, (1, 1), 20, 20)
    other = sp.build("dense").run(sp.AttentionCall(made["q"], made["k"], made["v"]))
    with pytest.raises(sp.StageError, match="sample-attention"):
        cra(other)
