"""Small tensors that depend on sizes alone, kept for each device: to make them again takes launches in every layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """The function with its last few answers kept, which nobody may write to; its arguments are hashable.

    Each CUDA stream has its own, since another could read them before they are written. While a CUDA graph is captured
    nothing is kept or given: what a graph makes holds no values until it is replayed.
    """

    def plain(stream: int, *args: Any, **kwargs: Any) -> T:
        with torch.inference_mode(False):  # else a later call with gradients could not use them
            return make(*args, **kwargs)

    known = cast(Callable[..., T], lru_cache(maxsize=64)(plain))

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.cuda.is_initialized():
            return known(0, *args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return make(*args, **kwargs)
        return known(torch.cuda.current_stream().cuda_stream, *args, **kwargs)

    return get
