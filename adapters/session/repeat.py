"""Layers that repeat: what one layer's calls of a step came to on the device is done again for the layers after it.

The first layer asks everything: the gate, the profile, each stage. What it launches then follows from sizes
(`Pipeline.repeats`), so a host that hands its tensors over as slots gets a `Repeat` back, which launches the same for
the next layer's tensors, and tells the record of it. Recordings are kept by sizes: the chunks of the next prompt find
theirs. Where a pipeline's first stages do not repeat (`Pipeline.asked`), each layer asks those, and what comes after
them is repeated for the plans that they make.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, over
from sparseprefill.mask.content import content
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import ALL_ROWS, REACH

from .ledger import Ran

if TYPE_CHECKING:
    from sparseprefill.kernels.repeat import Slots, Step

MOST = 64
"""Recordings that a session keeps: of a server's steps, a prompt of 131,072 tokens has 16."""
ROOM = 3 << 30
"""Bytes that a call may hold while it is recorded."""
LEFT = "what a layer had come to could not be repeated in the next, which ran it anew: {error}"
FAILED = "it failed ({error})"
VARIED = "its plans differ from layer to layer in more than their tensors' values"
UNTOLD = "its plan holds what has no value, such as a function that makes its mask"
Tell = Callable[[int, Sequence[Ran], Sequence[str]], None]


@frozen(eq=False)
class Work:
    """A layer's calls of one pipeline, that are asked together. memories: of their requests; serials: of their
    prefills. outs: where outputs are wanted. slots: all tensors of the host."""

    pipeline: Pipeline
    calls: tuple[AttentionCall, ...]
    memories: tuple[Memory, ...]
    serials: tuple[int, ...]
    outs: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]

    @property
    def layer(self) -> int:
        """The layer's index."""
        return self.calls[0].layer

    @cached_property
    def short(self) -> tuple[AttentionCall, ...]:
        """The calls as stages that repeat get them: see `shortened`."""
        return tuple(shortened(self.pipeline, call) for call in self.calls)

    @cached_property
    def key(self) -> Hashable:
        """All that a recording of stages that repeat follows from: sizes, and where tensors lie in their slots."""
        return _key_of(self)

    def ask(self) -> list[Plan]:
        """The calls' plans by the stages that do not repeat."""
        return [self.pipeline.ask(call, memory) for call, memory in zip(self.calls, self.memories, strict=True)]

    def run(self, begun: Sequence[Plan] = ()) -> list[Ran]:
        """Do the rest; outputs lie where they are wanted."""
        memories = [Memory() for _ in self.calls]
        if len(self.calls) == 1:
            results = [self.pipeline.run_into(self.short[0], memories[0], self.outs[0], *begun)]
        else:
            results = self.pipeline.run_many(self.short, memories, begun, self.outs)
            for out, result in zip(self.outs, results, strict=True):
                if result.out.data_ptr() != out.data_ptr():  # it lies elsewhere
                    out.copy_(result.out)
        each = zip(self.calls, self.serials, results, strict=True)
        return [Ran.by(self.pipeline, call, serial, result) for call, serial, result in each]

    def over(self, slots: Sequence[Tensor], layer: int) -> Work:
        """The same of another layer, whose tensors are like these."""
        bases = {x.untyped_storage()._cdata: i for i, x in reversed([*enumerate(self.slots)])}

        def at(x: Tensor) -> Tensor:
            i = bases[x.untyped_storage()._cdata]
            return _beside(x, self.slots[i], slots[i])

        calls = tuple(over(call, at, layer) for call in self.calls)
        return evolve(self, calls=calls, outs=tuple(map(at, self.outs)), slots=tuple(slots))


@define(eq=False)
class Asking:
    """Repetition of what follows the stages that each layer asks. work: of the layer before. key: of recordings,
    with that of the plans. slots: what it may run with. rest: what did it last, or why nothing repeats it."""

    work: Work
    known: Recordings
    key: Hashable
    slots: Slots
    rest: Step | str = VARIED

    def run(self) -> tuple[Sequence[Ran], Step | str]:
        """See `run_repeated`."""
        plans = self.work.ask()
        found = [content(plan, call.geometry) for plan, call in zip(plans, self.work.calls, strict=True)]
        told = [one for one in found if one is not None]
        if len(told) < len(found) or self.known.varied:
            self.rest = VARIED if self.known.varied else UNTOLD
            return self.work.run(plans), self.rest
        tensors = [x for _, some in told for x in some]
        key = (self.key, *(value for value, _ in told), facts_of(tensors, self.work.slots))
        slots = (*self.work.slots, *tensors)
        ran, self.rest = run_repeated(key, self.known, lambda: self.work.run(plans), slots, self.work.layer)
        return ran, self.rest

    def again(self, slots: Sequence[Tensor], layer: int) -> Sequence[Ran]:
        """The same for another layer."""
        self.work = self.work.over(slots, layer)
        return self.run()[0]


