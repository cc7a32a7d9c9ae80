"""Functions that torch.compile may not trace: pipelines run between graphs. Imported while it traces, not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")
WHY = (
    "a pipeline of sparseprefill chooses by what it is given and cannot be part of a graph: it runs between graphs. "
    "Compile with fullgraph=False"
)


def _run(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


run_between_graphs: Callable[..., object] = cast("Callable[..., object]", torch.compiler.disable(_run, reason=WHY))
"""Runs a function with its arguments outside of compiled graphs; where one graph has to hold everything, torch says
why that cannot be."""
