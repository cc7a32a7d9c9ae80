"""The choice of the kernel that serves a call, among those that an executor knows: records are asked by rank, refusals keep their reasons, and failures are remembered."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from inspect import iscoroutine
from typing import Any

import torch
from attrs import Attribute, evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import StageError, UnsupportedCallError, frameless, numberless, printed, told
from sparseprefill.kernels.family.chips import NONE, Capability, amd, capability
from sparseprefill.kernels.family.record import Family, Job, Launched, Wanted
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.recorded import RECORDING
from sparseprefill.plan import EXACT
from sparseprefill.validate import one_of

FAILED: dict[tuple[Family, Hashable], Exception] = {}
"""By record and variant, what does not compile or launch here, or answers what is none; empty while all of them work."""
ALL = "any call"
"""In place of a variant, of a kernel that cannot even be imported or asked."""
_SAID: set[tuple[str, str]] = set()
"""Kernels and reasons, without their numbers, that were logged."""
log = logging.getLogger(__name__)


@frozen
class Refusal:
    """A kernel's reason not to serve a call."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@frozen(eq=False)
class Choice:
    """The kernel that serves a call, and as what.

    call: the call to read from; its K and V are copied out of their pages where the kernel is to get a copy. wanted:
    what is asked of it, in the call's precision where no kernel serves the one that was asked for. refused: those that
    would have come first, in order. last: nobody comes after it.
    """

    call: AttentionCall
    family: Family
    wanted: Wanted
    refused: tuple[Refusal, ...] = ()
    last: bool = False

    @property
    def reason(self) -> str:
        """Every refusal; kernels with one reason share it."""
        if not self.refused:
            return ""
        by_reason: dict[str, list[str]] = {}
        for one in self.refused:
            by_reason.setdefault(one.reason, []).append(one.kernel)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


@contextmanager
def afresh() -> Iterator[None]:
    """For checks of one kernel: none has failed before, or does afterwards for what failed meanwhile."""
    failed = dict(FAILED)
    FAILED.clear()
    try:
        yield
    finally:
        FAILED.clear()
        FAILED.update(failed)