@frozen(eq=False)
class Repeat:
    """Outcome of a step's calls in one layer, to be had again. how: what does that. ran: of each call; notes: what was
    said of the choice of its pipeline. places: of each its number among the calls that were asked together. tell: the
    record, of a layer and its calls."""

    how: Step | Asking
    ran: tuple[Ran, ...]
    notes: tuple[str, ...]
    places: tuple[int, ...]
    tell: Tell

    def fits(self, slots: Sequence[Tensor]) -> bool:
        """True if a layer's tensors are like those of the layer before."""
        return self.how.slots.fit(slots)

    def run(self, layer: int, slots: Sequence[Tensor]) -> None:
        """Do the same for another layer; where that fails nothing is recorded of it."""
        if isinstance(self.how, Asking):
            again = zip(self.how.again(slots, layer), self.ran, strict=True)
            self.tell(layer, [evolve(one, serial=before.serial) for one, before in again], self.notes)
        else:
            self.tell(layer, _with(self.ran, self.how.run(slots, layer)), self.notes)


@define(eq=False)
class Recordings:
    """Recordings by sizes, the `MOST` that were used last; of what cannot be repeated the reason. varied: whether so
    many more were made than were found again that no more are worth their time."""

    varied: bool = field(default=False, init=False)
    _worth: int = field(default=MOST, init=False)
    _known: OrderedDict[Hashable, tuple[Step, tuple[Ran, ...]] | str] = field(factory=OrderedDict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def get(self, key: Hashable) -> tuple[Step, tuple[Ran, ...]] | str | None:
        """The recording of a step's calls, or why there is none; None where they are new."""
        with self._lock:
            found = self._known.get(key)
            self._worth = min(MOST, self._worth + (-1 if found is None else 1))
            self.varied = self.varied or self._worth < 0
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
    """True if a recording of a pipeline whose last stages repeat is worth a try, where kernels serve: nobody records
    gradients or runs in parts, and calls and outputs are of slots alone: what is not, other layers would get, too."""
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


def _key_of(work: Work) -> Hashable:
    slots, bases = work.slots, _bases(work.slots)
    stream = torch.cuda.current_stream(slots[0].device).cuda_stream if slots[0].is_cuda else 0

    def at(x: Tensor) -> tuple[int, int]:
        slot, base = bases[x.untyped_storage()._cdata]
        return slot, x.data_ptr() - base

    each = tuple((call.shape, *map(at, call.tensors), at(out)) for call, out in zip(work.short, work.outs, strict=True))
    return work.pipeline, stream, facts_of(slots), each


def facts_of(tensors: Sequence[Tensor], slots: Sequence[Tensor] = ()) -> Hashable:
    """Facts of tensors for a recording: type, sizes, alignment, and where they lie in each other, or in slots."""
    bases = _bases((*slots, *tensors))
    found = []
    for x in tensors:
        slot, base = bases[x.untyped_storage()._cdata]
        found.append((x.dtype, x.shape, x.stride(), x.data_ptr() % 16, slot, x.data_ptr() - base))
    return tuple(found)


def _bases(tensors: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    """By storage the first of the tensors that lies in it, by its number, and its address."""
    bases: dict[int, tuple[int, int]] = {}
    for i, x in enumerate(tensors):
        bases.setdefault(x.untyped_storage()._cdata, (i, x.data_ptr()))
    return bases


def _beside(x: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The view that lies in another tensor as this one does in a tensor like that."""
    behind = x.data_ptr() - old.data_ptr() + new.storage_offset() * new.element_size()
    if x.dtype == new.dtype:
        return new.as_strided(x.shape, x.stride(), behind // x.element_size())
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(new.untyped_storage(), behind // x.element_size(), x.shape, x.stride())


def shortened(pipeline: Pipeline, call: AttentionCall) -> AttentionCall:
    """The call of a prompt that ends where it no longer matters, so that chunks of longer prompts are alike."""
    prompt = call.prompt_lengths
    if pipeline.rest_repeats is not True or not isinstance(prompt, int):
        return call
    least = call.kv_len + REACH + (0 if pipeline.tail >= ALL_ROWS else pipeline.tail)
    return call if prompt <= least else evolve(call, prompt_lengths=least)


def outcome(work: Work, known: Recordings, varying: Recordings) -> tuple[Sequence[Ran], Step | Asking | str]:
    """Outcome of a step's calls in their first layer, and what repeats it, or the reason for which nothing does.

    known: recordings of whole calls; varying: of what comes after the stages that are asked.
    """
    if not work.pipeline.asked:
        return run_repeated(work.key, known, work.run, work.slots, work.layer)
    from sparseprefill.kernels.repeat import Slots

    asking = Asking(work, varying, work.key, Slots.of(work.slots))
    ran, step = asking.run()
    return ran, step if isinstance(step, str) else asking


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
