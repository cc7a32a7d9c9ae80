"""A method that keeps every key and writes down whose memory each call got."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

import sparseprefill as sp

SEEN: list[tuple[int, int, int, int, int]] = []
"""(number of the memory, calls it has seen, layer, offset, query rows) of every call."""
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


@sp.hookimpl
def sparseprefill_methods() -> Iterable[sp.Method]:
    def build(config: Nothing) -> sp.Pipeline:
        return attrs.evolve(sp.build("dense", block=16), observers=(Diary(),), name="diary")

    return [sp.Method(name="diary", summary="for tests", config=Nothing, build=build)]