def records(value: Any) -> Any:
    """The converter of an executor's kernels: a tuple of its own."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value


def are_records(value: object) -> bool:
    """True for a tuple of records of kernels."""
    return isinstance(value, tuple) and all(isinstance(one, Family) for one in value)


def a_precision(owner: Any, attribute: Attribute[Any], value: Any) -> None:
    """'call', or a precision of a registered kernel, such as 'int8'"""
    if value != EXACT:
        known = (one for family in owner.kernels for one in family.features.precisions)
        one_of(*dict.fromkeys((EXACT, *known)))(owner, attribute, value)


def unmet(precision: str) -> Refusal:
    """Reason for which a call is computed in its own precision on a device whose kernels have no other."""
    return Refusal(precision, "no kernel for it runs on this device")


@cache
def _line(
    known: tuple[Family, ...], chip: Capability, precision: str
) -> tuple[tuple[Family, ...], tuple[Family, ...], tuple[Family, ...]]:
    """Records that run on a chip, by rank: of the precision, and of the call's, if that is another; and the others, of
    other chips."""
    asked = [one for one in known if {precision, EXACT} & set(one.features.precisions)]
    ranked = sorted(
        (one for one in asked if one.place(chip) is not None), key=lambda one: (-(one.place(chip) or 0), one.name)
    )
    reduced = tuple(one for one in ranked if precision in one.features.precisions)
    exact = tuple(one for one in ranked if EXACT in one.features.precisions)
    elsewhere = tuple(one for one in asked if one.place(chip) is None)
    return (reduced, exact, elsewhere) if precision != EXACT else ((), exact, elsewhere)


def choose(call: AttentionCall, mask: SparseMask, wanted: Wanted, known: tuple[Family, ...]) -> Choice:
    """The kernel for the call among those that are known, and what it reads; nothing is read from a device.

    First those of the precision that is wanted, then those of the call's; by rank, and the first without an objection
    serves. Raises UnsupportedCallError with every reason where none does.
    """
    device = call.q.device
    reduced, exact, elsewhere = _line(known, capability(device), wanted.precision)
    refused: list[Refusal] = []
    if device.type == "cuda":
        refused += (Refusal(one.name, _other_chip(one, device)) for one in elsewhere)
    if wanted.precision != EXACT and not reduced and not refused:
        refused.append(unmet(wanted.precision))
    for line, asked in ((reduced, wanted), (exact, wanted.exact)):
        for family in line:
            given = _given(family, call, mask, asked)
            if not isinstance(given, str):
                return Choice(given, family, asked, tuple(refused), last=family is (*reduced, *exact)[-1])
            refused.append(Refusal(family.name, given))
    text = "; ".join(map(str, refused)) or "no kernel runs on this device"
    raise UnsupportedCallError([f"attention: {text}"])


def _given(family: Family, call: AttentionCall, mask: SparseMask, wanted: Wanted) -> AttentionCall | str:
    """The call as the kernel is to get it, or why it does not serve it."""
    reason = _failure(family, ALL) or family.features.lacking(call, mask, wanted)
    if reason is None:
        may = call.pages is not None and call.pages.copies
        reads = family.features.pages
        try:
            given = _copied(call) if may and reads and _copies(family, call, mask, wanted) else call
            reason = objected(family, given, mask, wanted)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of somebody else's code, or of a library that is not there
            return fail(family, ALL, error)
        if reason is None:
            broken = _failure(family, variant(given, mask, wanted, pages=reads)) if FAILED else None
            if broken is not None:
                return broken
            return given if reads or not may else _copied(call)  # what it refuses was not copied for it
    _declined(family.name, reason)
    return reason


def _copied(call: AttentionCall) -> AttentionCall:
    """The call with K and V out of their pages."""
    k, v = (call.k, call.v) if call.pages is None else call.pages.copy()
    return evolve(call, k=k, v=v)


def launched(choice: Choice, job: Job) -> Launched | None:
    """Results that the chosen kernel leaves; None where this variant of it fails here, so that `choose` has to be asked
    again: whoever is asked then fills the same outputs.

    Of the last in line the error is the caller's, and so is a lack of memory.
    """
    recording = RECORDING.get()
    if recording is not None and not choice.family.features.repeats:
        recording.refuse(f"the kernel {choice.family.name} does not repeat")
    try:
        return _looked_at(choice.family, job, choice.family.launch(job))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what compilers and libraries raise has no class in common
        if recording is not None:
            recording.refuse(f"the kernel {choice.family.name} failed")
        if choice.last:
            raise
        fail(choice.family, variant(job.call, job.mask, job.wanted), error)
        return None


def objected(family: Family, call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """A kernel's reason against a call; StageError for anything but a text with words in it, or None."""
    found: object = family.objection(call, mask, wanted)
    if found is None or (isinstance(found, str) and found.strip()):
        return found
    raise _wrong(family, "objection", found, "None, or a reason (a str)")


def _copies(family: Family, call: AttentionCall, mask: SparseMask, wanted: Wanted) -> bool:
    """True if a kernel is to get a copy of pages; StageError for anything but True or False."""
    found: object = family.copied(call, mask, wanted)
    if isinstance(found, bool):
        return found
    raise _wrong(family, "copied", found, "True or False")


def _looked_at(family: Family, job: Job, found: object) -> Launched:
    """The answer of a launch, by sizes, types and places alone; StageError for what is no `Launched`, or none of this job."""
    if not isinstance(found, Launched):
        raise _wrong(family, "launch", found, "a Launched")
    device, flags, exact = job.call.q.device, found.nonfinite, job.wanted.precision == EXACT
    if flags is not None and not _fits(flags, (job.arguments.flags,), device):
        raise _unfit(family, "nonfinite", flags, f"one flag for each of {job.arguments.flags} query blocks on {device}")
    if found.voting is None and job.wanted.skips:
        raise _unfit(family, "voting", None, "(query rows of a block, rows that vote together, keys of a step)")
    if exact and found.errors is None:
        return found
    rows = job.call.q.shape[0] if job.requests is None else len(job.requests.masks)
    heads = rows, job.call.q.shape[1]
    if exact or found.errors is None or not _fits(found.errors, heads, device):
        words = (
            "None: the call's precision was asked for" if exact else f"one number for each head, {heads}, on {device}"
        )
        raise _unfit(family, "errors", found.errors, words)
    return found


