"""Methods for tests: one writes down whose memory each call got, one is broken, one runs in Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import attrs

import sparseprefill as sp

SEEN: list[tuple[int, int, int, int, int]] = []
"""(number of the memory, calls it has seen, layer, offset, query rows) of every call."""
COPIES: set[bool] = set()
"""Whether the pages of any of these calls may be copied; empty on a CPU, which has tensors."""
LAUNCHES: list[int] = []
"""Requests of each launch of the attention kernel by the method `triton`."""
ASKED = 16
"""Query rows of the call by which the adapter asks at start."""
_numbers: dict[int, int] = {}


@attrs.frozen(kw_only=True)
class Nothing:
    """No parameters."""


class Diary:
    """An observer that counts in the request's memory."""

    grain = 1

    def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
        mine = memory.setdefault("mine", list)
        number = memory.setdefault("number", lambda: len(_numbers))
        _numbers[number] = 1
        mine.append(call.layer)
        if call.pages is not None:
            COPIES.add(call.pages.copies)
        SEEN.append((number, len(mine), call.layer, call.geometry.q_offset, call.geometry.q_len))


class Broken:
    """An estimator that can be asked before the engine serves, and fails at the first request."""

    grain = 1

    def unsupported(self, call: sp.AttentionCall) -> str | None:
        if call.geometry.q_len > ASKED:
            raise ZeroDivisionError("a bug of the plugin")
        return None

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        raise NotImplementedError


def _count_launches() -> None:
    """Write down the launches of this process; once is enough."""
    from sparseprefill.kernels.attention import launch as module

    launcher: Any = module
    launch = launcher._launch
    if launch.__name__ == "counted":
        return

    def counted(*given: Any, **more: Any) -> Any:
        requests = signature(launch).bind(*given, **more).arguments.get("requests")
        LAUNCHES.append(1 if requests is None else len(requests.masks))
        return launch(*given, **more)

    launcher._launch = counted


@sp.hookimpl
def sparseprefill_methods() -> Iterable[sp.Method]:
    def build(config: Nothing) -> sp.Pipeline:
        return attrs.evolve(sp.build("dense", block=16), observers=(Diary(),), name="diary")

    def broken(config: Nothing) -> sp.Pipeline:
        return sp.Pipeline(Broken(), name="broken")

    def triton(config: Nothing) -> sp.Pipeline:
        from sparseprefill.executors.triton import TritonExecutor

        _count_launches()
        streaming = sp.build("streaming", sink=32, window=64, block=16)
        return attrs.evolve(streaming, executor=TritonExecutor(), name="triton")

    def tiles(config: Nothing) -> sp.Pipeline:
        from sparseprefill.executors.triton import TritonExecutor

        return attrs.evolve(sp.build("dense", block=128), executor=TritonExecutor(), name="tiles")

    return [
        sp.Method(name="tiles", summary="for tests", config=Nothing, build=tiles),
        sp.Method(name="triton", summary="for tests", config=Nothing, build=triton),
        sp.Method(name="diary", summary="for tests", config=Nothing, build=build),
        sp.Method(name="broken", summary="for tests", config=Nothing, build=broken),
    ]
