"""Looks at what stages are given and at what they hand over: nothing may be written to, and every field fits the call.

Sizes, types and devices are known on the host. Values are read where that waits for nobody: on a CPU.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Self

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import MaskError, printed
from sparseprefill.mask.lists import readable
from sparseprefill.mask.mask import SparseMask
from sparseprefill.pages import odd_layout
from sparseprefill.plan import (
    Carry,
    Kernel,
    Parts,
    Plan,
    Result,
    Rounding,
    Skipped,
    SoftmaxState,
    check_geometry,
)
from sparseprefill.statistics.sampled import Logits, spread_rows

ROWS = 8
"""Query rows of a carry that are worked out once more, on a CPU."""
FAR = 0.1
"""Log-sum-exps that lie further apart are of other keys or queries; rounding in 16 bits moves them by a tenth of it."""
SHOWN = 64
"""Query rows at once whose keys are looked for, where an output says that they have none."""


@frozen(eq=False)
class Watch:
    """Tensors that a stage is given, with the number that torch has counted of writes to each; no value is read."""

    tensors: tuple[tuple[str, Tensor], ...]
    versions: list[int]

    @classmethod
    def of(cls, call: AttentionCall, plan: Plan | None = None, result: Result | None = None) -> Self:
        """The call's tensors, those of a plan that are no lists, and those of a result."""
        tensors = call.versioned
        given: tuple[tuple[str, Any], ...] = ()
        if plan is not None:
            given = ("plan.probe", plan.probe), ("plan.skip_below", plan.skip_below)
            if plan.carry is not None:
                state = plan.carry.state
                given += ("plan.carry.state.m", state.m), ("plan.carry.state.l", state.l)
                given += (("plan.carry.state.acc", state.acc),)
        if result is not None:
            given += ("result.out", result.out), ("result.lse", result.lse), ("result.probe", result.probe)
        if given:
            tensors += tuple((name, x) for name, x in given if x is not None and not x.is_inference())
        return cls(tensors, [x._version for _, x in tensors])

    @property
    def written(self) -> str:
        """The first of them that was written to since; empty for none."""
        pairs = zip(self.tensors, self.versions, strict=True)
        return next((name for (name, x), version in pairs if x._version != version), "")


def check_plan_of(call: AttentionCall, plan: Plan, given: Plan | None) -> None:
    """MaskError for a plan that does not fit the call; given: the plan that a refiner was given, None for none.

    Beyond sizes, on a CPU: lists that are none, pairs of the carry's region that the mask holds again, and a carry
    whose sums are not those of this call.
    """
    if plan.geometry is not call.geometry:
        check_geometry(call, plan.geometry, "it returned")
    priority = plan.priority
    if priority is not None and (given is None or priority is not given.priority):
        priority.check(call)
    look, same_mask = readable(call.q.device), given is not None and plan.base is given.base
    if look and not same_mask:
        _ = plan.base.doubtful and plan.base.looked_at
    carry = plan.carry
    if carry is None:
        return
    same_carry = given is not None and carry is given.carry
    if not same_carry:
        check_state("Plan.carry.state", carry.state, call)
        if look:
            _ = carry.region.doubtful and carry.region.looked_at
            _check_sums(call, carry)
    if look and not (same_carry and same_mask):
        _check_disjoint(plan.base, carry.region)


def check_state(name: str, state: SoftmaxState, call: AttentionCall) -> None:
    """MaskError for a softmax state that is none of the call's, by sizes, type and device."""
    shape, dtype = (*call.q.shape[:3], call.value_dim), torch.promote_types(call.q.dtype, torch.float32)
    acc = state.acc
    if tuple(acc.shape) != shape or acc.dtype != dtype or acc.device != call.q.device:
        found = f"{tuple(acc.shape)} of {acc.dtype} on {acc.device}"
        raise MaskError(f"{name} has acc {found}: it must be {list(shape)} of {dtype} on {call.q.device}, the call's")


def _check_disjoint(mask: SparseMask, region: SparseMask) -> None:
    twice = int((mask.pairs() + region.pairs() - (mask | region).pairs()).sum())
    if twice:
        remedy = "they would count twice; pass the mask without them, as in `mask - region`"
        raise MaskError(f"Plan.mask holds {twice} pairs of the carry region, which Plan.carry has computed: {remedy}")


@uncast
@torch.no_grad()
def _check_sums(call: AttentionCall, carry: Carry) -> None:
    """MaskError for a carry whose log-sum-exp in a few rows is not that of the call over the carry's region."""
    index, real = spread_rows(call, ROWS)
    for batch in range(index.shape[0]):
        keep = carry.region.to_dense(index[batch])[batch]
        logits = Logits(call, index, real).of(slice(0, call.kv_len))[batch]
        wanted = torch.where(keep, logits, -torch.inf).logsumexp(-1)
        found = (carry.state.m + carry.state.l.log())[batch, :, index[batch]]
        known = real[batch] & ~(wanted.isnan() | found.isnan() | wanted.isposinf() | found.isposinf())
        if bool((known & (wanted != found) & ~((wanted - found).abs() <= FAR + wanted.abs() / 256)).any()):
            remedy = "its sums are not those of this call's queries and keys; make it afresh for each call"
            raise MaskError(f"Plan.carry.state is of another call, or of another region: {remedy}")


