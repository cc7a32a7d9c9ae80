"""Laws of one run: what its mask and its numbers must satisfy. Each takes a trial and raises BreachError."""

from __future__ import annotations

import torch
from attrs import evolve

from sparseprefill.errors import MaskError
from sparseprefill.memory import Memory
from sparseprefill.testing.trial import BreachError, NotApplicableError, Trial, require
from sparseprefill.testing.truth import attention
from sparseprefill.testing.votes import computed


def full_mask_is_dense(trial: Trial) -> None:
    """At the method's full parameters mask and output are dense attention's."""
    if not trial.full:
        raise NotApplicableError("no parameters are known at which the mask is full: pass full={...}")
    out, lse = attention(trial.call)
    for pipeline in trial.full:
        full = Trial(pipeline, trial.call)
        missed = (full.allowed[:, None] & ~full.keep).sum()
        require(missed == 0, f"{int(missed)} allowed pairs are missing from the mask")
        full.same("output against dense attention", out, full.result.out)
        full.same("LSE against dense attention", lse, full.result.lse)


def consistent(trial: Trial) -> None:
    """Output and LSE are the softmax over the mask that the result reports; padding rows are zeros and -inf."""
    out, lse = attention(trial.call, trial.keep)
    require(trial.result.out.dtype == trial.call.q.dtype, f"output is {trial.result.out.dtype}")
    trial.same("output against softmax over its own mask", out, trial.result.out)
    trial.same("LSE against softmax over its own mask", lse, trial.result.lse)


def no_empty_row(trial: Trial) -> None:
    """Every real row has a finite LSE and keeps its own token."""
    empty = trial.real & ~torch.isfinite(trial.result.lse)
    require(~empty, f"{int(empty.sum())} real rows have LSE -inf, +inf or NaN")
    index = torch.arange(trial.call.q.shape[2], device=trial.call.q.device)
    own = trial.keep[:, :, index, index + trial.offset]
    lost = trial.real & ~own
    require(~lost, f"{int(lost.sum())} rows do not keep their own diagonal")


def no_nan(trial: Trial) -> None:
    """Finite input gives finite output, also where logits are large or all alike."""
    call = trial.call
    variants = {
        "as given": call,
        "logits times 40": evolve(call, q=call.q * 40),
        "queries of zero": evolve(call, q=torch.zeros_like(call.q)),
        "keys all alike": evolve(call, k=call.k[:, :, :1].expand_as(call.k)),
    }
    for name, variant in variants.items():
        result = trial.result if variant is call else trial.run(variant)
        require(torch.isfinite(result.out), f"output is not finite ({name})")
        require(torch.isfinite(result.lse) | ~trial.real, f"LSE is not finite ({name})")


def density_in_bounds(trial: Trial) -> None:
    """Density lies in (0, 1] and is the share of the allowed pairs that `mask.to_dense()` holds."""
    require(trial.allowed[:, None] | ~trial.keep, "the mask holds pairs that are not allowed")
    pairs = int(trial.allowed.sum()) * trial.call.q.shape[1]
    if pairs == 0:
        raise NotApplicableError("every query row is padding")
    counted = int(trial.keep.sum()) / pairs
    density = trial.result.density
    require(0 < density <= 1, f"density is {density}")
    require(abs(density - counted) <= 1e-12, f"density is {density}, to_dense() counts {counted}")


def disjoint(trial: Trial) -> None:
    """Carry region and remaining mask share no pair; lists are ascending; a mask marked disjoint is."""
    plan = trial.result.plan
    for mask in plan.masks:
        try:
            mask.check()
        except MaskError as error:
            raise BreachError(str(error)) from error
        if mask.disjoint:
            both = evolve(mask, stripes=None).to_dense() & evolve(mask, tiles=None).to_dense()
            require(~both, f"{int(both.sum())} pairs lie in a tile and a stripe of a mask marked disjoint")
    if plan.carry is not None:
        both = plan.mask.to_dense() & plan.carry.region.to_dense()
        require(~both, f"{int(both.sum())} pairs lie in the carry region and in the remaining mask")


def repeatable(trial: Trial) -> None:
    """A call that runs again gets the same mask, and the same output bit by bit."""
    again = trial.run(trial.call)
    changed = computed(trial.call, again) ^ trial.keep
    require(~changed, f"{int(changed.sum())} pairs of the mask are others when the call runs again")
    require(torch.equal(again.out, trial.result.out), "the output is another one when the call runs again")


def memory_is_read_only(trial: Trial) -> None:
    """A pipeline without observers writes nothing to the memory of the request."""
    if trial.pipeline.observers:
        raise NotApplicableError("the method has observers, which write to memory")
    memory = Memory()
    trial.pipeline.run(trial.call, memory)
    require(len(memory) == 0, f"{len(memory)} values were put into memory: only observers do so")


def waits_for_nothing(trial: Trial) -> None:
    """On a GPU no value is read on the host."""
    if not trial.call.q.is_cuda:
        raise NotApplicableError("shows on a GPU alone: pass device='cuda'")
    _ = trial.result  # what is compiled, and kept by size, is there now
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trial.run(trial.call)
    finally:
        torch.cuda.set_sync_debug_mode(before)
