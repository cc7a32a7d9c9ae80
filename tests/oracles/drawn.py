"""Calls drawn by hypothesis, as oracles take them, and the comparison of a pipeline with an oracle's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import sparseprefill as sp
from oracles import classic

HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2)])
SHARES = st.lists(st.floats(0, 0.99), min_size=2, max_size=2)
Made = dict[str, Any]


def call(
    seed: int, heads: tuple[int, int], q_len: int, before: int, after: int = 0, batch: int = 1, **options: Any
) -> Made:
    """float64 q, k, v whose logits spread over about +-6; queries stand behind `before` keys, before `after` more."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = before + q_len + after
    sizes = {"q": (heads[0], q_len, 8), "k": (heads[1], kv_len, 8), "v": (heads[1], kv_len, 6)}
    made = {
        name: torch.randn(batch, *size, generator=generator, dtype=torch.float64) * 1.5 for name, size in sizes.items()
    }
    return {**made, "q_offset": before, **options}


def padded(seed: int, kv_len: int, share: float, starts: list[float], ends: list[float]) -> Made:
    """A batch of two rows, padded left and right."""
    first = [int(start * kv_len) for start in starts]
    lengths = [round(end * (kv_len - begin)) for begin, end in zip(first, ends, strict=True)]
    q_len = max(1, round(share * kv_len))
    return call(seed, (2, 1), q_len, kv_len - q_len, 0, 2, starts=first, lengths=lengths)


def calls(longest: int) -> st.SearchStrategy[Made]:
    """Whole prompts, calls behind a prefix and before keys of the future, softcap, padded batches."""
    seed, some = st.integers(0, 999), st.integers(0, longest // 3)
    return st.one_of(
        st.builds(call, seed, HEADS, st.integers(1, longest), st.just(0)),
        st.builds(call, seed, HEADS, st.integers(1, longest // 3), some, some, softcap=st.sampled_from([None, 3.0])),
        st.builds(padded, seed, st.integers(2, longest // 2), st.floats(0, 1), SHARES, SHARES),
    )


def run(pipeline: sp.Pipeline, made: Made, **options: Any) -> sp.Result:
    """The pipeline's result; lists of starts and lengths become tensors."""
    rows: Made = {name: torch.tensor(made[name], dtype=torch.int32) for name in ("starts", "lengths") if name in made}
    arguments: Made = {**made, **rows, **options}
    return pipeline.run(sp.AttentionCall(**arguments))


def compare(
    pipeline: sp.Pipeline,
    made: Made,
    make: Callable[[Tensor, Tensor, int, float, float | None], classic.Keep],
    **options: Any,
) -> sp.Result:
    """Mask bit for bit, output to rounding. options: of the call alone, which `make` knows already."""
    result = run(pipeline, made, **options)
    out, mask = classic.classic(**made, make=make)
    assert torch.equal(mask, result.mask.to_dense())
    torch.testing.assert_close(out, result.out, rtol=1e-12, atol=1e-12)
    return result
