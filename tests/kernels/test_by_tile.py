"""The kernel of sampled rows by key tile against plain PyTorch, on tensors and on pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.caches import paged, untouched
from kernels.device import CUDA, DEVICE, DTYPES
from kernels.test_sampled import FIELDS, call_of, moved
from sparseprefill import AttentionCall, RecallFloor, kernels
from sparseprefill.kernels.sampled.by_tile import tile_lse
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.samples import KeptKeys, Stretches, deal
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan
from sparseprefill.statistics.by_tile import lse_by_tile

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def kept_keys(call: AttentionCall, at: Stretches, lines: int | None) -> KeptKeys:
    """Keys at random: of each sampled row its own, or of so many lines one for each."""
    source, (batch, count) = torch.Generator().manual_seed(0), at.rows.shape
    shape = (*call.q.shape[:2], lines or count, call.kv_len)
    line = None if lines is None else torch.randint(lines, (batch, count), generator=source)
    return KeptKeys(torch.rand(shape, generator=source) < 0.4, line)


def check(call: AttentionCall, tile: int, rows: int, *, keys: str) -> None:
    at = deal(call.geometry, 16, rows, None)
    held = None if keys == "all" else kept_keys(call, at, 3 if keys == "shared" else None)
    expected = lse_by_tile(call, at.rows, at.real, tile, held)
    there = None if held is None else KeptKeys(held.map.to(DEVICE), None if held.line is None else held.line.to(DEVICE))
    found = tile_lse(moved(call), at.rows.to(DEVICE), at.real.to(DEVICE), tile, there)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other.cpu(), rtol=2e-5, atol=2e-5)


@settings(max_examples=100 if CUDA else 8)
@given(
    lengths=st.tuples(st.sampled_from([1, 16, 127, 128, 129, 251]), st.sampled_from([0, 1, 77, 300])),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (4, 1), (8, 1), (4, 2)]),
    fields=st.sampled_from(FIELDS),
    tile=st.sampled_from([64, 128, 16, 24, 8]),
    rows=st.sampled_from([64, 1, 5]),
    keys=st.sampled_from(["all", "own", "shared"]),
)
@example(lengths=(251, 300), dtype=DTYPES[1], heads=(8, 1), fields=FIELDS[-1], tile=24, rows=64, keys="own")
@example(lengths=(129, 551), dtype=DTYPES[1], heads=(8, 1), fields=FIELDS[0], tile=512, rows=5, keys="all")
@example(lengths=(129, 77), dtype=DTYPES[0], heads=(4, 2), fields=FIELDS[3], tile=64, rows=5, keys="shared")
def test_rows_by_key_tile(
    lengths: tuple[int, int],
    dtype: torch.dtype,
    heads: tuple[int, int],
    fields: dict[str, Any],
    tile: int,
    rows: int,
    *,
    keys: str,
) -> None:
    check(call_of(lengths[0], sum(lengths), dtype, heads, **fields), tile, rows, keys=keys)


@pytest.mark.parametrize("width", [8, 64, 80, 256])
def test_head_dimensions(width: int) -> None:
    check(call_of(70, 200, DTYPES[1], width=width), 64, 5, keys="shared")


def test_a_floor_reads_pages_in_place() -> None:
    both = moved(call_of(150, 200, DTYPES[1]))
    one = evolve(both, q=both.q[:1], k=both.k[:1], v=both.v[:1])
    there = paged(one, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "serve", lambda _: True)
        expected, found = (
            RecallFloor(rows=5).refine(call, Plan(SparseMask.empty(call, 16)), Memory()) for call in (one, there)
        )
    assert untouched(there)
    assert torch.equal(expected.mask.to_dense(), found.mask.to_dense())
    assert torch.equal(expected.notes["recall_after"], found.notes["recall_after"])
