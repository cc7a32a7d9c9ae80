"""Calls of several layers in a row, for methods that remember from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import sparseprefill as sp

Layers = list[tuple[Tensor, Tensor, Tensor]]
"""q, k and v of each."""


@st.composite
def places(draw: st.DrawFn, longest: int, padded: int) -> tuple[int, int, int, dict[str, Any]]:
    """Batch rows, rows and keys of a call, and its options: a prompt, a chunk of one, or two padded rows.

    longest, padded: the most keys, without padding and with it.
    """
    kind = draw(st.sampled_from(["plain", "chunk", "padded"]))
    kv_len = draw(st.integers(1, padded if kind == "padded" else longest))
    q_len = kv_len if kind == "plain" else draw(st.integers(1, kv_len))
    options: dict[str, Any] = {"softcap": draw(st.sampled_from([None, 3.0]))}
    if kind == "chunk":
        options["q_offset"] = draw(st.integers(0, kv_len - q_len))
    if kind == "padded":
        options["starts"] = draw(st.lists(st.integers(0, kv_len - 1), min_size=2, max_size=2))
        options["lengths"] = [draw(st.integers(1, kv_len - start)) for start in options["starts"]]
    return 2 if kind == "padded" else 1, q_len, kv_len, options


@st.composite
def calls(
    draw: st.DrawFn, heads: list[tuple[int, int]], longest: int, padded: int, make: Callable[..., Layers]
) -> tuple[Layers, dict[str, Any]]:
    """Layers, and the options of their calls.

    heads: query heads and KV heads to choose from. longest, padded: as of `places`. make: of a seed, heads, rows, keys
    and batch rows.
    """
    chosen = draw(st.sampled_from(heads))
    batch, q_len, kv_len, options = draw(places(longest, padded))
    return make(draw(st.integers(0, 9999)), chosen, q_len, kv_len, batch), options


def run(layers: Layers, pipeline: Any, memory: sp.Memory | None = None, **options: Any) -> list[sp.Result]:
    """All layers with one memory."""
    fields, memory = fields_of(options), sp.Memory() if memory is None else memory
    return [pipeline.run(sp.AttentionCall(*qkv, layer=i, **fields), memory) for i, qkv in enumerate(layers)]


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a call, whose rows are tensors."""
    rows = ("starts", "lengths")
    return {name: torch.tensor(one, dtype=torch.int32) if name in rows else one for name, one in options.items()}
