"""AnchorAttention against a literal transcription of the paper's algorithms: the mask bit for bit, the output too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.anchor_attention.layout import Regions
from sparseprefill.plugins.anchor_attention.stages import region_lists

import sparseprefill as sp
from helpers.layers import fields_of
from oracles.anchor_attention import Answer, Parameters, anchor_attention

THETAS = st.sampled_from([math.inf, -math.inf, 0.0]) | st.floats(-6, 6)
PARAMETERS = st.builds(
    Parameters,
    theta=THETAS,
    step=st.integers(1, 5),
    block=st.integers(4, 32),
    init_tokens=st.integers(1, 200),
    use_anchor=st.booleans(),
)


def tensors(seed: int, heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 1) -> list[torch.Tensor]:
    """float64 q, k, v whose logits spread over about +-6, so that every theta splits the keys."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads[0], q_len, 8), (heads[1], kv_len, 8), (heads[1], kv_len, 6))
    return [torch.randn(batch, *size, generator=generator, dtype=torch.float64) * 1.5 for size in sizes]


def run(p: Parameters, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[sp.Result, Answer]:
    """The plugin's result and the oracle's."""
    pipeline = sp.build(
        "anchor-attention",
        theta=p.theta,
        step=p.step,
        block=p.block,
        init_tokens=p.init_tokens,
        use_anchor=p.use_anchor,
    )
    call = sp.AttentionCall(q, k, v, **fields_of(options))
    return pipeline.run(call), anchor_attention(q, k, v, p, **options)


def check(result: sp.Result, truth: Answer) -> None:
    """Both regions bit for bit, output and LSE to rounding."""
    assert result.plan.carry is not None
    assert torch.equal(truth.anchor, result.plan.carry.region.to_dense())
    assert torch.equal(truth.stripes, result.plan.mask.to_dense())
    assert torch.equal(truth.anchor | truth.stripes, result.mask.to_dense())
    torch.testing.assert_close(truth.out, result.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(truth.lse, result.lse, rtol=1e-12, atol=1e-12)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention and its LSE over the full matrix."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    logits = logits.masked_fill(future, -math.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@settings(max_examples=30, deadline=None)
@given(
    p=PARAMETERS,
    length=st.integers(1, 400),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2)]),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_paper(p: Parameters, length: int, heads: tuple[int, int], softcap: float | None, seed: int) -> None:
    check(*run(p, *tensors(seed, heads, length, length), softcap=softcap))


@settings(max_examples=25, deadline=None)
@given(
    p=PARAMETERS, q_len=st.integers(1, 120), before=st.integers(0, 200), after=st.integers(0, 40), seed=st.integers()
)
def test_equals_the_paper_at_any_offset(p: Parameters, q_len: int, before: int, after: int, seed: int) -> None:
    q, k, v = tensors(seed % 2**16, (2, 1), q_len, before + q_len + after)
    check(*run(p, q, k, v, q_offset=before, scale=0.5))


@settings(max_examples=25, deadline=None)
@given(
    p=PARAMETERS,
    kv_len=st.integers(2, 150),
    share=st.floats(0, 1),
    starts=st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    ends=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    seed=st.integers(0, 2**16),
)
@example(
    # The last block of the second group holds padding alone. It must select no stripes for the group.
    p=Parameters(theta=0.0, step=2, block=4, init_tokens=2), kv_len=14, share=1.0, starts=[0.2, 0.0], ends=[1.0, 0.8],
    seed=0,
)  # fmt: skip
def test_equals_the_paper_in_a_padded_batch(
    p: Parameters, kv_len: int, share: float, starts: list[float], ends: list[float], seed: int
) -> None:
    q_len = max(1, round(share * kv_len))
    first = [int(start * kv_len) for start in starts]
    lengths = [round(end * (kv_len - begin)) for begin, end in zip(first, ends, strict=True)]
    q, k, v = tensors(seed, (2, 2), q_len, kv_len, batch=2)
    check(*run(p, q, k, v, starts=first, lengths=lengths))


@pytest.mark.parametrize("block", [8, 16])
def test_the_threshold_itself_is_kept(block: int) -> None:
    q, k, v = tensors(3, (1, 1), 100, 100)
    result, truth = run(Parameters(0.0, 2, block, block), torch.zeros_like(q), k, v)
    check(result, truth)
    assert result.density == 1.0


def test_theta_minus_infinity_leaves_the_anchor_region() -> None:
    result, truth = run(Parameters(-math.inf, 2, 8, 8), *tensors(4, (2, 1), 90, 90))
    assert not bool(truth.stripes.any())
    assert torch.equal(truth.anchor, result.mask.to_dense())


