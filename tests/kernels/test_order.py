"""The order in which query blocks are drawn, against PyTorch's stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.device import CUDA, DEVICE
from sparseprefill.kernels.lists.order import longest_first


@settings(max_examples=40 if CUDA else 15)
@given(
    count=st.sampled_from([1, 63, 64, 65, 127, 128, 257, 599]),
    most=st.sampled_from([0, 1, 7, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_longest_come_first_and_equals_in_their_order(count: int, most: int, seed: int) -> None:
    keys = torch.randint(0, most + 1, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    expected = torch.argsort(keys, descending=True, stable=True).to(torch.int32)
    assert torch.equal(longest_first(keys.to(DEVICE)).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1536, 4096, 16384, 40009])
def test_as_many_as_calls_have(count: int) -> None:
    keys = torch.randint(0, 2000, (count,), dtype=torch.int32, device=DEVICE)
    assert torch.equal(longest_first(keys), torch.argsort(keys, descending=True, stable=True).to(torch.int32))
