"""TritonExecutor before any kernel: what it refuses, what it copies, what it may hold."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from sparseprefill.executors import triton as module
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.attention import together as grouping
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Kernel
from sparseprefill.testing import tensors

TRITON = module.TritonExecutor()


def wide(dtype: torch.dtype = torch.float32, head_dim: int = 64, **fields: Any) -> sp.AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 32, "kv_len": 32, "head_dim": head_dim}
    return sp.AttentionCall(*tensors("random", **sizes, seed=0, dtype=dtype), **fields)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_dimensions_that_it_serves(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "interpreted", lambda: True)
    assert TRITON.unsupported(wide(head_dim=dim)) is None
    assert TRITON.unsupported(wide(torch.float16, head_dim=dim)) is None


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "interpreted", lambda: True)
    narrow = wide()
    narrow = evolve(narrow, v=narrow.v[..., :32])
    for call, words in (
        (wide(torch.float64), "float64 is not supported"),
        (wide(torch.bfloat16), "interpreter gets bfloat16 wrong"),
        (
            wide(head_dim=72),
            "head dimensions 72 (q, k) and 72 (v); use one of 64, 80, 96, 128, 192 with 128, 192, 256, 512",
        ),
        (wide(head_dim=512), "float32 with head dimension 512; use float16 or bfloat16"),
        (narrow, "head dimensions 64 (q, k) and 32 (v)"),
    ):
        assert words in str(TRITON.unsupported(call))
        with pytest.raises(sp.UnsupportedCallError, match="TritonExecutor: "):
            TRITON.execute(call, sp.Plan(sp.SparseMask.full(call, 16)))
    monkeypatch.setattr(attention, "interpreted", lambda: False)
    assert "q is on cpu; move q, k and v to a CUDA device" in str(TRITON.unsupported(wide()))


def test_what_it_may_hold() -> None:
    call = make(300)
    assert default_workspace(call, per_pair=4) == TRITON.workspace(call)


@pytest.mark.parametrize("names", [(), ("q",), ("k",), ("v",), ("q", "v")])
def test_only_rows_that_are_not_contiguous_are_copied(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "interpreted", lambda: True)
    call = wide()
    given = evolve(call, **{one: getattr(call, one).mT.contiguous().mT for one in names})
    checked = TRITON._checked(given, sp.Plan(sp.SparseMask.full(given, 16)))
    for one in ("q", "k", "v"):
        assert 1 == getattr(checked, one).stride(-1)
        assert torch.equal(getattr(call, one), getattr(checked, one))
        assert (getattr(given, one) is getattr(checked, one)) == (one not in names)
    assert (checked is given) == (not names)


def test_a_carry_without_a_mask_is_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "interpreted", lambda: True)
    call = wide()
    region = sp.SparseMask.full(call, 16)
    carry = sp.Carry(sp.ReferenceExecutor().accumulate(call, sp.Plan(region)), region)
    assert TRITON.accumulate(call, sp.Plan(sp.SparseMask.empty(call, 16), carry)) is carry.state
    assert module._carried(sp.Plan(region)) is None
    assert module._carried(sp.Plan(sp.SparseMask.empty(call, 16), carry)) is carry.state


@pytest.mark.parametrize(("out", "lse"), [(True, True), (False, True), (True, False), (False, False)])
def test_results_into_tensors_of_the_caller(out: bool, lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy where rows of both are contiguous."""
    seen: list[Any] = []
    made = torch.ones(1, 2, 32, 64), torch.full((1, 2, 32), 3.0)

    def run(call: sp.AttentionCall, mask: sp.SparseMask, known: Any, carry: Any, into: Any, below: Any, _: Any) -> Any:
        seen.append(into)
        return *(made if into is None else into), Kernel("portable"), below, None

    monkeypatch.setattr(attention, "interpreted", lambda: True)
    monkeypatch.setattr(attention, "sparse_attention_fwd", run)
    call = wide()
    plan = sp.Plan(sp.SparseMask.full(call, 16))
    mine = (
        torch.zeros(1, 2, 32, 64) if out else torch.zeros(1, 2, 64, 32).mT,
        torch.zeros(1, 2, 32) if lse else torch.zeros(1, 32, 2).mT,
    )
    result = TRITON.execute_into(call, plan, *mine)
    assert (out and lse) == (seen[0] is not None)
    assert (mine[0] is result.out, mine[1] is result.lse) == (True, True)
    assert (out and lse) or torch.equal(made[0], result.out)
    assert TRITON.execute(call, plan).out is made[0]
    assert seen[1] is None


def test_heads_are_probed_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    call, heads = wide(), torch.ones(1, 2) > 0
    monkeypatch.setattr(attention, "interpreted", lambda: True)
    monkeypatch.setattr(
        attention, "sparse_attention_fwd", lambda *_: (call.q, call.q[..., 0], Kernel("portable"), None, None)
    )
    monkeypatch.setattr(attention, "tile_mass_fwd", lambda call, mask, lse, probe: probe)
    mask = sp.SparseMask.full(call, 16)
    assert TRITON.execute(call, sp.Plan(mask)).probe is None
    assert TRITON.execute(call, sp.Plan(mask, probe=heads)).probe is heads


def test_calls_that_share_no_launch_are_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come back in their order; those of a launch begin with the longest."""
    made: list[list[int]] = []

    def alone(call: sp.AttentionCall, *_: Any) -> Any:
        made.append([call.layer])
        return call.q, call.q[..., 0], Kernel("portable"), None, None

    def together(calls: Any, *_: Any) -> Any:
        made.append([call.layer for call in calls])
        return [(call.q, call.q[..., 0]) for call in calls], Kernel("portable")

    monkeypatch.setattr(attention, "interpreted", lambda: True)
    monkeypatch.setattr(attention, "sparse_attention_fwd", alone)
    monkeypatch.setattr(attention, "sparse_attention_together", together)
    monkeypatch.setattr(attention, "shares", lambda call, *_: call.layer != 3)
    monkeypatch.setattr(grouping, "key", lambda call, _: None if call.layer == 0 else "alike")
    whole = wide()
    calls = [evolve(whole, k=whole.k[:, :, :n], v=whole.v[:, :, :n], q=whole.q[:, :, :n]) for n in (16, 17, 24, 32)]
    calls = [evolve(call, layer=layer) for layer, call in enumerate(calls)]
    results = TRITON.execute_many(calls, [sp.Plan(sp.SparseMask.full(call, 16)) for call in calls])
    assert [[0], [2, 1], [3]] == made
    assert all(result.out is call.q for call, result in zip(calls, results, strict=True))
