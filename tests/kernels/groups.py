"""Calls and launch settings for tests of kernels over groups of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from kernels.device import CUDA, DEVICE, DTYPES, TMA
from sparseprefill import AttentionCall
from sparseprefill.kernels import groups as group_launch
from sparseprefill.kernels.settings import Settings
from sparseprefill.testing import tensors

SMALL = st.sampled_from([(16, 16), (16, 32), (16, 64)])
LENGTHS = st.sampled_from([1, 16, 127, 128, 129, 151]) | st.integers(1, 200 if CUDA else 150)


def small_settings(patch: pytest.MonkeyPatch, tile: tuple[int, int], tma: bool) -> Settings:
    """Tiles that a short call has many of; on a GPU this replaces the settings that production takes."""
    chosen = Settings(*tile, 4, 2, tma=tma, block_k=16)
    patch.setattr(group_launch, "group_settings", lambda chip, itemsize: chosen)
    return chosen


def make(
    dtype: torch.dtype, heads: tuple[int, int], q_len: int, before: int, after: int, **options: Any
) -> AttentionCall:
    """A call on the device under test; lists of starts and lengths become tensors."""
    rows: dict[str, Any] = {
        name: torch.tensor(options.pop(name), dtype=torch.int32, device=DEVICE)
        for name in ("starts", "lengths")
        if name in options
    }
    shape = {"batch": 2 if rows else 1, "heads": heads[0], "kv_heads": heads[1], "head_dim": options.pop("width", 16)}
    place: dict[str, Any] = {"device": DEVICE, "dtype": dtype, "strided": options.pop("strided", False)}
    q, k, v = tensors("random", q_len=q_len, kv_len=before + q_len + after, **shape, **place)
    return AttentionCall(q, k, v, q_offset=before, **options, **rows)


@st.composite
def grouped_calls(draw: st.DrawFn) -> AttentionCall:
    """Calls of any length and offset, GQA of 1, 4 and 8, padded batches, softcap, window."""
    heads = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 1)]))
    q_len, before, after = draw(LENGTHS), draw(st.integers(0, 90)), draw(st.integers(0, 20))
    options: dict[str, Any] = {
        "softcap": draw(st.sampled_from([None, 3.0])),
        "window": draw(st.none() | st.integers(1, 150)),
        "width": draw(st.sampled_from([16, 24])),
        "strided": draw(st.booleans()),
    }
    total = before + q_len + after
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, total - 1), min_size=2, max_size=2))
        options["lengths"] = [draw(st.integers(1, total - start)) for start in starts]
        options["starts"] = starts
    return make(draw(st.sampled_from(DTYPES)), heads, q_len, before, after, **options)


__all__ = ["CUDA", "DEVICE", "DTYPES", "SMALL", "TMA", "grouped_calls", "make", "small_settings"]
