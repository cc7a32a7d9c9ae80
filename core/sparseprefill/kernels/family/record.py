"""The record of an attention kernel: what it can do, what it has against a call, and how it is launched.

A plugin offers records through the hook ``sparseprefill_kernels``. Those that run on a chip are asked by rank, and the
first without an objection serves; what the others had against the call stands in `Result.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.kernels.family.chips import Capability
from sparseprefill.pages import odd_layout
from sparseprefill.plan import BOUND, EXACT
from sparseprefill.validate import WIDEST, Check, fitting, is_name, is_number, is_whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.kernels.attention.arguments import Arguments
    from sparseprefill.kernels.attention.together import Together
    from sparseprefill.mask.mask import SparseMask

HALVES = frozenset({torch.float16, torch.bfloat16})
TYPES = HALVES | {torch.float32}


def square(*dims: int) -> frozenset[tuple[int, int]]:
    """Head dimensions that are the same for keys and values."""
    return frozenset((dim, dim) for dim in dims)


def _flag(owner: str) -> Check:
    return fitting(owner, lambda value: isinstance(value, bool), "True or False")


def _pair(value: object, least: int) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(is_whole(one, least) for one in value)


def _types(value: object) -> bool:
    if not isinstance(value, frozenset) or not value:
        return False
    return all(isinstance(one, torch.dtype) and one.is_floating_point for one in value)


def _dims(value: object) -> bool:
    return isinstance(value, frozenset) and len(value) > 0 and all(_pair(one, 1) for one in value)


def _widths(value: object) -> bool:
    return value is None or (isinstance(value, frozenset) and all(is_whole(one, 1) for one in value))


def _precisions(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(map(is_name, value))


def _rank(value: object) -> bool:
    table = value if isinstance(value, dict) else {(0, 0): value}
    return all(_pair(chip, 0) and is_whole(one, -WIDEST) for chip, one in table.items())


def _flags(value: object) -> bool:
    return value is None or (_plain(value, torch.int8, 1) and value.is_contiguous())


def _errors(value: object) -> bool:
    return value is None or _plain(value, torch.float32, 2)


def _plain(value: object, dtype: torch.dtype, dims: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not odd_layout(value) and value.dtype == dtype and value.dim() == dims


def _voting(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and len(value) == 3 and all(is_whole(one, 1) for one in value))


WISH, ABLE = _flag("Wanted"), _flag("Features")


@frozen(kw_only=True)
class Wanted:
    """Wishes to a launch beside attention over a mask.

    precision: "call" for that of the call, or a reduced one. bound: error up to which a head is computed in that (see
    `plan.Rounding`). skips: steps may be left out (`Plan.skip_below`). carry: a softmax is resumed. state: the softmax
    is left unnormalised. together: several requests share the launch.
    """

    precision: str = field(default=EXACT, validator=fitting("Wanted", is_name, "'call', or a precision of a kernel"))
    bound: float = field(default=BOUND, validator=fitting("Wanted", partial(is_number, least=0.0), "a number from 0"))
    skips: bool = field(default=False, validator=WISH)
    carry: bool = field(default=False, validator=WISH)
    state: bool = field(default=False, validator=WISH)
    together: bool = field(default=False, validator=WISH)

    @cached_property
    def exact(self) -> Wanted:
        """The same in the call's precision."""
        return self if self.precision == EXACT else evolve(self, precision=EXACT)

    @cache  # noqa: B019 - of few values, and each is kept for good
    def of(self, skips: bool, carry: bool, state: bool, together: bool) -> Wanted:
        """The same precision, asked for a launch."""
        return evolve(self, skips=skips, carry=carry, state=state, together=together)


