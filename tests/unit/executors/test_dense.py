"""Dense attention: which kernel of torch serves which call, and with what."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from sparseprefill.executors import dense as module
from sparseprefill.executors.dense import attend, dense
from sparseprefill.kernels.family.chips import row
from sparseprefill.testing import attention


class Kernels:
    """Stands in for torch's operators; remembers what they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **options: Any) -> Any:
            self.calls.append((name, (k.shape[2], v.shape[2], *more), options))
            made = torch.zeros_like(q), torch.zeros(q.shape[0] * q.shape[1], q.shape[2], 1)
            return made if name.endswith("_for_cpu") else (*made, "more")

        return run


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The choice of a CUDA kernel, made on a CPU: what can be used is said by the test."""
    told = SimpleNamespace(fast=True, cudnn=True, flash=True, kernels=Kernels(), params=[])
    monkeypatch.setattr(module, "KERNELS", told.kernels)
    monkeypatch.setattr(module, "chip", lambda device: SimpleNamespace(cudnn=told.fast))
    monkeypatch.setattr(module, "SDPAParams", lambda *given: told.params.append(given[3:]) or given)
    monkeypatch.setattr(module, "can_use_cudnn_attention", lambda params: told.cudnn)
    monkeypatch.setattr(module, "can_use_flash_attention", lambda params: told.flash)
    return told


CUDNN, FLASH = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"


@pytest.mark.parametrize(
    ("changes", "keys", "width", "expected"),
    [
        ({}, 12, 8, CUDNN),
        ({"fast": False}, 12, 8, FLASH),
        ({"cudnn": False}, 12, 8, FLASH),
        ({}, 20, 8, FLASH),
        ({"flash": False}, 20, 8, None),
        ({"cudnn": False, "flash": False}, 12, 8, None),
        ({"flash": False}, 12, 8, CUDNN),
        ({}, 20, 12, None),
        ({}, 20, 16, FLASH),
    ],
)
def test_the_kernel_of_a_gpu(
    cuda: SimpleNamespace, changes: dict[str, bool], keys: int, width: int, expected: str | None
) -> None:
    """cuDNN's for whole prompts where it is the fastest; flash attention's aligns the last query with the last key."""
    for name, value in changes.items():
        setattr(cuda, name, value)
    q, k = torch.zeros(2, 4, 12, width), torch.zeros(2, 2, keys, width)
    found = module._cuda(q, k, k, 0.5)
    if expected is None:
        assert found is None
        assert [] == cuda.kernels.calls
        return
    assert found is not None
    assert (q.shape, q.shape[:3]) == (found[0].shape, found[1].shape)
    more: tuple[Any, ...] = (None, True, 0.0, True) if expected == CUDNN else (0.0, True)
    assert [(expected, (keys, keys, *more), {"scale": 0.5})] == cuda.kernels.calls
    assert (None, 0.0, True, True) == cuda.params[0]
    assert len(cuda.params) == 1 or cuda.params[1] == (None, 0.0, False, True)


def test_of_amds_kernel_nobody_says_where_it_aligns_fewer_queries_than_keys(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.fast = False
    monkeypatch.setattr(module, "amd", lambda device: True)
    q, k = torch.zeros(1, 2, 12, 8), torch.zeros(1, 2, 20, 8)
    assert module._cuda(q, k, k, 1.0) is None
    assert module._cuda(q, q, q, 1.0) is not None
    assert [FLASH] == [name for name, *_ in cuda.kernels.calls]


def test_heads_that_share_keys_are_said_to(cuda: SimpleNamespace) -> None:
    q = torch.zeros(1, 2, 8, 8)
    module._cuda(q, q, q, 1.0)
    assert (None, 0.0, True, False) == cuda.params[0]


@pytest.mark.parametrize(("capability", "expected"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_cudnn_is_the_fastest_from_the_h100_on(capability: tuple[int, int], expected: bool) -> None:
    assert expected == row(capability).cudnn


@pytest.mark.parametrize("offset", [None, 0, 3, 8])
def test_keys_behind_the_last_query_are_cut_off(offset: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    monkeypatch.setattr(module, "KERNELS", kernels)
    attend(make(12, 20, q_offset=offset))
    keys = 20 if offset is None else offset + 12
    name, (k, v, dropout, causal), options = kernels.calls[0]
    assert ("_scaled_dot_product_flash_attention_for_cpu", keys, keys, 0.0) == (name, k, v, dropout)
    assert (keys == 12) == causal
    assert (options["attn_mask"] is None) == causal
    if not causal:
        seen = torch.arange(keys) <= torch.arange(12)[:, None] + keys - 12
        assert torch.equal(seen, options["attn_mask"] == 0)
        assert torch.equal(~seen, options["attn_mask"] == -torch.inf)
    assert make(12, 20).softmax_scale == options["scale"]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_that_are_not_contiguous_have_no_kernel(name: str) -> None:
    call = make(12)
    loose = evolve(call, **{name: getattr(call, name).transpose(2, 3).contiguous().transpose(2, 3)})
    assert attend(loose) is None
    assert attend(call) is not None


def test_values_of_another_width_have_no_kernel() -> None:
    call = make(12)
    assert attend(evolve(call, v=call.v[..., :4].contiguous())) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_log_sum_exp_is_in_full_precision(dtype: torch.dtype) -> None:
    found = attend(make(12, dtype=dtype))
    assert found is not None
    assert (dtype, torch.float64 if dtype == torch.float64 else torch.float32) == (found[0].dtype, found[1].dtype)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_the_result_says_why_and_has_every_pair(options: dict[str, Any]) -> None:
    call = make(12, 20, **options)
    found = dense(call, sp.ReferenceExecutor(), "because")
    assert ("because", "", 1.0) == (found.dense, dense(call, sp.ReferenceExecutor()).dense, found.density)
    torch.testing.assert_close(found.out.double(), attention(call)[0], atol=1e-5, rtol=1e-5)