def check_result(call: AttentionCall, plan: Plan, result: Result) -> str:
    """What a result of an executor or corrector has that does not fit its call, as ``name is value: it must ...``."""
    rows, device, exact = tuple(call.q.shape[:3]), call.q.device, call.q.dtype == torch.float64
    for name, x, shape in (("out", result.out, (*rows, call.value_dim)), ("lse", result.lse, rows)):
        if not isinstance(x, Tensor) or odd_layout(x) or tuple(x.shape) != shape or x.device != device:
            return f"{name} is {_at(x)}: it must be a tensor {list(shape)} on {device}"
    if result.out.dtype != call.q.dtype:
        return f"out is {result.out.dtype}: it must be {call.q.dtype}, the call's"
    if result.lse.dtype != (torch.float64 if exact else torch.float32):
        return f"lse is {result.lse.dtype}: it must be {'torch.float64' if exact else 'torch.float32'}"
    if not isinstance(result.plan, Plan):
        return f"plan is {printed(result.plan)}: it must be the Plan that was computed"
    if result.plan is not plan and not result.plan.geometry.fits(call.geometry):
        return f"plan is one for {result.plan.geometry.describe()}: it must be one for the call"
    return _rest(call, result)


def _rest(call: AttentionCall, result: Result) -> str:
    heads = tuple(call.q.shape[:2])
    probe, skipped, rounded = result.probe, result.skipped, result.rounded
    if probe is not None:
        mask = result.plan.base
        shape = mask.geometry.map_shape(mask.tile_q, mask.tile_k)
        if not _is(probe, shape, (torch.float32, torch.float64), call):
            return f"probe is {_at(probe)}: it must be None, or float32 {list(shape)} on {call.q.device}"
    for name, value, kind in (("parts", result.parts, Parts), ("skipped", skipped, Skipped)):
        if value is not None and not (isinstance(value, kind) and _is(value.pairs, heads, (torch.int64,), call)):
            words = f"None, or a {kind.__name__} whose pairs are int64 {list(heads)} on {call.q.device}"
            return f"{name} is {printed(value)}: it must be {words}"
    if rounded is not None and not (
        isinstance(rounded, Rounding) and _is(rounded.errors, heads, (torch.float32, torch.float64), call)
    ):
        words = f"None, or a Rounding whose errors are float32 {list(heads)} on {call.q.device}"
        return f"rounded is {printed(rounded)}: it must be {words}"
    for name, text in (("dense", result.dense), ("corrected", result.corrected)):
        if not isinstance(text, str):
            return f"{name} is {printed(text)}: it must be a text"
    kernels = result.kernels
    if not isinstance(kernels, tuple) or not all(isinstance(one, Kernel) for one in kernels):
        return f"kernels is {printed(kernels)}: it must be a tuple of Kernels"
    return ""


def _is(x: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], call: AttentionCall) -> bool:
    fits = isinstance(x, Tensor) and not odd_layout(x) and tuple(x.shape) == shape
    return fits and x.dtype in dtypes and x.device == call.q.device


def _at(x: object) -> str:
    elsewhere = isinstance(x, Tensor) and x.device.type != "cpu"
    return f"{printed(x)} on {x.device}" if elsewhere else printed(x)


def keyless(call: AttentionCall, plan: Plan, result: Result) -> str:
    """What the makers of a plan left, where a query row has no key, which its log-sum-exp shows; empty elsewhere.

    Looked at on a CPU alone.
    """
    if not readable(result.lse.device):
        return ""
    empty = result.lse.isneginf()
    if not bool(empty.any()):
        return ""
    empty &= call.geometry.real_queries()[:, None]
    try:
        for mask in plan.masks:
            mask.check()
    except MaskError as error:  # lists of which their maker said that they are sound
        return f"lists that are none: {error}"
    for some in empty.any(0).any(0).nonzero()[:, 0].split(SHOWN):
        held = reduce(or_, (mask.to_dense(some).any(-1) for mask in plan.masks))
        lost = (empty[:, :, some] & ~held).nonzero()
        if len(lost):
            batch, head, row = lost[0].tolist()
            shown = f"batch row {batch}, head {head + call.first_head}, query row {int(some[row])} is the first"
            remedy = "every row must keep one, such as its own: keep the diagonal, as `SparseMask.from_tiles` does"
            return f"query rows without a key, so that their LSE is -inf ({shown}): {remedy}"
    return ""
