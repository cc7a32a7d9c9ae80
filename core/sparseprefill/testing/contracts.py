"""Contract checks that any method can be put through, all at once with `check_method`, or some by name (`check_laws`).

    from sparseprefill.testing import check_method

    def test_contracts():
        check_method("my-method")

Each takes a Method, its registered name, a Pipeline, or a function that makes one from keyword arguments, and raises
AssertionError with the method, the law and the shape. Calls with a feature that the pipeline declares unsupported are
left out. A refiner is put behind a few methods with `check_refiner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from attrs import evolve, frozen

from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError, ParameterError, StageError, nearest, printed
from sparseprefill.method import Method, configured
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import default_registry
from sparseprefill.stages import MaskRefiner
from sparseprefill.testing import laws
from sparseprefill.testing.cases import chunked_call, describe, half_call, standard_calls
from sparseprefill.testing.repeated import repeated_is_plain
from sparseprefill.testing.trial import BreachError, Candidate, NotApplicableError, Subject, Trial
from sparseprefill.testing.unread import unread

LONGEST_GRAIN = 1024
BEHIND = ("streaming", "vertical-slash", "bfla")
"""Methods behind which a refiner is tried: a mask of tiles, one with stripes, and one with scores."""
HOLDING = ("anchor-attention", "share-prefill", "kascade")
"""Methods whose plans hold more than a mask and scores: a carry, probes and notes, notes."""


class Options(TypedDict, total=False):
    """Keyword arguments of every check.

    calls: AttentionCalls in place of `standard_calls(device, dtype)` and, without a dtype, one in bfloat16.
    parameters: in place of `Method.small`; those that `full` does not name hold for what is full, too.
    full: in place of `Method.full`; for a pipeline function, what makes it full. None: see `Method.full`.
    """

    calls: Iterable[AttentionCall]
    device: torch.device | str
    dtype: torch.dtype
    parameters: Mapping[str, Any]
    full: Mapping[str, Any]


@frozen
class Report:
    """The outcome of a check. cases: calls per law that held. skipped: reason per law that could not be tried."""

    method: str
    cases: Mapping[str, int]
    skipped: Mapping[str, str]


class UntriedError(AssertionError):
    """No call could be tried."""


LAWS: Mapping[str, Callable[[Trial], None]] = {
    "full mask == dense": laws.full_mask_is_dense,
    "result == softmax over its own mask": laws.consistent,
    "no empty row": laws.no_empty_row,
    "no NaN for finite input": laws.no_nan,
    "the same plan again": laws.repeatable,
    "density in (0, 1]": laws.density_in_bounds,
    "carry and mask disjoint": laws.disjoint,
    "left in progress == whole": laws.unfinished_is_whole,
    "values all alike come out": laws.values_alike_come_out,
    "causality": laws.causal,
    "NaN of an unselected key stays out": laws.unselected_nan,
    "batch rows independent": laws.batch_rows_independent,
    "chunk invariance at the grain": laws.chunk_invariant,
    "parts by heads == whole": laws.parts_equal_the_whole,
    "memory is read only": laws.memory_is_read_only,
    "what is given stays as it is": laws.nothing_is_written,
    "the tail sees every key": laws.tail_is_dense,
    "repeated == plain": repeated_is_plain,
}
"""Laws that every method keeps, by name; the functions say what each law holds."""
LAWS_OF_REFINERS: Mapping[str, Callable[[Trial], None]] = {
    "the same plan again": laws.repeatable,
    "no host synchronisation": laws.waits_for_nothing,
    **LAWS,
    "the rest of a plan is handed on": laws.handed_on,
}
"""Laws that a refiner alone could break, and the laws of methods."""
OF_WHAT_IS_HELD = (
    "the rest of a plan is handed on",
    "result == softmax over its own mask",
    "carry and mask disjoint",
)
"""Laws of a refiner behind `HOLDING`; others also depend on what those methods make of a narrower mask."""
OF_THE_MASK = frozenset(
    {
        "result == softmax over its own mask",
        "left in progress == whole",
        "causality",
        "NaN of an unselected key stays out",
        "density in (0, 1]",
    }
)
"""Laws that compare with the softmax over a mask: of a pipeline with a corrector they hold to what is computed before
it. What it gives back without seeing the future is held by the laws of padding and chunks, and by its own tests."""


def check_method(candidate: Candidate, **options: Unpack[Options]) -> Report:
    """Every law, and that each parameter of a registered method, or of a Method, is read by something.

    The report says how many calls each law held on, and which was skipped and why. Raises AssertionError, with the
    reasons, where no call could be tried, too.
    """
    if "calls" in options:
        options["calls"] = list(options["calls"])  # gone through twice
    report = check_laws(candidate, tuple(LAWS), **options)
    method = default_registry().get(candidate) if isinstance(candidate, str) else candidate
    if isinstance(method, Method) and (idle := unread(method, _calls(options), options.get("parameters", {}))):
        raise AssertionError(
            f"{method.name}: in the calls of this check nothing reads {', '.join(idle)} of {method.config.__name__}: "
            "use it where the pipeline is built, or take it out; if other calls or values read it, pass such calls=, "
            "or name such values in Method.small or Method.search"
        )
    return report


def check_refiner(
    refiner: str | type[MaskRefiner], *, behind: Sequence[str] | None = None, **options: Unpack[Options]
) -> Report:
    """Every law, of the refiner behind each of some methods; the mask that is held to them is the one that it leaves.

    refiner: its registered name, or its class. behind: names of methods; by default those of `BEHIND`, and with the
    laws `OF_WHAT_IS_HELD` those of `HOLDING`, whose plans hold a carry, probes or notes. parameters: the refiner's own.
    full: its parameters at which it takes nothing away, {} for one that only adds; None: the law of the full mask is
    not tried. A method whose plans it refuses with a ParameterError, such as one without scores, or behind which no
    call is served, is left out, and the report says so; AssertionError where that leaves none.
    """
    kind = default_registry().find("refiner", refiner) if isinstance(refiner, str) else refiner
    name = refiner if isinstance(refiner, str) else kind.__name__
    cases: dict[str, int] = {}
    skipped: dict[str, str] = {}
    refused: dict[str, str] = {}
    if "calls" in options:
        options["calls"] = list(options["calls"])  # gone through several times
    names = BEHIND if behind is None else behind
    places = [(method, LAWS_OF_REFINERS) for method in names]
    if behind is None:
        held = {law: LAWS_OF_REFINERS[law] for law in OF_WHAT_IS_HELD}
        places += [(method, held) for method in HOLDING]
    for method, tried in places:
        try:
            subject = _refined(name, kind, method, options.get("parameters", {}), options.get("full"))
            report = _check(subject, tried, options)
        except (ParameterError, UntriedError) as refusal:
            refused[f"behind {method}"] = str(refusal)
            continue
        skipped.update(report.skipped)
        for law, count in report.cases.items():
            cases[law] = cases.get(law, 0) + count
    if not cases:
        reasons = "; ".join(f"{place}: {reason}" for place, reason in {**refused, **skipped}.items())
        raise AssertionError(f"{name}: no law could be tried; {reasons}")
    return Report(name, cases, refused | {law: reason for law, reason in skipped.items() if law not in cases})


def _refined(name: str, kind: type, method: str, small: Mapping[str, Any], full: Mapping[str, Any] | None) -> Subject:
    """A refiner behind a method: with sparse parameters, and with those at which both keep everything."""
    before = default_registry().get(method)

    def build(given: Mapping[str, Any], own: Mapping[str, Any]) -> Pipeline:
        made = before.pipeline(**given)
        return evolve(made, refiners=(*made.refiners, configured(name, kind, own)), name=f"{name} behind {method}")

    everything = () if full is None or before.full is None else (
        build({**before.small, **before.full}, {**small, **full}),
    )  # fmt: skip
    return Subject(f"{name} behind {method}", build(before.small, small), everything)


def check_laws(candidate: Candidate, names: Sequence[str], **options: Unpack[Options]) -> Report:
    """The laws of these names, which are those of `LAWS`; ParameterError for another one.

    A law that says nothing about the calls is skipped; AssertionError where every call is refused.
    """
    for name in names:
        if name not in LAWS:
            raise ParameterError(f"names holds {printed(name)}, which is no law{nearest(str(name), LAWS)}")
    subject = Subject.of(candidate, options.get("parameters"), options.get("full"))
    return _check(subject, {name: LAWS[name] for name in names}, options)


def _check(subject: Subject, tried: Mapping[str, Callable[[Trial], None]], options: Options) -> Report:
    trials, refused = _trials(subject, options)
    if not trials:
        why = "; ".join(dict.fromkeys(refused)) or "no calls were given"
        raise UntriedError(f"{subject.name}: no law could be tried; {why}: pass parameters or calls that it serves")
    cases: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for name, law in tried.items():
        reasons = list(refused)
        for trial in trials:
            try:
                law(trial.uncorrected if name in OF_THE_MASK else trial)
            except (BreachError, MaskError, StageError) as breach:
                message = f"{subject.name}: law '{name}' is broken on {describe(trial.call)}: {breach}"
                raise AssertionError(message) from breach
            except NotApplicableError as reason:
                reasons.append(str(reason))
            else:
                cases[name] = cases.get(name, 0) + 1
        if name not in cases:
            skipped[name] = reasons[-1]
    return Report(subject.name, cases, skipped)


def _calls(options: Options) -> list[AttentionCall]:
    """The calls that are given, or the standard ones, and one in bfloat16 where no dtype is given."""
    if "calls" in options:
        return list(options["calls"])
    device, dtype = options.get("device", "cpu"), options.get("dtype", torch.float32)
    return [*standard_calls(device, dtype), *([] if "dtype" in options else [half_call(device)])]


def _trials(subject: Subject, options: Options) -> tuple[list[Trial], list[str]]:
    """A trial per call that the pipeline honours, and its objections to the others."""
    device, dtype = options.get("device", "cpu"), options.get("dtype", torch.float32)
    pipeline, calls = subject.sparse, _calls(options)
    longest = max((call.q.shape[2] for call in calls), default=0)
    if "calls" not in options and pipeline.grain is not None and longest <= pipeline.grain <= LONGEST_GRAIN:
        calls.append(chunked_call(pipeline.grain, device, dtype))
    trials, refused = list[Trial](), list[str]()
    for call in calls:
        objections = pipeline.unsupported(call)
        refused += objections[:1]
        if not objections:
            trials.append(Trial(pipeline, call, subject.full))
    return trials, refused
