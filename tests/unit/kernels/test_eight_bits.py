"""8 bits: what they cost, by the oracle; which calls get them, and what the others are told. No GPU is needed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from oracles import eight_bits as oracle
from sparseprefill import AttentionCall, AutoExecutor, Plan, SparseMask
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.plan import Rounding
from sparseprefill.testing import tensors

launch = pytest.importorskip("sparseprefill.kernels.hopper.launch")


def test_numbers_of_e4m3_are_those_of_pytorch() -> None:
    x = torch.cat([torch.randn(4096) * 2.0**power for power in range(-12, 10)])
    assert torch.equal(oracle.e4m3(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(("flush", "least", "most"), [(1 << 17, 0.05, 0.2), (512, 0.0, 1e-3), (128, 0.0, 2.5e-4)])
def test_a_sum_that_is_never_flushed_loses_what_flat_attention_adds(flush: int, least: float, most: float) -> None:
    """131,072 keys with one weight, values with a mean: 13 bits hold no term of which the sum is 2**13."""
    v = oracle.e4m3(1 + 0.5 * torch.randn(1 << 17, 4, generator=torch.Generator().manual_seed(0)))
    error = float((oracle.flat_sum(v, flush) - v.mean(0)).norm() / v.mean(0).norm())
    assert least <= error <= most


def test_the_means_that_are_taken_away_cost_nothing_and_spare_most_of_the_error() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(512, 128, generator=g) for _ in range(3))
    tiles = torch.ones(4, 4, dtype=torch.bool).tril()
    for keys, values in ((k, v), (k + 5 * torch.randn(128, generator=g), v + 3)):
        truth, lse = oracle.attention(q, keys, values, tiles, 0, 128**-0.5, True)
        out, near = oracle.attention(q, keys, values, tiles, 0, 128**-0.5, False)
        error = (out - truth).norm() / (truth - values.mean(0)).norm()
        assert 1e-3 < error < 0.05
        assert (near - lse).abs().max() < 0.02


def call(n: int = 4096, width: int = 128, **more: Any) -> AttentionCall:
    q, k, v = tensors("random", batch=1, heads=2, kv_heads=1, q_len=n, kv_len=n, head_dim=width, dtype=torch.bfloat16)
    return AttentionCall(q, k, v, **more)


def test_reasons_name_what_stays_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = call()
    full = SparseMask.full(given)
    assert launch.unrounded(given, full) == "4096 keys; 8 bits pay from 65536"
    monkeypatch.setattr(launch, "LEAST_KEYS", 0)
    assert launch.unrounded(given, full) == "64 query blocks of 128 rows; 8 bits pay from 8192"
    monkeypatch.setattr(launch, "LEAST_ITEMS", 0)
    assert launch.unrounded(given, full) is None
    columns = SparseMask.from_stripes(given, torch.ones(4096, dtype=torch.bool), diagonal=False)
    assert "columns" in launch.unrounded(given, full | columns)
    assert "no tiles" in launch.unrounded(given, SparseMask.empty(given))
    assert "tiles of 128 x 64" in launch.unrounded(given, SparseMask.full(given, (128, 64)))
    small = call(width=64)
    assert "head dimension 64" in launch.unrounded(small, SparseMask.full(small))
    padded = call(starts=torch.tensor([3], dtype=torch.int32))
    assert launch.unrounded(padded, SparseMask.full(padded)) == "padding"
    few = call(1920)
    assert "30 query blocks" in launch.unrounded(few, SparseMask.full(few))


def test_a_cpu_says_that_it_computes_as_the_call_does() -> None:
    given = call(300)
    result = AutoExecutor(precision="int8").execute(given, Plan(SparseMask.full(given)))
    assert result.rounded is None
    assert [str(one) for one in result.kernels] == ["cpu (int8: no kernel for it runs on this device)"]
    plain = AutoExecutor().execute(given, Plan(SparseMask.full(given)))
    assert torch.equal(plain.out, result.out)
    assert not plain.kernels[0].reason


def test_another_gpu_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel, here without its launch."""
    given = call(300)
    monkeypatch.setattr(attention, "interpreted", lambda: True)
    monkeypatch.setattr(TritonExecutor, "unsupported", lambda *_: None)
    monkeypatch.setattr(attention, "sparse_attention_fwd_kernel", defaultdict(lambda: lambda *_, **__: None))
    why = " (int8: no kernel for it runs on this device)"
    for executor, wanted in ((TritonExecutor(), ""), (TritonExecutor(precision="int8"), why)):
        result = executor.execute(given, Plan(SparseMask.full(given)))
        assert str(result.kernels[0]) == f"portable{wanted}"
        assert result.rounded is None


def test_copies_in_8_bits_count_as_workspace() -> None:
    given = call(300)
    more = TritonExecutor(precision="int8").workspace(given) - TritonExecutor().workspace(given)
    assert more == 2 * 300 * 128


@pytest.mark.parametrize("make", [TritonExecutor, AutoExecutor])
def test_options_are_kept(make: Any) -> None:
    made = make(precision="int8")
    assert (made.precision, made.bound) == ("int8", 0.1)


def test_heads_beyond_the_bound_are_those_in_16_bits() -> None:
    rounded = Rounding("int8", torch.tensor([[0.01, 0.3, torch.nan]]), 0.1)
    assert rounded.heads.tolist() == [[True, False, False]]
