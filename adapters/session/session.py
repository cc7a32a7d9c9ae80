"""Parts that every host shares: a pipeline, the rules for when it runs, and the record of what happened."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import cache, partial
from typing import TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.breakeven.before import Before
from sparseprefill.breakeven.gate import OFF, GateChoice, with_remedy
from sparseprefill.call import AttentionCall, resized, uncast
from sparseprefill.errors import (
    AttachError,
    ParameterError,
    SparsePrefillError,
    UnsupportedCallError,
    frameless,
    printed,
)
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pages import LONGEST
from sparseprefill.pipeline import SHARE, Pipeline
from sparseprefill.plan import Kernel, Plan, Planned, Result
from sparseprefill.profiles.profile import Profile
from sparseprefill.route import Route, gated

from .kinds import MOST, Code, Kinds, Why
from .ledger import LayerRecord, Prompts, Ran, Room, sizes
from .options import HostOptions
from .prospects import NOT_CHOSEN, prospects
from .repeat import Recordings, Repeat, Work, may_repeat, outcome
from .report import Report
from .unread import as_whole, read_part
from .watch import Hear, RecallWatch

T = TypeVar("T")
Observe = Callable[[AttentionCall, Result], None]
Told = Callable[[int, Ran], None]
KEPT_BYTES = 64 << 20
"""Memory of masks that wait for a report to count them, a round guess; beyond, the device counts at once."""
WHOLE = (
    "calls below break-even, and calls that the profile leaves dense, ran with every key in the pipeline's executor, "
    "not in the host"
)
UNREAD = (
    "layer {layer} computed only the last rows of the prompt, with every key: nobody reads the others (skip_unread)"
)
APART = "requests of one step were computed one by one, since together they failed: {error}"
USUAL = HostOptions()
log = logging.getLogger(__name__)


@frozen
class Fallback:
    """The host shall run its own dense attention; the reason is recorded already.

    chosen: the choice of a gate or a profile and nothing else, so that `Session.whole` can compute the call as well.
    small: chosen by the call's sizes alone, so that other layers of the forward get the same (`Session.again`). code:
    the reason's, for metrics.
    """

    reason: str
    chosen: bool = False
    small: bool = False
    code: Code = Code.UNSUPPORTED

    @property
    def why(self) -> Why:
        """The reason with its code."""
        return Why(self.code, self.reason)


@define(eq=False)
class Prefill:
    """One request's prefill, from its first chunk to its last. chunk: tokens that its host computes at once, 0 where
    that is unknown. begin: the first token that it computes itself, behind what it found in a cache; None where that is
    unknown. before: how that was computed. watched: whether its recall is measured; None before its first sparse call.
    counted: among the prompts."""

    memory: Memory = field(factory=Memory)
    chunk: int = 0
    begin: int | None = None
    before: Before | None = None
    serial: int = field(factory=itertools.count().__next__)
    watched: bool | None = field(default=None, init=False)
    counted: bool = field(default=False, init=False)


Outcome = Result | Ran | Fallback | Exception
"""Result of one call of several, or what stands for one that lies where it was wanted; an exception is what
`Session.run` would have raised."""


@frozen(eq=False)
class _Waiting:
    """A call for which a pipeline is chosen. out: where its output is wanted, if anywhere. place: its number among the
    calls that are asked together."""

    call: AttentionCall
    prefill: Prefill
    pipeline: Pipeline
    out: Tensor | None = None
    place: int = 0

    def ran(self, result: Result) -> Ran:
        """For the record."""
        return Ran.by(self.pipeline, self.call, self.prefill.serial, result)


def _filled(one: Outcome, out: Tensor | None) -> Outcome:
    """An outcome whose output lies where it is wanted."""
    if not isinstance(one, Result) or out is None:
        return one
    out.copy_(one.out)
    return Ran.of(one, (0, 0, 0), -1)


class Session:
    """A pipeline at work in one host. Threads may share it; a Prefill belongs to one of them at a time.

    options: see `HostOptions`; with `strict` UnsupportedCallError is raised instead of falling back, and without
    `measure` masks wait for `report`, or, beyond `KEPT_BYTES`, their counts on the device.
    observe: called as ``observe(call, result)`` after every sparse call, which keeps layers from being repeated. told:
    called as ``told(layer, ran)`` after each, repeated or not. warn: log the first fallback of each reason.
    gate: judges each prompt by its sizes ("auto", a table or its path, a Gate; None for the route's own, if it has
    one); what it finds too small for the method the host computes, which is no failure and so nothing that `strict`
    raises for. hear_recall: told of each measured call when its figures arrive, which no call waits for. off: how this
    host is told to have no gate, for messages.
    """

    def __init__(
        self,
        pipeline: Pipeline | Route,
        options: HostOptions = USUAL,
        *,
        observe: Observe | None = None,
        warn: bool = True,
        gate: GateChoice = None,
        hear_recall: Hear | None = None,
        told: Told | None = None,
        off: str = OFF,
    ) -> None:
        options.check()
        if observe is not None and not callable(observe):
            raise ParameterError(f"observe is {printed(observe)}: pass a function of a call and its result, or None")
        route = Route.of(pipeline if gate is None or gate is False else gated(pipeline, gate))
        self.route, self.tail, self._off = route.with_tail(options.tail).with_remedy(off), options.tail, off
        self.min_query, self.strict = options.min_query, options.strict
        self.layers = None if options.layers is None else frozenset(options.layers)
        self._measure, self._observe, self._warn, self._told = options.measure, observe, warn, told
        self.prompts = Prompts()
        self._recordings, self._varying = Recordings(), Recordings()
        self._served = cache(kernels.serve_device)
        self.kind: Callable[[int], Hashable] = cache(partial(_kind, self.layers, self.route.profile))
        """All that a layer's index decides: layers of one kind come to the same in a step."""
        every, strict_recall = options.recall_every, options.strict_recall
        self._watch = RecallWatch(route.name, every, strict_recall, hear_recall, self.note)
        self._records: dict[int, LayerRecord] = {}
        self._room = Room()
        self._notes, self._declined, self._gated = Kinds(), Kinds(), Kinds()
        self._small: AttentionCall | None = None
        self._kernels: Counter[Kernel | str] = Counter()
        self._short, self._lock = 0, threading.RLock()

    @uncast
    def run(self, call: AttentionCall, prefill: Prefill, read: int | None = None) -> Result | Fallback:
        """One layer's attention, or why the host shall compute it.

        A call with a sliding window runs all keys of its window through the executor, never through the method.
        read: how many of the call's last rows anybody reads; None for all. Where each of them sees every key anyway
        (`tail`), the others are left out and zeros; the recall of such a call is not measured, and `observe` is told of
        the rows that were computed, with a density that is a share of the whole call's pairs.
        Raises UnsupportedCallError if `strict`, and whatever a stage raises: a broken stage is no fallback.
        """
        picked = self._pick(call, prefill, read)
        if not isinstance(picked, Pipeline):
            return picked
        found = self._alone(_Waiting(call, prefill, picked))
        assert not isinstance(found, Ran)
        return found

    @uncast
    def run_many(
        self,
        calls: Sequence[tuple[AttentionCall, Prefill, int | None]],
        into: Sequence[Tensor] = (),
        slots: Sequence[Tensor] = (),
        repeats: list[Repeat] | None = None,
    ) -> list[Outcome]:
        """Do as `run` does for calls of different requests, with one launch for several where the executor can.

        In the place of a call that fails is what `run` would have raised: the others have their results all the same.
        into: of each call a tensor ``[B, Hq, Nq, Dv]`` for its output, which may be a view; a `Ran` stands for a result
        that lies there. slots: all tensors of the host that the calls and `into` are views of, and that other layers
        have others of: where what the calls do can be repeated for those, `repeats` gets what does.
        """
        found: list[Outcome] = []
        for first in range(0, len(calls), SHARE):
            some = range(first, min(first + SHARE, len(calls)))
            outs = [into[i] if into else None for i in some]
            found += self._run_some([calls[i] for i in some], outs, slots, repeats, first)
        return found

    def _run_some(
        self,
        calls: Sequence[tuple[AttentionCall, Prefill, int | None]],
        outs: Sequence[Tensor | None],
        slots: Sequence[Tensor],
        repeats: list[Repeat] | None,
        first: int,
    ) -> list[Outcome]:
        picked = [_tried(partial(self._pick, *one)) for one in calls]
        ended = {i: _filled(one, outs[i]) for i, one in enumerate(picked) if not isinstance(one, Pipeline)}
        by_method: dict[Pipeline, list[int]] = {}
        for i, one in enumerate(picked):
            if isinstance(one, Pipeline):
                by_method.setdefault(one, []).append(i)
        for pipeline, places in by_method.items():
            group = [_Waiting(*calls[i][:2], pipeline, outs[i], first + i) for i in places]
            done = self._repeated(pipeline, group, slots, repeats) if repeats is not None else None
            ended.update(zip(places, self._together(pipeline, group) if done is None else done, strict=True))
        return [ended[i] for i in range(len(calls))]

    def _pick(self, call: AttentionCall, prefill: Prefill, read: int | None) -> Pipeline | Result | Fallback:
        """The pipeline for a call; what it comes to without one, or where only its last rows are read."""
        chosen = self._choose(call, prefill)
        if not isinstance(chosen, Pipeline):
            return chosen
        try:
            found = self._read(call, prefill, chosen, read)
        except UnsupportedCallError as error:
            return self.decline(call.layer, str(error), sizes(call))
        return chosen if found is None else found

    def _repeated(
        self, pipeline: Pipeline, group: Sequence[_Waiting], slots: Sequence[Tensor], repeats: list[Repeat]
    ) -> Sequence[Outcome] | None:
        """Outcomes of calls that are recorded, or were before; None where that cannot be, or fails: then as if nothing
        had been tried."""
        if not slots or pipeline.asked is None or not self._served(slots[0].device):
            return None
        calls, outs = tuple(one.call for one in group), tuple(one.out for one in group if one.out is not None)
        if self._observe is not None or self._measure or len(outs) != len(group):
            return None
        if not may_repeat(pipeline, slots, calls, outs) or any(self._watched(one.prefill) for one in group):
            return None
        prefills = [one.prefill for one in group]
        memories, serials = tuple(one.memory for one in prefills), tuple(one.serial for one in prefills)
        work = Work(pipeline, calls, memories, serials, outs, tuple(slots))
        try:
            ran, how = outcome(work, self._recordings, self._varying)
        except Exception as error:  # the plain way tells whose it is
            log.debug("nothing is repeated", exc_info=error)
            frameless(error)
            return None
        ran = [evolve(one, serial=waiting.prefill.serial) for one, waiting in zip(ran, group, strict=True)]
        self.tell(work.layer, ran)
        if isinstance(how, str):
            log.debug("%s: a step of %s is not repeated: %s", self.route.name, ran[0].sizes, how)
        else:
            notes = tuple(map(self._note_of, group))
            repeats.append(Repeat(how, tuple(ran), notes, tuple(one.place for one in group), self.tell))
        return ran

    def _together(self, pipeline: Pipeline, group: Sequence[_Waiting]) -> list[Outcome]:
        """Outcomes of calls, each of which may fail by itself."""
        if len(group) == 1:
            return [_tried(partial(self._alone, group[0]))]
        begun = [_tried(partial(pipeline.begin, one.call, one.prefill.memory)) for one in group]
        planned = [one for one in begun if isinstance(one, Planned)]
        made = iter(self._execute(pipeline, planned) if planned else ())
        ended = [next(made) if isinstance(one, Planned) else one for one in begun]
        each = zip(group, begun, ended, strict=True)
        return [_tried(partial(self._end, waiting, one, result)) for waiting, one, result in each]

    def _alone(self, waiting: _Waiting) -> Result | Ran | Fallback:
        call, memory = waiting.call, waiting.prefill.memory
        try:
            if waiting.out is None:
                return self._sparse(waiting, waiting.pipeline.run(call, memory))
            return self._sparse(waiting, waiting.pipeline.run_into(call, memory, waiting.out))
        except UnsupportedCallError as error:
            return self.decline(call.layer, str(error), sizes(call))

    def _execute(self, pipeline: Pipeline, planned: Sequence[Planned]) -> list[Result | Exception]:
        """Together; where that fails one by one, so that an error stays with its request, and a note says so."""
        found = _tried(partial(pipeline.execute, planned))
        if not isinstance(found, Exception):
            return [*found]
        if len(planned) == 1:
            return [found]
        self.note(APART.format(error=type(found).__name__))
        log.debug("%s", APART.format(error=found), exc_info=found)
        frameless(found)
        return [one for some in planned for one in self._execute(pipeline, [some])]

    def _end(
        self, waiting: _Waiting, begun: Planned | Result | Exception, found: Result | Exception
    ) -> Result | Ran | Fallback:
        call = waiting.call
        if isinstance(found, UnsupportedCallError):
            return self.decline(call.layer, str(found), sizes(call))
        if isinstance(found, Exception):
            raise found
        result = waiting.pipeline.finish(begun, found) if isinstance(begun, Planned) else found
        if waiting.out is not None:
            waiting.out.copy_(result.out)
        return self._sparse(waiting, result)

    @property
    def measures_recall(self) -> bool:
        """True if the recall of some prefills is measured."""
        return self._watch.every > 0

    def read_recall(self) -> None:
        """Take in measured recall that has arrived, for hosts that pass figures on; never waits."""
        if self._watch.coming:
            self._watch.read()

    def again(self, layer: int, verdict: Fallback, shape: tuple[int, int, int]) -> Fallback:
        """Record a call of the same sizes as one that was left dense for them: as `run` does, without asking again."""
        chosen = self.layers is None or layer in self.layers
        if not chosen:
            return self._dense(layer, NOT_CHOSEN, shape, code=Code.LAYERS)
        return self._dense(layer, verdict.reason, shape, code=verdict.code)

    def whole(self, call: AttentionCall) -> Tensor | None:
        """Output ``[B, Hq, Nq, Dv]`` of dense attention by the pipeline's executor; None where it cannot run the call.

        For hosts whose own dense attention is slower: `run` has recorded the call as dense, a note says by whom.
        """
        found = self._full(call)
        if isinstance(found, str):
            return None
        self.note(WHOLE)
        return found.out

    def decline(self, layer: int, reason: str, shape: tuple[int, int, int], code: Code = Code.UNSUPPORTED) -> Fallback:
        """Record that a prefill call of `shape` (batch rows, queries, keys) is left to the host. code: the reason's.

        The first call for a kind of reason is logged as a warning. Raises UnsupportedCallError if `strict`.
        """
        if self.layers is not None and layer not in self.layers:
            return self._dense(layer, NOT_CHOSEN, shape, code=Code.LAYERS)
        if self.strict:
            raise UnsupportedCallError([f"layer {layer}: {reason}"])
        with self._lock:
            first = self._declined.add(reason)
            fallback = self._dense(layer, reason, shape, code=code)
        if first and self._warn:
            log.warning("%s: layer %d runs dense: %s", self.route.name, layer, reason)
        return fallback

    def cross(self, layer: int) -> bool:
        """True if a call that is not causal is cross attention: its layer has causal calls, too. Counted, if it is.

        The host computes it. It is no prefill: the layer's mode stays, and there is nothing that `strict` raises for.
        """
        with self._lock:
            record = self._records.get(layer)
            if record is None or not record.modes.total():
                return False
            record.cross += 1
        return True

    def note(self, text: str) -> None:
        """Count something worth knowing that is no fallback."""
        with self._lock:
            self._notes.add(text)

    def forbid(self, layers: Iterable[int], text: str) -> None:
        """Raise UnsupportedCallError if `strict` and one of the layers is to run sparse: it ran without the method."""
        if self.strict and any(self.layers is None or layer in self.layers for layer in layers):
            raise UnsupportedCallError([text])

    def missing(self, seen: Set[int]) -> list[int]:
        """Layers that have called before, or were named, and are not among `seen`."""
        with self._lock:
            return sorted(self._records.keys() - seen)

    def unheard(self) -> list[int]:
        """Chosen layers that have neither called nor been named."""
        with self._lock:
            return sorted((self.layers or frozenset()) - self._records.keys())

    def count_short(self) -> None:
        """A forward with fewer than `min_query` rows ran dense."""
        with self._lock:
            self._short += 1

    def expect(self, layers: Iterable[int]) -> None:
        """Name the layers there are, so that the report lists those that never ran."""
        with self._lock:
            for layer in layers:
                self._record(layer)

    def start(
        self,
        host: str,
        layers: Mapping[int, AttentionCall | str],
        *,
        windows: Iterable[int] = (),
        trained: int | None = None,
    ) -> None:
        """Say before the first request where nothing can run sparse: see `prospects` for the arguments.

        Raises AttachError where nothing ever can. Where nothing may, as far as can be told, the reason is logged as a
        warning and noted in the report. host: for messages.
        """
        found = prospects(self.route, layers, self.min_query, windows=windows, trained=trained, chosen=self.layers)
        if found.never:
            raise AttachError(f"{self.route.name} can never run on {host}: {found.never}")
        for doubt in found.doubts:
            said = with_remedy(doubt, self._off) if doubt == found.small else doubt
            text = f"{self.route.name} may never run on {host}: {said}"
            log.warning("%s", text)
            self.note(text)

    def report(self, host: str, implementation: str) -> Report:
        """Everything recorded so far; counts the pairs of the masks that wait, reads measured recall (host sync)."""
        recall = self._watch.report()  # before the lock: figures that arrive may be noted
        pays_from = self._pays_from()
        with self._lock:
            made = Report(
                method=self.route.name,
                host=host,
                implementation=implementation,
                min_query=self.min_query,
                grain=self.route.method_grain,
                tail=self.tail,
                gate=self.route.judges,
                pays_from=pays_from,
                short_forwards=self._short,
                layers=tuple(
                    one.report(mean=self._measure, recall=recall.get(layer))
                    for layer, one in sorted(self._records.items())
                ),
                notes=self._notes.counts(),
                kernels=self._kernel_kinds(),
                prefills=self._watch.prefills,
                measured_prefills=self._watch.measured,
                strict_recall=self._watch.strict,
                prompts=dict(self.prompts.ran),
                cached=dict(self.prompts.cached),
                off=self._off,
            )
            return evolve(made, gated={why: count for why, count in made.fallbacks.items() if why in self._gated})

    def _pays_from(self) -> int | None:
        """Tokens of the shortest whole prompt that the gate lets run, after it left a call dense."""
        if self._small is None:
            return None
        try:
            return self.route.least(self._small, LONGEST)
        except SparsePrefillError:  # a gate that fails leaves calls dense, and no report behind
            return None

    def _choose(self, call: AttentionCall, prefill: Prefill) -> Pipeline | Result | Fallback:
        """The pipeline for the call of a request; or what the call comes to without one."""
        if self.layers is not None and call.layer not in self.layers:
            return self._dense(call.layer, NOT_CHOSEN, sizes(call), code=Code.LAYERS)
        if call.window is not None:
            return self._sliding(call)
        try:
            choice = self.route.choose(call, prefill.memory, prefill.chunk, prefill.begin, prefill.before)
        except UnsupportedCallError as error:
            return self.decline(call.layer, str(error), sizes(call))
        if choice.gated:
            self._tell_gated(choice.dense, call, prefill.chunk)
        if choice.dense:
            code = Code.GATE if choice.gated else Code.PROFILE
            return self._dense(call.layer, choice.dense, sizes(call), chosen=True, small=not choice.of_layer, code=code)
        if choice.note:
            self.note(choice.note)
        return choice.pipeline

    def _note_of(self, waiting: _Waiting) -> str:
        """The note of the pipeline that was chosen, for every layer; empty for none."""
        prefill = waiting.prefill
        return self.route.choose(waiting.call, prefill.memory, prefill.chunk, prefill.begin, prefill.before).note

    def _tell_gated(self, reason: str, call: AttentionCall, chunk: int) -> None:
        """A call is dense by the gate, which is logged for the first of each kind, with what to do about it."""
        with self._lock:
            first = self._gated.add(reason)
            if self._small is None and not chunk:  # a server has told it for its steps
                self._small = resized(evolve(call, prompt_lengths=None), 1, 1)
        if first and self._warn:
            log.info("%s: calls run dense: %s", self.route.name, with_remedy(reason, self._off))

    def _sparse(self, waiting: _Waiting, result: Result) -> Result | Ran:
        """Record a call that ran sparse; its result, or what stands for one that lies where it was wanted."""
        call, ran = waiting.call, waiting.ran(result)
        self.tell(call.layer, [ran])
        if self._watched(waiting.prefill):
            self._watch.measure(call, result)
        elif self._watch.coming:
            self._watch.read()
        if self._observe is not None:
            self._observe(call, result)
        return result if waiting.out is None else ran

    def _watched(self, prefill: Prefill) -> bool:
        """True if the recall of a prefill is measured, which nothing waits for."""
        if not self._watch.every:
            return False
        if prefill.watched is None:
            prefill.watched = self._watch.choose()
        return prefill.watched

    def tell(self, layer: int, calls: Sequence[Ran], notes: Sequence[str] = ()) -> None:
        """Record calls of a layer that ran sparse. notes: of the choice of their pipelines, empty for none."""
        with self._lock:
            record = self._record(layer)
            for ran in calls:
                self._count_kernels(ran.kernels)
                record.ran(ran, None if self._measure else KEPT_BYTES)
                for remark in ran.remarks:
                    self._notes.add(remark)
            for note in notes:
                if note:
                    self._notes.add(note)
        if self._told is not None:
            for ran in calls:
                self._told(layer, ran)

    def _read(self, call: AttentionCall, prefill: Prefill, pipeline: Pipeline, rows: int | None) -> Result | None:
        """Every key for the last rows of a call, which alone are read, and nothing for the others; None where `run`
        computes them all."""
        if rows is None or rows > pipeline.tail or (part := read_part(call, rows)) is call:
            return None
        found = self._full(part)
        if not isinstance(found, Result):
            return None
        result = as_whole(found, part, call)
        self.note(UNREAD.format(layer=call.layer))
        self.tell(call.layer, [evolve(_Waiting(call, prefill, pipeline).ran(result), kernels=())])
        if self._observe is not None:
            self._observe(part, evolve(found, parts=result.parts))
        return result

    def _sliding(self, call: AttentionCall) -> Result | Fallback:
        found = self._full(call)
        if isinstance(found, str):
            return self.decline(call.layer, found, sizes(call))
        with self._lock:
            self._record(call.layer).count("window", sizes(call))
        return found

    def _full(self, call: AttentionCall) -> Result | str:
        """A call with every key that it allows, by the pipeline's executor; why that cannot run it."""
        executor = self.route.executing(call)
        if reason := executor.objection(call):
            return f"{executor.name}: {reason}"
        result = executor.execute(call, Plan(SparseMask.full(call)))
        with self._lock:
            self._count_kernels(result.kernels or (type(executor.given).__name__,))
        return result

    def _dense(
        self,
        layer: int,
        reason: str,
        shape: tuple[int, int, int],
        *,
        code: Code,
        chosen: bool = False,
        small: bool = False,
    ) -> Fallback:
        """Record a call that the host computes: see Fallback."""
        with self._lock:
            record = self._record(layer)
            record.count("dense", shape)
            record.reasons.add(reason)
        return Fallback(reason, chosen, small, code)

    def _count_kernels(self, kernels: Sequence[Kernel | str]) -> None:
        """Count the kernels that served."""
        self._kernels.update(kernels)
        if len(self._kernels) > MOST:
            self._kernels = Counter[Kernel | str](self._kernel_kinds())

    def _kernel_kinds(self) -> dict[str, int]:
        found = Kinds()
        for kernel, count in self._kernels.items():
            found.add(str(kernel), count)
        return found.counts()

    def _record(self, layer: int) -> LayerRecord:
        found = self._records.get(layer)
        if found is None:
            found = self._records[layer] = LayerRecord(layer, self._room)
        return found


def _kind(layers: Set[int] | None, profile: Profile | None, layer: int) -> Hashable:
    dense = () if profile is None else tuple(layer in one.dense_layers for one in profile.ranges)
    return layers is None or layer in layers, dense


def _tried(run: Callable[[], T]) -> T | Exception:
    """Result of a function, or the exception that it raises; where memory ran out it holds none of the call's."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        log.debug("out of memory", exc_info=True)
        return frameless(error)
    except Exception as error:
        return error


def check_flag(name: str, value: object) -> None:
    """ParameterError, with the option's name, for what is neither True nor False: any text would count as True."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is {printed(value)}: pass True or False")
