"""Gradients through a pipeline are those of the softmax over what it computed: which keys it chose is a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import sparseprefill as sp
from helpers.build import int32, make, random_mask
from helpers.correctors import Blend
from helpers.examples import SCOPES
from helpers.stubs import Estimate
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import attention
from sparseprefill.testing.votes import computed

METHODS = sorted(sp.default_registry().methods())
NAMES = ("q", "k", "v")
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks and softcap": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64), "softcap": 3.0},
    "starts": {"batch": 2, "starts": int32(0, 37)},
    "lengths": {"batch": 2, "lengths": int32(150, 61)},
    "window": {"window": 40},
}
EXECUTORS: dict[str, Any] = {
    "auto": sp.AutoExecutor(),
    "cpu": sp.CpuExecutor(),
    "reference": sp.ReferenceExecutor(),
}
calls = pytest.mark.parametrize("fields", CALLS.values(), ids=CALLS)


def recorded(call: sp.AttentionCall) -> sp.AttentionCall:
    """The call with leaves of their own, of which gradients are recorded."""
    leaves = {name: getattr(call, name).clone().requires_grad_() for name in NAMES}
    sinks = None if call.sinks is None else call.sinks.clone().requires_grad_()
    return evolve(call, **leaves, sinks=sinks)


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    return list(torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True))


def leaves_of(call: sp.AttentionCall) -> list[Tensor]:
    return [call.q, call.k, call.v, *([] if call.sinks is None else [call.sinks])]


def close(expected: Sequence[Tensor], actual: Sequence[Tensor], bound: float = 1e-9) -> None:
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, atol=bound, rtol=bound)


def check(pipeline: sp.Pipeline, call: sp.AttentionCall, keep: Callable[[sp.Result], Tensor | None]) -> None:
    """Output and gradients beside those of plain attention, of the LSE of real rows, too; twice, each with a graph of
    its own."""
    for _ in range(2):
        result = pipeline.run(call)
        truth, lse = attention(call, keep(result))
        close([truth], [result.out.detach()])
        close(gradients(truth, leaves_of(call)), gradients(result.out, leaves_of(call)))
        real = torch.isfinite(lse)
        close(gradients(lse[real], [call.q, call.k]), gradients(result.lse[real], [call.q, call.k]))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(pytest.param(name, CALLS["plain"], id=name) for name in METHODS),
        *(
            pytest.param(name, CALLS[one], id=f"{name}-{one}")
            for name in SCOPES.values()
            for one in CALLS
            if one != "plain"
        ),
    ],
)
def test_of_a_full_mask_are_those_of_dense_attention(name: str, fields: dict[str, Any]) -> None:
    method = sp.default_registry().get(name)
    call = recorded(make(150, heads=4, kv_heads=2, dtype=torch.float64, kind="stripes", **fields))
    full = method.full or {}
    for parameters in (full, {**method.small, **full}):
        pipeline = method.pipeline(**parameters)
        if not pipeline.unsupported(call):
            check(pipeline, call, lambda result: None)


@calls
@pytest.mark.parametrize("name", METHODS)
def test_of_a_sparse_mask_are_those_of_what_was_computed(name: str, fields: dict[str, Any]) -> None:
    method = sp.default_registry().get(name)
    call = recorded(make(150, heads=4, kv_heads=2, dtype=torch.float64, kind="stripes", **fields))
    pipeline = method.pipeline(**method.small)
    if not pipeline.unsupported(call):
        check(pipeline, call, lambda result: computed(call, result))


@pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)
@pytest.mark.parametrize("name", ["anchor-attention", "flexprefill", "skip-softmax"])
def test_by_every_executor_with_a_floor_and_in_parts(name: str, executor: Any) -> None:
    call = recorded(make(150, heads=4, kv_heads=2, dtype=torch.float64, kind="stripes"))
    method = sp.default_registry().get(name)
    pipeline = evolve(method.pipeline(**method.small, recall=0.95), executor=executor)
    check(pipeline, call, lambda result: computed(call, result))
    whole, parts = pipeline.run(call), evolve(pipeline, workspace=1).run(call)
    if pipeline.head_scope == "head":
        assert parts.parts is not None
    close(gradients(whole.out, leaves_of(call)), gradients(parts.out, leaves_of(call)))


def test_skipping_leaves_something_out() -> None:
    """Else the tests above would say nothing about votes."""
    call = recorded(make(150, heads=4, kv_heads=2, dtype=torch.float64, kind="stripes"))
    result = sp.build("skip-softmax", **sp.default_registry().get("skip-softmax").small).run(call)
    assert result.skipped_share > 0


@pytest.mark.parametrize("fields", [CALLS["plain"], CALLS["sinks and softcap"], {"batch": 2, "starts": int32(0, 9)}])
@pytest.mark.parametrize("kind", ["tiles", "both"])
def test_of_what_a_corrector_changed(kind: str, fields: dict[str, Any]) -> None:
    """Beside differences of the output itself; the mask is one and the same."""
    call = recorded(make(40, heads=4, kv_heads=2, dtype=torch.float64, **fields))
    plan = sp.Plan(random_mask(call, kind, (8, 8), 2, seed=1)).keep(band=0)
    pipeline = sp.Pipeline(Estimate(lambda *_: plan), corrector=Blend())

    def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pipeline.run(evolve(call, q=q, k=k, v=v)).out

    assert not torch.equal(pipeline.with_corrector(None).run(call).out, out(call.q, call.k, call.v))
    assert torch.autograd.gradcheck(out, (call.q, call.k, call.v), fast_mode=True)


def paged(call: sp.AttentionCall, *, fp8: bool = False) -> tuple[sp.AttentionCall, Tensor, Tensor]:
    """The call with its keys and values in pages of a cache, of which gradients are recorded."""
    page, length = 16, call.kv_len
    count = -(-length // page)

    def cache(x: Tensor) -> Tensor:
        stored = x.new_zeros(count * page, x.shape[1], x.shape[3])
        stored[:length] = x[0].transpose(0, 1)
        return stored.view(count, page, *stored.shape[1:]).detach().requires_grad_()

    k, v = cache(call.k), cache(call.v)
    pages = sp.Pages(k, v, torch.arange(count, dtype=torch.int32), length)
    return sp.AttentionCall.of_pages(call.q, pages), k, v


@pytest.mark.parametrize(
    ("name", "before"),
    [
        *((name, torch.inference_mode) for name in METHODS),
        *((name, before) for name in SCOPES.values() for before in (torch.no_grad, torch.enable_grad)),
    ],
)
def test_reach_the_pages_whoever_read_them_before(name: str, before: Callable[[], Any]) -> None:
    plain = recorded(make(150, heads=4, kv_heads=2, dtype=torch.float64, kind="stripes"))
    method = sp.default_registry().get(name)
    pipeline = method.pipeline(**method.small)
    call, k, v = paged(plain)
    with before():
        assert (1, 2, 150, 8) == tuple(call.k.shape) == tuple(call.v.shape)
    for _ in range(2):
        expected = gradients(pipeline.run(plain).out, [plain.q, plain.k, plain.v])
        of_q, *of_cache = gradients(pipeline.run(call).out, [plain.q, k, v])
        tokens = [x.flatten(0, 1)[:150].transpose(0, 1)[None] for x in of_cache]
        close(expected, [of_q, *tokens])


def test_pages_are_copied_once() -> None:
    call, k, v = paged(make(40, heads=4, kv_heads=2))
    assert call.pages is not None
    with torch.inference_mode():
        first = call.pages.keys()
    assert first is call.pages.keys() is call.k
    assert (first.requires_grad, first.is_inference()) == (True, False)
    for _ in range(2):  # of the one copy, without another forward
        (found,) = torch.autograd.grad(first.sum(), k)
        assert float(found.sum()) == 40 * 2 * 8
    (some,) = torch.autograd.grad(call.pages.values_at(torch.tensor([3, 3, 17])).sum(), v)
    assert [float(some.flatten(0, 1)[at, 0, 0]) for at in (3, 17)] == [2.0, 1.0]


@pytest.mark.parametrize("name", ["k", "k_scale"])
def test_pages_in_8_bits_have_no_gradient(name: str) -> None:
    cache = torch.zeros(2, 16, 2, 8).to(torch.float8_e4m3fn)
    given = {"k": cache, "v": cache, "table": torch.arange(2, dtype=torch.int32), "k_scale": torch.ones(1)}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(sp.InvalidCallError, match=rf"pages\.{name} is .*requires a gradient: pass it detached"):
        sp.Pages(**given, length=20, dtype=torch.float32)  # type: ignore[arg-type]


def test_kernels_refuse_what_they_would_detach() -> None:
    call = make(64, heads=2)
    wide = sp.AttentionCall(*(torch.randn(1, 2, 64, 64, requires_grad=name == "v") for name in NAMES))
    assert "gradients are recorded" in str(TritonExecutor().unsupported(wide))
    pages, _, _ = paged(call)
    assert "gradients are recorded" in str(TritonExecutor().unsupported(pages))
    with torch.no_grad():
        assert "gradients" not in str(TritonExecutor().unsupported(wide))
    with pytest.raises(sp.UnsupportedCallError, match=r"torch\.no_grad\(\)"):
        TritonExecutor().execute(wide, sp.Plan(sp.SparseMask.full(wide, 64)))


def test_by_functions_of_torch() -> None:
    """`torch.func.grad`, whose tensors are wrapped."""
    call = recorded(make(70, heads=4, kv_heads=2, dtype=torch.float64))
    pipeline = sp.build("streaming", sink=16, window=16, block=16)
    expected = torch.autograd.grad(pipeline.run(call).out.sum(), call.q)[0]

    def total(q: Tensor) -> Tensor:
        return pipeline(q, call.k.detach(), call.v.detach()).sum()

    grad: Any = torch.func.grad
    close([expected], [grad(total)(call.q.detach())])
