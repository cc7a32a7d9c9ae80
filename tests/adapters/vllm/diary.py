"""A method that keeps every key and writes down whose memory each call got; and one that is broken."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

import sparseprefill as sp

SEEN: list[tuple[int, int, int, int, int]] = []
"""(number of the memory, calls it has seen, layer, offset, query rows) of every call."""
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


@sp.hookimpl
def sparseprefill_methods() -> Iterable[sp.Method]:
    def build(config: Nothing) -> sp.Pipeline:
        return attrs.evolve(sp.build("dense", block=16), observers=(Diary(),), name="diary")

    def broken(config: Nothing) -> sp.Pipeline:
        return sp.Pipeline(Broken(), name="broken")

    return [
        sp.Method(name="diary", summary="for tests", config=Nothing, build=build),
        sp.Method(name="broken", summary="for tests", config=Nothing, build=broken),
    ]
