"""Keeping torch.compile out of what it cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` outside of compiled graphs: context variables and weak references cannot be traced."""
    return cast(Callable[P, T], torch.compiler.disable(function))
