"""Layers that repeat: what one layer's calls of a step came to on the device is done again for the layers after it.

The first layer asks everything: the gate, the profile, each stage. What it launches then follows from sizes
(`Pipeline.repeats`), so a host that hands its tensors over as slots gets a `Repeat` back, which launches the same for
the next layer's tensors, and tells the record of it. Recordings are kept by sizes: the chunks of the next prompt find
theirs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.pipeline import Pipeline
from sparseprefill.stages import ALL_ROWS, REACH

from .ledger import Ran

if TYPE_CHECKING:
    from sparseprefill.kernels.repeat import Step

MOST = 64
"""Recordings that a session keeps: of a server's steps, a prompt of 131,072 tokens has 16."""
ROOM = 3 << 30
"""Bytes that a call may hold while it is recorded."""
LEFT = "what a layer had come to could not be repeated in the next, which ran it anew: {error}"
FAILED = "it failed ({error})"
Tell = Callable[[int, Sequence[Ran]], None]


@frozen(eq=False)
class Repeat:
    """Outcome of a step's calls in one layer, to be had again. ran: of each call. places: of each its number among the
    calls that were asked together. tell: the record, of a layer and its calls."""

    step: Step
    ran: tuple[Ran, ...]
    places: tuple[int, ...]
    tell: Tell

    def fits(self, slots: Sequence[Tensor]) -> bool:
        """True if a layer's tensors are like those of the layer before."""
        return self.step.fits(slots)

    def run(self, layer: int, slots: Sequence[Tensor]) -> None:
        """Do the same for another layer; where that fails nothing is recorded of it."""
        found = self.step.run(slots, layer)
        self.tell(layer, _with(self.ran, found))


@define(eq=False)
class Recordings:
    """Recordings by sizes, the `MOST` that were used last; of what cannot be repeated the reason."""

    _known: OrderedDict[Hashable, tuple[Step, tuple[Ran, ...]] | str] = field(factory=OrderedDict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def get(self, key: Hashable) -> tuple[Step, tuple[Ran, ...]] | str | None:
        """The recording of a step's calls, or why there is none; None where they are new."""
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def put(self, key: Hashable, found: tuple[Step, tuple[Ran, ...]] | str) -> None:
        """Keep it."""
        with self._lock:
            self._known[key] = found
            while len(self._known) > MOST:
                self._known.popitem(last=False)


def may_repeat(
    pipeline: Pipeline, slots: Sequence[Tensor], calls: Sequence[AttentionCall], outs: Sequence[Tensor]
) -> bool:
    """True if a recording of a pipeline that repeats is worth a try, where kernels serve: nobody records gradients or
    runs in parts, and calls and outputs are of slots alone: what is not, other layers would get, too."""
    known = {x.untyped_storage()._cdata for x in slots}
    given = (*outs, *(x for call in calls for x in call.tensors))
    if any(x.untyped_storage()._cdata not in known for x in given):
        return False
    from sparseprefill.kernels.recording import TRANSFORM, unrecordable

    return (
        unrecordable(slots[0].device) != TRANSFORM
        and not any(call.recorded for call in calls)
        and all(map(pipeline.whole, calls))
    )


def key_of(
    pipeline: Pipeline, calls: Sequence[AttentionCall], outs: Sequence[Tensor], slots: Sequence[Tensor]
) -> Hashable:
    """All that a recording follows from: sizes, and where tensors lie in their slots."""
    bases: dict[int, tuple[int, int]] = {}
    for i, x in enumerate(slots):
        bases.setdefault(x.untyped_storage()._cdata, (i, x.data_ptr()))
    stream = torch.cuda.current_stream(slots[0].device).cuda_stream if slots[0].is_cuda else 0

    def at(x: Tensor) -> tuple[int, int]:
        slot, base = bases[x.untyped_storage()._cdata]
        return slot, x.data_ptr() - base

    facts = tuple((x.dtype, x.shape, x.stride(), x.data_ptr() % 16, at(x)) for x in slots)
    each = tuple((call.shape, *map(at, call.tensors), at(out)) for call, out in zip(calls, outs, strict=True))
    return pipeline, stream, facts, each


def shortened(pipeline: Pipeline, call: AttentionCall) -> AttentionCall:
    """The call of a prompt that ends where it no longer matters, so that chunks of longer prompts are alike."""
    prompt = call.prompt_lengths
    if pipeline.repeats is not True or not isinstance(prompt, int):
        return call
    least = call.kv_len + REACH + (0 if pipeline.tail >= ALL_ROWS else pipeline.tail)
    return call if prompt <= least else evolve(call, prompt_lengths=least)


def run_repeated(
    key: Hashable, known: Recordings, work: Callable[[], Sequence[Ran]], slots: Sequence[Tensor], layer: int
) -> tuple[Sequence[Ran], Step | str]:
    """Outcome of a step's calls, repeated where they were recorded before, else done and recorded; and the recording.

    work: does it. The reason in its place where it cannot be repeated.
    """
    from sparseprefill.kernels.recording import CAPTURE, record

    found = known.get(key)
    if isinstance(found, tuple):
        step, before = found
        try:
            return _with(before, step.run(slots, layer)), step
        except Exception as error:
            known.put(key, FAILED.format(error=type(error).__name__))
            raise
    if isinstance(found, str):
        return work(), found
    ran = list[Ran]()

    def watched() -> list[Tensor]:
        ran[:] = [one.counted() for one in work()]
        return [x for one in ran for x in one.tensors]

    try:
        tensors, made = record(watched, slots, ROOM)
    except Exception as error:
        known.put(key, FAILED.format(error=type(error).__name__))
        raise
    here = _with(ran, tensors)
    if made != CAPTURE:
        known.put(key, made if isinstance(made, str) else (made, tuple(one.bare() for one in here)))
    return here, made


def _with(ran: Sequence[Ran], found: Sequence[Tensor]) -> tuple[Ran, ...]:
    rest = iter(found)
    return tuple(one.over(rest) for one in ran)