@frozen(kw_only=True)
class Features:
    """The abilities of a kernel. A call that needs more is refused for it, before the kernel's own objections are asked.

    dtypes: of q. dims: head dimensions, those of q and k beside those of the values. widths: keys of a column of the
    mask; None for any, empty where masks must be of tiles alone. precisions: of `Wanted.precision`. votes: leaves out
    steps whose logits cannot matter, and tells who voted. carry: resumes a softmax. state: leaves one unnormalised.
    requests: several of them in one launch. pages: reads keys and values where they stand; without, it gets a copy.
    padding, window, softcap, sinks: of the call. repeats: it launches by `kernels.launch.enqueue` and torch's operators
    alone, which a recording sees and repeats for other layers.
    """

    dtypes: frozenset[torch.dtype] = field(
        default=HALVES,
        validator=fitting("Features", _types, "a frozenset of torch dtypes, such as frozenset({torch.float16})"),
    )
    dims: frozenset[tuple[int, int]] = field(
        default=square(64, 128),
        validator=fitting("Features", _dims, "a frozenset of pairs of integers, such as square(64, 128)"),
    )
    widths: frozenset[int] | None = field(
        default=frozenset(),
        validator=fitting("Features", _widths, "None for any, or a frozenset of integers, such as frozenset({1, 16})"),
    )
    precisions: tuple[str, ...] = field(
        default=(EXACT,),
        validator=fitting("Features", _precisions, "a tuple of lower-case words joined by hyphens, such as ('call',)"),
    )
    votes: bool = field(default=False, validator=ABLE)
    carry: bool = field(default=False, validator=ABLE)
    state: bool = field(default=False, validator=ABLE)
    requests: bool = field(default=False, validator=ABLE)
    pages: bool = field(default=False, validator=ABLE)
    padding: bool = field(default=False, validator=ABLE)
    window: bool = field(default=False, validator=ABLE)
    softcap: bool = field(default=False, validator=ABLE)
    sinks: bool = field(default=False, validator=ABLE)
    repeats: bool = field(default=False, validator=ABLE)

    def lacking(self, call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
        """The need of the call that the kernel does not meet; None where it has all."""
        dims = (call.q.shape[-1], call.value_dim)
        if call.q.dtype not in self.dtypes or dims not in self.dims:
            values = "" if dims[0] == dims[1] else f", {dims[1]} for values"
            return f"{call.q.dtype} with head dimension {dims[0]}{values}"
        if not (self.window or call.geometry.window is None) or not (self.softcap or call.softcap is None):
            return "a sliding window or softcap"
        if not (self.sinks or call.sinks is None):
            return "sinks"
        if not (self.padding or (call.starts is None and call.lengths is None)):
            return "padding"
        if self.widths is not None and mask.stripes is not None and mask.stripe_width not in self.widths:
            return f"columns of {mask.stripe_width} keys in the mask"
        if wanted.carry and not self.carry:
            return "a softmax to resume"
        if wanted.state and not self.state:
            return "a softmax that is left unnormalised"
        if wanted.skips and not self.votes:
            return "tiles that may be left out"
        if wanted.together and not self.requests:
            return "a shared launch"
        if call.pages is not None and not (self.pages or call.pages.copies):
            return "pages that may not be copied"
        return None


@frozen(eq=False, kw_only=True)
class Job:
    """One launch. call: its keys and values are copied out of their pages where the kernel wants that.

    arguments: everything as the portable kernel takes it, outputs and a state to resume among it: `arguments.outputs`
    has `out` and `lse`, or the `state`, which the kernel fills, and `skipped`, where it counts pairs that it left out;
    `arguments.flags` is how many query blocks `Launched.nonfinite` speaks of.
    requests: several of one launch; call and mask are then the first's, and say what holds for all.
    """

    call: AttentionCall
    mask: SparseMask
    wanted: Wanted
    arguments: Arguments
    requests: Together | None = None


@frozen(eq=False, kw_only=True)
class Launched:
    """Things that a launch leaves beside its outputs. Nothing of it is read from the device.

    nonfinite: int8 ``[job.arguments.flags]``, contiguous, by batch row, head and query block: 1 where a sum of the block
    is NaN or infinite; those blocks are computed again, with care for keys that a row may not see. None where the kernel
    does not tell: its output is looked at, unless it was `repaired`, so that such keys reach no row that may not see them.
    voting: where steps may be left out, query rows of a block, rows that vote together, and keys of a step.
    errors: float32 ``[B, Hq]``, of a reduced precision (`plan.Rounding`) and of no other.
    """

    nonfinite: Tensor | None = field(
        default=None, validator=fitting("Launched", _flags, "a contiguous int8 tensor [job.arguments.flags], or None")
    )
    repaired: bool = field(default=False, validator=_flag("Launched"))
    voting: tuple[int, int, int] | None = field(
        default=None, validator=fitting("Launched", _voting, "a tuple of three integers >= 1, or None")
    )
    errors: Tensor | None = field(
        default=None, validator=fitting("Launched", _errors, "a float32 tensor [B, Hq], or None")
    )


Objection = Callable[["AttentionCall", "SparseMask", Wanted], "str | None"]
Copied = Callable[["AttentionCall", "SparseMask", Wanted], bool]


def no_objection(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> None:
    """Of a kernel that serves whatever its features allow."""


def never(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> bool:
    """Of a kernel that reads pages where they stand."""
    return False


def _table(rank: Any) -> Any:
    """A copy of its own: a table that is changed later would have been checked in vain."""
    return dict(rank) if isinstance(rank, Mapping) else rank


RANK = "an integer, or a table of integers by compute capability, such as {(9, 0): 10}"
CALLABLE = fitting("Family", callable, "a function")


@frozen(eq=False, kw_only=True)
class Family:
    """The record of a kernel, or of a family that is launched by one function.

    name: what `Result.kernels` calls it: lower-case words joined by hyphens. rank: its place among others, higher ones
    are asked first; a number on every device, or one for each of NVIDIA's compute capabilities on which it runs, and on
    no others. launch: fills the job's outputs, without waiting for the device. objection: why it does not serve a call
    that its features allow, or None; sizes and features alone, no device is asked. copied: whether a kernel
    that reads pages is to get a copy of those that may be copied; asked before `objection`, which then sees the copy.
    Others get theirs once they have no objection.

    The functions import what they need when they are called. An error of `launch`, or an answer that is no `Launched` of
    this job, is a failure of this variant of the kernel (`choose.variant`), one of `objection` or `copied` of all: others
    serve from then on, and say why.
    """

    name: str = field(validator=fitting("Family", is_name, "lower-case words joined by hyphens, such as 'my-kernel'"))
    rank: int | Mapping[Capability, int] = field(converter=_table, validator=fitting("Family", _rank, RANK))
    launch: Callable[[Job], Launched] = field(validator=CALLABLE)
    features: Features = field(
        factory=Features, validator=fitting("Family", lambda value: isinstance(value, Features), "a Features")
    )
    objection: Objection = field(default=no_objection, validator=CALLABLE)
    copied: Copied = field(default=never, validator=CALLABLE)

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        """Itself: copies of an executor know the same kernels, and what has failed."""
        return self

    def place(self, capability: Capability) -> int | None:
        """Its rank on a chip; None where it does not run."""
        return self.rank.get(capability) if isinstance(self.rank, Mapping) else self.rank
