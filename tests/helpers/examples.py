"""Fewer examples, calls and methods for laws that are dear and that other tests hold to all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import settings

from sparseprefill import AttentionCall
from sparseprefill.testing import standard_calls

SCOPES = {"head": "anchor-attention", "group": "kascade"}
"""A method of each `head_scope`: laws whose calls are drawn go over these; with ``-m thorough`` over all of them."""


def few_of(values: Collection[Any], few: Collection[Any] = tuple(SCOPES.values())) -> list[Any]:
    """What a test is parametrized with: all values, of which all but a few run with ``-m thorough`` alone."""
    assert set(few) <= set(values)
    return [one if one in few else pytest.param(one, marks=pytest.mark.thorough) for one in values]


def part(share: float) -> settings:
    """A decorator: that share of what the profile draws, and so more in CI than at a desk."""
    return settings(max_examples=max(5, round(share * settings().max_examples)))


def few_calls(dtype: torch.dtype = torch.float32) -> tuple[AttentionCall, ...]:
    """Of the standard calls a row alone, and one each for: a prefix, an offset, padding, a window, sinks, KV heads."""
    calls = standard_calls(dtype=dtype)
    return (
        next(call for call in calls if 1 == call.q.shape[2] < call.kv_len),
        next(call for call in calls if 1 < call.q.shape[2] < call.kv_len and call.q_offset is None),
        next(call for call in calls if call.q_offset is not None),
        next(call for call in calls if call.starts is not None),
        next(call for call in calls if call.window is not None),
        next(call for call in calls if call.sinks is not None),
        next(call for call in calls if call.k.shape[1] > 1 and call.window is None),
    )


def untied(share: float) -> bool:
    """For a strategy's filter: no share that some of n equal masses meet exactly, where the last bit would decide.

    Whole tiles of short rows have a mass of 1 each, and hypothesis likes a half and a third.
    """
    return all(abs(share * n - round(share * n)) > 1e-6 for n in range(1, 64))
