"""SoftmaxState: merging and finishing, with nothing attended to and with sinks."""

from __future__ import annotations

import math

import torch

from sparseprefill.plan import SoftmaxState, base_of

CPU = torch.device("cpu")


def state(logits: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
    m = logits.amax(-1)
    p = torch.exp(logits - m[..., None])
    return SoftmaxState(m, p.sum(-1), p @ v)


def parts(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, 3, n, generator=source) * 5, torch.randn(1, 2, n, 4, generator=source)


def test_merge_is_the_softmax_over_both() -> None:
    (a, va), (b, vb) = parts(5), parts(7, 1)
    out, lse = state(a, va).merge(state(b, vb)).finish()
    both = torch.cat([a, b], -1)
    torch.testing.assert_close(out, torch.softmax(both, -1) @ torch.cat([va, vb], 2))
    torch.testing.assert_close(lse, torch.logsumexp(both, -1))


def test_what_is_taken_from_logits() -> None:
    """Their largest, so that none is too large for `exp`; -inf less -inf would be no number."""
    most = torch.tensor([-torch.inf, -3.0, 0.0, 700.0, torch.inf])
    assert base_of(most).tolist() == [0.0, -3.0, 0.0, 700.0, torch.inf]
    assert bool(base_of(torch.tensor(torch.nan)).isnan())


def test_empty_is_neutral() -> None:
    nothing, some = SoftmaxState.empty((1, 2, 3), 4, torch.float32, CPU), state(*parts(5))
    for merged in (nothing.merge(some), some.merge(nothing)):
        for expected, actual in zip(some.finish(), merged.finish(), strict=True):
            assert torch.equal(expected, actual)


def test_nothing_and_nothing_is_nothing() -> None:
    nothing = SoftmaxState.empty((1, 2, 3), 4, torch.float32, CPU)
    for one in (nothing, nothing.merge(nothing)):
        out, lse = one.finish()
        assert bool((out == 0).all())
        assert bool((lse == -math.inf).all())


def test_sinks_join_the_denominator_alone() -> None:
    logits, v = parts(5)
    sinks = torch.tensor([0.5, -3.0])
    out, lse = state(logits, v).finish(sinks)
    whole = torch.softmax(torch.cat([sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1), logits], -1), -1)[..., 1:]
    torch.testing.assert_close(out, whole @ v)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))


def test_far_larger_sink_leaves_nothing_but_no_nan() -> None:
    out, _ = state(*parts(5)).finish(torch.tensor([1e4, 1e4]))
    assert bool((out == 0).all())


def test_sinks_of_an_empty_row() -> None:
    out, lse = SoftmaxState.empty((1, 2, 3), 4, torch.float32, CPU).finish(torch.zeros(2))
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_large_logits_do_not_overflow() -> None:
    logits, v = parts(5)
    out, lse = state(logits + 1e4, v).merge(state(logits - 1e4, v)).finish()
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ v, atol=1e-2, rtol=1e-2)
    assert bool(torch.isfinite(lse).all())