@settings(max_examples=30, deadline=None)
@given(p=PARAMETERS, length=st.integers(1, 300), seed=st.integers(0, 2**16))
def test_carry_region_and_stripes_are_disjoint(p: Parameters, length: int, seed: int) -> None:
    q, k, v = tensors(seed, (2, 1), length, length)
    result, _ = run(p, q, k, v)
    assert result.plan.carry is not None
    assert not bool((result.plan.carry.region.to_dense() & result.plan.mask.to_dense()).any())


# Bugs of released code, each as a test. N is a multiple of the group, one less, and one more.
LENGTHS = [16, 32, 95, 96, 97, 160]


@pytest.mark.parametrize("length", LENGTHS)
def test_no_key_is_counted_twice_around_the_edge_of_a_group(length: int) -> None:
    q, k, v = tensors(5, (2, 1), length, length)
    result, _ = run(Parameters(math.inf, 2, 16, 16), q, k, v)
    torch.testing.assert_close(dense(q, k, v)[1], result.lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_no_key_is_lost_around_the_edge_of_a_group(length: int) -> None:
    result, _ = run(Parameters(math.inf, 2, 16, 16), *tensors(6, (1, 1), length, length))
    assert torch.equal(torch.ones(1, 1, length, length, dtype=torch.bool).tril(), result.mask.to_dense())


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_no_zeros_where_the_length_is_a_multiple_of_the_group(groups: int) -> None:
    q, k, v = tensors(7, (2, 1), groups * 32, groups * 32)
    result, _ = run(Parameters(math.inf, 2, 16, 16), q, k, v)
    assert not bool((result.out == 0).any())
    torch.testing.assert_close(dense(q, k, v)[0], result.out, rtol=1e-12, atol=1e-12)


def test_a_partial_last_group_is_sparse_too() -> None:
    result, truth = run(Parameters(-6.0, 4, 8, 8), *tensors(8, (1, 1), 101, 101))
    check(result, truth)
    last = result.mask.to_dense()[0, 0, 96:]
    assert int(last.sum()) < int(torch.ones(101, 101).tril()[96:].sum())


@settings(max_examples=30, deadline=None)
@given(p=PARAMETERS, length=st.integers(1, 300), heads=st.sampled_from([(1, 1), (4, 1)]), seed=st.integers(0, 2**16))
def test_theta_infinity_is_dense_attention(p: Parameters, length: int, heads: tuple[int, int], seed: int) -> None:
    q, k, v = tensors(seed, heads, length, length)
    result, _ = run(Parameters(math.inf, p.step, p.block, p.init_tokens, p.use_anchor), q, k, v)
    out, lse = dense(q, k, v)
    torch.testing.assert_close(out, result.out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, result.lse, rtol=1e-12, atol=1e-12)


def test_without_anchor_compares_with_zero() -> None:
    q, k, v = tensors(9, (1, 1), 120, 120)
    (with_anchor, _), (without, truth) = (run(Parameters(1.0, 2, 8, 8, use), q, k, v) for use in (True, False))
    check(without, truth)
    assert without.density > with_anchor.density


def test_layers_of_one_shape_share_the_lists_of_the_anchor_region() -> None:
    regions, call = Regions(8, 2, 8), sp.AttentionCall(*tensors(11, (2, 1), 60, 90))
    first = region_lists(call.geometry, regions)
    assert first is region_lists(call.geometry, regions)
    starts = torch.zeros(1, dtype=torch.int32)
    fresh = region_lists(sp.AttentionCall(call.q, call.k, call.v, starts=starts).geometry, regions)
    rows = first.shape[2]
    assert torch.equal(fresh.counts[:, :, :rows], first.counts)
    assert torch.equal(fresh.indices[: int(fresh.counts[:, :, :rows].sum())], first.indices[: int(first.counts.sum())])
    starts = torch.tensor([3], dtype=torch.int32)
    padded = sp.AttentionCall(call.q, call.k, call.v, starts=starts)
    assert region_lists(padded.geometry, regions) is not region_lists(padded.geometry, regions)


def test_workspace_grows_with_the_candidates() -> None:
    estimator: Any = sp.build("anchor-attention").estimator

    def need(q_len: int, kv_len: int, heads: int = 4) -> int:
        q, k = (
            torch.empty(1, h, n, 128, dtype=torch.bfloat16, device="meta") for h, n in ((heads, q_len), (1, kv_len))
        )
        return int(estimator.workspace(sp.AttentionCall(q, k, k)))

    million = 1 << 20
    assert need(million // 8, million) < 2.5 * 2**30 < need(million, million)
    assert need(4096, 4096) < need(4096, 8192) < need(8192, 8192)
    assert need(8192, 8192) < need(8192, 8192, heads=8)
