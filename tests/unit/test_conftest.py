"""What the other tests rely on: poisoned memory, the interpreter, the profile."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import os

import torch
from hypothesis import settings


def test_fresh_memory_is_poisoned() -> None:
    like = torch.zeros(3)
    fresh = (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,)))
    assert [True] * 4 == [bool(torch.isnan(x).all()) for x in fresh]
    assert bool(torch.isnan(torch.empty(3, dtype=torch.bfloat16)).all())


def test_interpreter_is_chosen_where_there_is_no_gpu() -> None:
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"


def test_examples_have_no_deadline() -> None:
    assert settings().deadline is None
