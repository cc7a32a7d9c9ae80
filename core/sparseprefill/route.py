"""Route: which pipeline serves a call, by its length (a profile) and by whether it is worth it at all (a gate)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast, overload

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.breakeven.before import GOES_ON, LEFT, Before
from sparseprefill.breakeven.gate import AUTO, AutoGate, Gate, GateChoice, gate_of
from sparseprefill.breakeven.points import GAIN, pairs
from sparseprefill.breakeven.table import BreakEven, Verdict
from sparseprefill.call import AttentionCall, check_call, resized
from sparseprefill.errors import ParameterError, UnsupportedCallError, printed, told
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.dense import dense
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline, Runner
from sparseprefill.plan import Plan, Result
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import Profile
from sparseprefill.refiners.recall import Recall, floor_of
from sparseprefill.stages import Answer, ExecutorStage, Guard
from sparseprefill.structure import for_data
from sparseprefill.validate import Check, fitting, is_number


class Buildable(Protocol):
    """A maker of pipelines from parameters, such as a Method."""

    def pipeline(self, /, **parameters: Any) -> Pipeline:
        """The pipeline of these parameters; ParameterError where they do not fit."""
        ...


WORTH = Verdict(True)
UNSAID = "the gate keeps this call dense and gave no reason"
OF_PROMPT = "{reason} (a prompt of {tokens:,} tokens, judged as a whole)"
OF_REST = "{reason} ({tokens:,} tokens, judged behind the {before:,} before them)"
BEHIND = "{reason} (judged for the {n:,} tokens before it: dense, as a prompt of {n:,} tokens would have been{more})"
OF_BEGINNING = "{reason} (judged by the prompt's first chunk)"
STEP = 2048
"""Tokens that a step has at least, where nobody tells how many: a shorter chunk shares its step with others."""
SHORT = 8
"""A beginning of at most one token in so many is too short to bind what comes after it."""


def _is_verdict(value: Any) -> bool:
    if not isinstance(value, Verdict) or not isinstance(value.worth, bool) or not isinstance(value.reason, str):
        return False
    ratio = value.ratio
    return ratio is None or is_number(ratio, 0)


VERDICT = Answer(_is_verdict, "a Verdict of worth (True or False), ratio (a number >= 0, or None) and reason (a text)")


@frozen(eq=False)
class Choice:
    """The choice of a route for a call.

    pipeline: what runs it. dense: why dense attention serves it instead, by the pipeline's executor or the host; empty
    where the pipeline does. note: what the gate had to say without an objection. of_layer: dense for the call's layer,
    not for its sizes. gated: dense by the gate.
    """

    pipeline: Pipeline
    dense: str = ""
    note: str = ""
    of_layer: bool = False
    gated: bool = False


@frozen
class _Word:
    """The gate's word on a prompt.

    start: of the chunk that asked. last: end of the tokens that were judged: of the prompt, or of that chunk where the
    prompt's length was not known. verdict: on that chunk. after: the same on the chunks that follow.
    """

    start: int
    last: int
    verdict: Verdict
    after: Verdict

    def binds(self, start: int, last: int) -> bool:
        """True if it holds for a later chunk, from token `start`, of a prompt that ends at `last` as far as is known.

        It does where the whole prompt was judged. Else a beginning of an eighth or less binds nothing.
        """
        return last <= self.last or SHORT * start > last


def _are_pipelines(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(one is None or isinstance(one, Pipeline) for one in value)


def _maybe(wanted: type) -> Check:
    def fits(value: object) -> bool:
        return value is None or (isinstance(value, wanted) and not isinstance(value, type))

    return fitting("Route", fits, f"a {wanted.__name__}, or None")


@frozen(eq=False)
class Route(Runner):
    """Pipelines, of which each call meets one: `choose`. Runs like a Pipeline.

    name: of the method, under which the gate judges; with a profile of several methods each call is judged under its
    own. pipelines: one for each range of the profile, None where it found no setting accurate enough; a single one
    without a profile.
    gate: judges every call by its sizes; one that is not worth it runs dense attention and meets no stage: estimators
    and observers do not see it. With a Memory it judges a prompt once, at its first chunk: the whole prompt where the
    host knows `prompt_lengths` (a number, or a tensor on the CPU), the chunk by itself else; the other chunks follow. A
    dense beginning would not fit a sparse end. So a request behind keys of another one, such as the turns before, is
    dense where a prompt of that many keys would be, since nobody says how they were computed. None: every call runs
    the method.
    """

    name: str = field(validator=fitting("Route", lambda x: isinstance(x, str), "a string"))
    pipelines: tuple[Pipeline | None, ...] = field(
        validator=fitting("Route", _are_pipelines, "a tuple of at least one Pipeline")
    )
    profile: Profile | None = field(default=None, validator=_maybe(Profile))
    gate: Gate | None = field(default=None, validator=_maybe(Gate))

    @classmethod
    def of(cls, given: Pipeline | Route) -> Route:
        """A pipeline as a route of one, without a gate; a route as it is."""
        if not isinstance(given, Pipeline | Route):
            raise ParameterError(f"pipeline is {printed(given)}: pass a Pipeline, or a Route")
        return given if isinstance(given, Route) else cls(given.name, (given,))

    @classmethod
    def by_length(
        cls,
        profile: Profile,
        find: Callable[[str], Buildable],
        parameters: Mapping[str, Any] | None = None,
        method: str | None = None,
    ) -> Route:
        """Take what a profile has for the length of each call's prompt: `prompt_lengths`, or where that is not known,
        its keys, padding included.

        find: the method of a name. parameters: go over the profile's. method: the one that the profile must be for;
        None for whichever it has. Raises ParameterError where it is for another, or its parameters do not fit;
        UnknownMethodError for a method that is not installed.
        """
        known = profile.methods
        if method is not None and known != (method,):
            shown = printed(known[0]) if len(known) == 1 else ", ".join(known)
            raise ParameterError(f"the profile is for {shown}, not for {printed(method)}: leave the method out")
        if parameters and len(known) > 1:
            raise ParameterError(
                f"parameters ({', '.join(sorted(parameters))}) belong to one method, but the profile has {len(known)}: "
                "leave them out"
            )
        made: list[Pipeline | None] = []
        for i, one in enumerate(profile.ranges):
            if one.method is None:
                made.append(None)
                continue
            try:
                made.append(find(one.method).pipeline(**{**(one.parameters or {}), **(parameters or {})}))
            except ParameterError as error:
                said = for_data(str(error))  # a profile is a file
                raise ParameterError(f"profile of {profile.name}, ranges[{i}].parameters: {said}") from error
        return cls(profile.name, tuple(made), profile)

    def choose(
        self,
        call: AttentionCall,
        memory: Memory | None = None,
        chunk: int = 0,
        begin: int | None = None,
        before: Before | None = None,
    ) -> Choice:
        """Choose what serves a call. By sizes and layer alone: nothing on the device is read.

        memory: of the call's request. The gate's word on its first chunk is kept there, and is the word on all others;
        where it was said without knowing the prompt's length, only if that chunk was more than an eighth of them. None:
        the call is judged by itself. chunk: tokens of a prompt that its host computes at once, 0 where it is unknown.
        begin: the first token that the request computes itself, behind what it found in a cache; None for the call's
        first. before: how what it found was computed; None where nobody tells. Raises UnsupportedCallError where the
        profile is for another model; StageError, naming the gate, where it raises or returns no Verdict.
        """
        verdict, found = self._verdict(call, memory, chunk, begin, before), self._of_length(call)
        left, unset = self.left_dense(call), isinstance(found.estimator, _NoSetting)
        if not verdict.worth and not (left and unset):  # where the profile has no setting, no gate changes anything
            return Choice(found, verdict.reason or UNSAID, gated=True)
        if reason := self._objection(call):
            raise UnsupportedCallError([reason])
        if left:
            return Choice(found, left, of_layer=not unset)
        return Choice(found, note=verdict.reason)

    def left_dense(self, call: AttentionCall) -> str:
        """Say why the profile leaves a call to dense attention: no setting was good enough; empty where one was."""
        if self.profile is None:
            return ""
        one = self.profile.ranges[self.profile.index(_length(call))]
        if one.method is None:
            at = _length(call)
            return f"the profile has no setting of {self.profile.name} that is accurate enough at {at} keys"
        if call.layer in one.dense_layers:
            return f"the profile keeps layer {call.layer} dense: {one.method} is not accurate enough there"
        return ""

    def stays_dense(self, layer: int) -> str:
        """Say why the profile leaves a layer to dense attention at every length; empty where it does not."""
        if self.profile is None:
            return ""
        ranges, name = self.profile.ranges, self.profile.name
        if all(one.method is None for one in ranges):
            return f"the profile has no setting of {name} that is accurate enough, at any length"
        if all(one.method is None or layer in one.dense_layers for one in ranges):
            return f"the profile keeps layer {layer} dense at every length: {name} is not accurate enough there"
        return ""

    def _verdict(
        self, call: AttentionCall, memory: Memory | None, chunk: int, begin: int | None, before: Before | None
    ) -> Verdict:
        """The gate's verdict on the request that a call belongs to."""
        if self.gate is None or memory is None:
            return self._judge(call)
        end = call.kv_len if call.q_offset is None else call.q_offset + call.q.shape[2]
        start = end - call.q.shape[2]
        heads = (call.q.shape[1], call.kv_heads, call.q.shape[3], call.value_dim)
        key = ("gate", self.name, heads, call.q.dtype, call.window)
        known: _Word | None = memory.get(key, None)
        if known is not None and known.start == start:
            return known.verdict
        prompt = _prompt(call)
        last = max(end, prompt or 0)
        if known is not None and known.binds(start, last):
            return known.after
        first = start if known is not None or begin is None else min(begin, start)
        cached = before if before is not None and 0 < before.tokens == first else None
        found = self._behind(call, first, last, chunk, cached)
        if found is None:
            found = self._rest(call, start if prompt is None else first, last, chunk)
            if found.worth and cached is not None:
                found = evolve(found, reason="; ".join(filter(None, (found.reason, LEFT.format(before=cached)))))
        after = found
        if not found.worth and start == 0 and last == end:  # it is the chunk alone that was judged
            after = evolve(found, reason=OF_BEGINNING.format(reason=found.reason or UNSAID))
        memory.put(key, _Word(start, last, found, after))
        return found

    def _behind(self, call: AttentionCall, first: int, last: int, chunk: int, cached: Before | None) -> Verdict | None:
        """The verdict on a request that begins behind keys of another one, such as a turn before: it goes on as they
        were computed. None where they are too few to bind it, and, where nobody knows, if this gate would not have
        computed them dense.

        last: end of its prompt, as far as is known. cached: how the keys before its own `first` token were computed.
        """
        if SHORT * first <= last:
            return None
        if cached is not None and (how := cached.mostly) != "unknown":
            return Verdict(how == "sparse", reason=GOES_ON.format(before=cached, how=how))
        found = self._of_steps(call, 0, first, chunk or first)
        more = "" if cached is None else f"; {cached}"
        return None if found.worth else Verdict(False, reason=BEHIND.format(reason=found.reason, n=first, more=more))

    def _rest(self, call: AttentionCall, first: int, last: int, chunk: int) -> Verdict:
        """The gate's verdict on tokens `first` to `last` of a prompt, the call's among them, in steps of `chunk`."""
        rows, tokens = call.q.shape[2], last - first
        found = self._judge(call) if tokens == rows else self._of_steps(call, first, last, chunk or max(rows, STEP))
        if found.worth or (first == 0 and tokens == rows):
            return found
        said = OF_REST if first else OF_PROMPT
        return evolve(found, reason=said.format(reason=found.reason or UNSAID, tokens=tokens, before=first))

    def _of_steps(self, call: AttentionCall, start: int, end: int, each: int) -> Verdict:
        """The gate's verdict on tokens `start` to `end` of a prompt, in steps of `each`.

        Steps are weighed by their pairs: by the predicted times where the gate has them, else by its yes or no.
        """
        steps = [(first, min(first + each, end)) for first in range(start, end, each)]
        found = [(self._judge(resized(call, last - first, last)), pairs(last - first, last)) for first, last in steps]
        work = sum(weight for _, weight in found)
        ratios = [one.ratio * weight for one, weight in found if one.ratio is not None]
        ratio = sum(ratios) / work if len(ratios) == len(found) else None
        gained = sum(weight for one, weight in found if one.worth)
        worth = ratio <= GAIN if ratio is not None else 2 * gained > work
        told = [(weight, one.reason) for one, weight in found if one.worth == worth and one.reason]
        reason = max(told)[1] if told else ""
        return Verdict(worth, ratio, reason if worth else reason or UNSAID)

    def _judge(self, call: AttentionCall) -> Verdict:
        """The gate's verdict on a call by itself; without a gate every call is worth it."""
        if self.gate is None:
            return WORTH
        verdict: Verdict = Guard(self.gate, self.name).ask("judge", VERDICT, call, self._judged_as(call))
        return verdict

    def _judged_as(self, call: AttentionCall) -> str:
        """The method under whose name the gate judges a call."""
        if self.profile is None or len(self.profile.methods) == 1:
            return self.name
        return self.profile.ranges[self.profile.index(_length(call))].method or self.name

    def least(self, call: AttentionCall, most: int, chunk: int = 0) -> int | None:
        """Tokens of the shortest prompt that may run sparse, to a thirtieth; None where gate and profile leave all of
        up to `most` tokens dense.

        call: with a layer's heads, type and device, and any sizes. chunk: tokens that are computed at once, 0 for all.
        StageError as of `choose`.
        """

        def may(tokens: int) -> bool:
            whole = resized(call, tokens, tokens)
            return self._of_steps(call, 0, tokens, chunk or tokens).worth and not self.left_dense(whole)

        tried = sorted({min((4 + i) << k, most) for k in range(most.bit_length()) for i in range(4)})
        high = next((tokens for tokens in tried if may(tokens)), None)
        if high is None:
            return None
        low = max((tokens for tokens in tried if tokens < high), default=0)
        while high - low > max(1, high // 32):
            middle = (low + high) // 2
            low, high = (low, middle) if may(middle) else (middle, high)
        return high

    def worth(self, call: AttentionCall) -> bool:
        """Ask whether the gate lets `run` run the call sparse; StageError as of `choose`."""
        return self._judge(call).worth

    def executing(self, call: AttentionCall) -> ExecutorStage:
        """The executor for this call, for hosts that run all its keys; the usual one where the profile has none."""
        return self._of_length(call).executing

    def _of_length(self, call: AttentionCall) -> Pipeline:
        if self.profile is None:
            (found,) = self.pipelines
        else:
            found = self.pipelines[self.profile.index(_length(call))]
        return self._unset if found is None else found

    @cached_property
    def _unset(self) -> Pipeline:
        """Of lengths that no setting serves: the usual executor, with the kernels that the others know."""
        executors = (one.executor for one in self.known)
        kernels = next((one.kernels for one in executors if isinstance(one, AutoExecutor)), None)
        executor = AutoExecutor() if kernels is None else AutoExecutor(kernels=kernels)
        return Pipeline(_NoSetting(), executor=executor, name=self.name)

    def _objection(self, call: AttentionCall) -> str | None:
        """Reason for which the profile cannot serve this call, whatever the chosen pipeline says."""
        if self.profile is None:
            return None
        reason = self.profile.model.objection(call)
        return f"the profile is for another model: {reason}" if reason else None

    @property
    def judges(self) -> str:
        """The tables by which the gate judges, and the methods of which a table has no figures; empty for no gate."""
        if self.gate is None:
            return ""
        if not isinstance(self.gate, BreakEven):
            return told(self.gate)
        methods = () if self.profile is None else self.profile.methods
        return self.gate.called(*(methods if len(methods) > 1 else (self.name,)))

    @property
    def known(self) -> tuple[Pipeline, ...]:
        """Every pipeline there is."""
        return tuple(one for one in self.pipelines if one is not None)

    @property
    def method_grain(self) -> int | None:
        """The method's grain, if one pipeline serves all lengths; chunks of one prompt may fall in several ranges."""
        match self.pipelines:
            case (Pipeline() as only,):
                return only.grain
            case _:
                return None

    @property
    def grain(self) -> int | None:
        """The same as `Pipeline.grain`; None behind a gate, which may judge chunks of other sizes otherwise."""
        return self.method_grain if self.gate is None else None

    def each(self, change: Callable[[Pipeline], Pipeline]) -> Route:
        """The route with every pipeline changed; a new name that all of them get is the route's too."""
        made = evolve(self, pipelines=tuple(None if one is None else change(one) for one in self.pipelines))
        names = {one.name for one in made.known}
        renamed = len(names) == 1 and names.isdisjoint(one.name for one in self.known)
        return evolve(made, name=names.pop()) if renamed else made

    def with_tail(self, rows: int) -> Route:
        """The route whose pipelines all give a prompt's last rows every key: see `Pipeline.with_tail`."""
        return self.each(lambda one: one.with_tail(rows))

    def with_recall(self, recall: Recall) -> Route:
        """The route whose pipelines all keep so much of sampled rows' attention mass: see `Pipeline.with_recall`."""
        floor = floor_of(recall)
        return self if floor is None else self.each(lambda one: one.with_recall(floor))

    def with_remedy(self, off: str) -> Route:
        """The route whose gate says in these words how to have none: see `breakeven.gate.remedy`."""
        return evolve(self, gate=evolve(self.gate, off=off)) if isinstance(self.gate, AutoGate) else self

    @property
    def asks_model(self) -> bool:
        """True if the profile or a stage was made for one model: `check_model`."""
        return self.profile is not None or any(one.asks_model for one in self.known)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where the profile, or a stage of a pipeline, was made for another model."""
        if self.profile is not None:
            self.profile.check_model(model)
        for one in self.known:
            one.check_model(model)

    def unsupported(self, call: AttentionCall) -> tuple[str, ...]:
        """Say why the pipeline for this call cannot serve it, or why the profile cannot; empty where both can."""
        if reason := self._objection(call):
            return (reason,)
        return () if self.left_dense(call) else self._of_length(call).unsupported(call)

    def run(self, call: AttentionCall, memory: Memory | None = None) -> Result:
        """One layer's attention: see Pipeline. `Result.dense` holds the reason where the call ran dense."""
        if torch.compiler.is_dynamo_compiling():
            from sparseprefill.parts.graphs import run_between_graphs

            return cast(Result, run_between_graphs(self.run, call, memory))
        check_call(call)
        choice = self.choose(call, memory)
        if choice.dense:
            return dense(call, choice.pipeline.executing, choice.dense)
        return choice.pipeline.run(call, memory)


def _length(call: AttentionCall) -> int:
    """Tokens by which a profile is asked: chunks of one prompt get one setting."""
    return max(call.kv_len, _prompt(call) or 0)


def _prompt(call: AttentionCall) -> int | None:
    """Tokens of the longest prompt of a call, as far as the host knows: of a device no value is read."""
    prompt = call.prompt_lengths
    if isinstance(prompt, Tensor):
        return int(prompt.max()) if prompt.device.type == "cpu" else None
    return prompt


class _NoSetting:
    """The estimator of a length that no setting serves: there is only dense attention."""

    def unsupported(self, call: AttentionCall) -> str:
        return "no setting serves calls of this length"

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        raise UnsupportedCallError([self.unsupported(call)])


@overload
def gated(given: Pipeline | Route, gate: BreakEven | Gate | str | Path = AUTO) -> Route: ...


@overload
def gated(given: Pipeline | Route, gate: GateChoice) -> Pipeline | Route: ...


def gated(given: Pipeline | Route, gate: GateChoice = AUTO) -> Pipeline | Route:
    """The pipeline behind a gate: "auto", the path of a table, a BreakEven or Gate; None or False takes a gate away.

    Raises ParameterError for a table that cannot be read. See `breakeven.gate.gate_of` for what "auto" means; a table
    that the profile holds goes before all others.
    """
    route, found = Route.of(given), gate_of(gate)
    if (gate is None or gate is False) and route.profile is None:
        (only,) = route.known
        return only
    own = None if route.profile is None else route.profile.break_even
    if isinstance(found, AutoGate) and own is not None:
        found = AutoGate(own)
    return evolve(route, gate=found)