def _fits(x: Tensor, shape: tuple[int, ...], device: torch.device) -> bool:
    return x.shape == shape and x.device == device


def _unfit(family: Family, field: str, value: Tensor | None, words: str) -> StageError:
    shown = f"{printed(value)} on {value.device}" if isinstance(value, Tensor) else printed(value)
    return StageError(f"{family.name}.launch() returned a Launched whose {field} is {shown}: it must be {words}")


def _wrong(family: Family, verb: str, value: object, words: str) -> StageError:
    if iscoroutine(value):
        value.close()  # nobody awaits it, which Python would warn of
    return StageError(f"{family.name}.{verb}() returned {_shown(value)}: it must return {words}")


def _shown(value: Any) -> str:
    """Plain values and tensors as messages show them, all else by its type: what holds tensors would print their values."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return printed(value)
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def variant(call: AttentionCall, mask: SparseMask, wanted: Wanted, *, pages: bool = True) -> Hashable:
    """Things that a kernel is compiled for, but for its carry and state: one that fails says nothing of the others.

    pages: whether it reads pages; of one that does not it is a variant for the copy that it gets.
    """
    lists = (mask.has_tiles, mask.stripes is not None, mask.disjoint)
    optional = tuple(x is not None for x in (call.starts, call.lengths, call.sinks))
    page = None if call.pages is None or not pages else (call.pages.page, call.pages.k.dtype)
    grid = mask.tile_q, mask.tile_k, mask.group, mask.stripe_width
    made = call.q.dtype, call.q.shape[-1], *grid, lists, optional, page, wanted.skips
    return (*made, "several requests") if wanted.together else made


def _other_chip(family: Family, device: torch.device) -> str:
    """Reason for which a kernel of other chips does not run on a GPU."""
    chips = [one for one in family.rank if one != NONE] if not isinstance(family.rank, int) else []
    numbers = " or ".join("{}.{}".format(*one) for one in sorted(chips))
    which = "is AMD's" if amd(device) else "has {}.{}".format(*capability(device))
    return f"needs an NVIDIA GPU of capability {numbers}, this one {which}"


@lru_cache(maxsize=1024)
def _declined(name: str, reason: str) -> None:
    """Said once for each reason, whatever its numbers; `info`, since small tiles or a softcap are no fault of anybody."""
    kind = name, numberless(reason)
    if kind not in _SAID:
        _SAID.add(kind)
        log.info("the kernel %s does not serve calls with %s; the next in line is asked", name, reason)


def fail(family: Family, which: Hashable, error: Exception) -> str:
    """From now on other kernels serve this variant, which one warning says. Returns the reason."""
    log.debug("%s", family.name, exc_info=error)
    FAILED[family, which] = frameless(error)
    text = "the kernel %s does not work here (torch %s) for %s; another serves instead: %s"
    log.warning(text, family.name, torch.__version__, which, told(error))
    return _failure(family, which) or ""


def failures(family: Family) -> tuple[Exception, ...]:
    """Errors of a kernel so far, one of each variant."""
    return tuple(error for (one, _), error in FAILED.items() if one is family)


def _failure(family: Family, which: Hashable) -> str | None:
    """Reason for which a variant of a kernel does not work here, in one line; None where it was not found to fail."""
    error = FAILED.get((family, which)) if FAILED else None
    if error is None:
        return None
    text = (told(error).splitlines() or [""])[0][:200]
    return f"does not work here for {which}: {type(error).__name__}: {text}"
