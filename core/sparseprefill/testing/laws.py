"""Laws that a run must satisfy, alone and beside runs on changed input, other batches or chunks.

Each takes a trial and raises BreachError.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import evolve
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError
from sparseprefill.memory import Memory
from sparseprefill.parts.split import parts
from sparseprefill.plan import Planned, Result
from sparseprefill.testing.trial import BreachError, NotApplicableError, Trial, require
from sparseprefill.testing.truth import attention
from sparseprefill.testing.votes import computed


def full_mask_is_dense(trial: Trial) -> None:
    """At the method's full parameters mask and output are dense attention's."""
    if not trial.full:
        raise NotApplicableError("no parameters are known at which the mask is full: pass full={...}")
    refused = {i: reasons[0] for i, one in enumerate(trial.full) if (reasons := one.unsupported(trial.call))}
    if len(refused) == len(trial.full):
        raise NotApplicableError(f"with its full parameters it refuses the call: {refused[0]}")
    out, lse = attention(trial.call)
    for pipeline in (one for i, one in enumerate(trial.full) if i not in refused):
        full = Trial(pipeline, trial.call)
        missed = (full.allowed[:, None] & ~full.keep).sum()
        require(missed == 0, f"{int(missed)} allowed pairs are missing from the mask")
        full.agree("against dense attention", (out, lse), (full.result.out, full.result.lse))


def consistent(trial: Trial) -> None:
    """Output and LSE are the softmax over the mask that the result reports; padding rows are zeros and -inf."""
    require(trial.result.out.dtype == trial.call.q.dtype, f"output is {trial.result.out.dtype}")
    found = trial.result.out, trial.result.lse
    trial.agree("against softmax over its own mask", attention(trial.call, trial.keep), found)


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
    require(_equal(again.out, trial.result.out), "the output is another one when the call runs again")


def unfinished_is_whole(trial: Trial) -> None:
    """The softmax that the executor leaves in progress over a plan ends as the one that it normalises itself."""
    if trial.result.parts is not None:
        raise NotApplicableError("the call runs in parts: its plan is not kept")
    state = trial.pipeline.executing.accumulate(trial.call, trial.result.plan)
    found = state.finish(trial.call.sinks)
    trial.agree("of accumulate() against execute()", (trial.result.out, trial.result.lse), found)


def values_alike_come_out(trial: Trial) -> None:
    """Of values that are all one vector a corrector makes that vector, as any mean of values does."""
    call = trial.call
    if trial.pipeline.corrector is None:
        return  # a softmax over its mask, which a law of its own holds
    if call.sinks is not None:
        raise NotApplicableError("sinks take a share of each row")
    value = torch.linspace(1, 2, call.value_dim, dtype=call.v.dtype, device=call.v.device)
    found = trial.run(evolve(call, v=value.expand_as(call.v))).out
    trial.same("output where all values are alike", value.expand_as(found)[trial.real], found[trial.real])


def handed_on(trial: Trial) -> None:
    """A refiner hands on whatever a plan holds besides its mask; a carry may go where its region is in the mask."""
    *others, refiner = trial.pipeline.refiners
    given = evolve(trial.pipeline, refiners=others).plan(trial.call, Memory())
    found = refiner.refine(trial.call, given, Memory())
    held = [name for name in ("carry", "priority", "probe", "skip_below") if getattr(given, name) is not None]
    if not held and not given.notes:
        raise NotApplicableError("the plan holds nothing but its mask")
    lost = [name for name in held if getattr(found, name) is None]
    if given.carry is not None and found.carry is None:
        again = given.carry.region.to_dense() & ~found.mask.to_dense()
        lost = lost if bool(again.any()) else [name for name in lost if name != "carry"]
    lost += [f"notes[{key!r}]" for key in given.notes if key not in found.notes]
    require(not lost, f"{', '.join(lost)} of the plan is lost: return attrs.evolve(plan, mask=...)")


def memory_is_read_only(trial: Trial) -> None:
    """Nothing but an observer writes to the memory of the request."""
    memory = Memory()
    if trial.pipeline.observers:
        trial.pipeline.plan(trial.call, memory)  # they come behind the output
    else:
        trial.pipeline.run(trial.call, memory)
    require(len(memory) == 0, f"{len(memory)} values were put into memory: only observers do so")


def nothing_is_written(trial: Trial) -> None:
    """No stage writes to what it is given, by whatever way: the call's tensors, a plan's masks, output and LSE."""
    pipeline, memory = trial.pipeline, Memory()
    call = evolve(trial.call, **{name: getattr(trial.call, name).clone() for name in ("q", "k", "v")})
    given = {name: getattr(call, name) for name in ("q", "k", "v", "sinks", "starts", "lengths", "prompt_lengths")}
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}

    def same(stage: str) -> None:
        for name, x in before.items():
            require(_equal(x, given[name]), f"{stage} wrote to {name}, which it was given")

    plan, masks = evolve(pipeline, refiners=()).plan(call, memory), list[Tensor]()
    same("the estimator")
    for refiner in pipeline.refiners:
        masks = [mask.to_dense() for mask in plan.masks]
        after = refiner.refine(call, plan, memory)
        same(type(refiner).__name__)
        for kept, mask in zip(masks, plan.masks, strict=True):
            require(
                torch.equal(kept, mask.to_dense()), f"{type(refiner).__name__} wrote to the mask of the plan it got"
            )
        plan = after
    masks = [mask.to_dense() for mask in plan.masks]
    result = pipeline.executing.execute(call, plan)
    same(type(pipeline.executor).__name__)
    out, lse = result.out.clone(), result.lse.clone()
    pipeline.finish(Planned(call, plan, memory), result)
    same("the corrector or an observer")
    for name, kept, found in (("out", out, result.out), ("lse", lse, result.lse)):
        require(_equal(kept, found), f"the corrector or an observer wrote to {name}, which it was given")
    for kept, mask in zip(masks, plan.masks, strict=True):
        require(torch.equal(kept, mask.to_dense()), "the mask of the plan is another one after it was computed")


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.nan_to_num(nan=1e30), other.nan_to_num(nan=1e30)))


def tail_is_dense(trial: Trial) -> None:
    """The mask gives the last rows, as many as the pipeline's `tail` says, every key: hosts add no dense rows then."""
    if trial.pipeline.tail == 0 or trial.call.prompt_lengths is not None:
        return  # nothing is promised, or of rows elsewhere
    behind = trial.real[:, :1].flip(2).cumsum(2).flip(2)  # [B, 1, Nq], the row itself included
    last = trial.real[:, :1] & (behind <= trial.pipeline.tail)
    missed = (last[..., None] & trial.allowed[:, None] & ~trial.result.mask.to_dense()).sum()
    require(missed == 0, f"{int(missed)} allowed pairs of the last rows are missing, and tail is {trial.pipeline.tail}")


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


def causal(trial: Trial) -> None:
    """Rows before a cut do not feel what comes after it: NaN in queries, keys and values, or other numbers.

    An estimator may look at the whole call and choose other keys, so rows are compared with the softmax over the mask
    that the changed run reports, taken of the unchanged tensors. A pipeline with a grain must, at its multiples, give
    the very same rows.
    """
    call, grain = trial.call, trial.pipeline.grain
    end = trial.offset + call.q.shape[2]
    middle = trial.offset + call.q.shape[2] // 2
    changing = {middle} | ({end - 1 - (end - 1) % grain} if grain else set())
    cuts = {cut for cut in changing | {end - 1, end} if trial.offset < cut < call.kv_len}
    if not cuts:
        raise NotApplicableError("no row of the call has a future key")
    for cut in sorted(cuts):
        rows = slice(0, cut - trial.offset)
        for name, value in [("changed", None)] * (cut in changing) + [("NaN", torch.nan)]:
            changed = _after(call, cut, trial.offset, value)
            result = trial.run(changed)
            what = f"rows before token {cut} with everything after it {name}"
            out, lse = attention(call, computed(changed, result))
            found = result.out[:, :, rows], result.lse[:, :, rows]
            trial.agree(f"of {what}", (out[:, :, rows], lse[:, :, rows]), found)
            if grain and cut % grain == 0 and call.starts is None:
                what = f"{what}, at a multiple of the declared grain {grain}"
                trial.same(f"output of {what}", trial.result.out[:, :, rows], found[0])


def _after(call: AttentionCall, cut: int, offset: int, value: float | None) -> AttentionCall:
    """The call with everything from token `cut` on replaced: by `value`, or by other numbers of the same size."""

    def changed(x: Tensor, first: int) -> Tensor:
        x = x.clone()
        x[:, :, first:] = x[:, :, first:].flip(-1) * -1.5 if value is None else value
        return x

    return evolve(call, q=changed(call.q, cut - offset), k=changed(call.k, cut), v=changed(call.v, cut))


def unselected_nan(trial: Trial) -> None:
    """NaN in a key and its value reaches no row that does not select the key; NaN in a query reaches no other row."""
    call, kv_len = trial.call, trial.call.kv_len
    for keys in ([kv_len // 7, kv_len // 2], [kv_len // 3, (3 * kv_len) // 4]):
        k, v = call.k.clone(), call.v.clone()
        k[:, :, keys], v[:, :, keys] = torch.nan, torch.nan
        poisoned = evolve(call, k=k, v=v)
        result = trial.run(poisoned)
        keep = computed(poisoned, result)
        left_out = f"rows that leave out keys {keys[0]} and {keys[1]}, which are NaN"
        _others(trial, result, keep, ~keep[..., keys].any(-1), left_out)
    row = call.q.shape[2] // 2
    q = call.q.clone()
    q[:, :, row] = torch.nan
    poisoned = evolve(call, q=q)
    result = trial.run(poisoned)
    others = torch.ones_like(trial.real)
    others[:, :, row] = False
    _others(trial, result, computed(poisoned, result), others, f"rows other than {row}, which is NaN")


def _others(trial: Trial, result: Result, keep: Tensor, rows: Tensor, what: str) -> None:
    out, lse = attention(trial.call, keep)
    trial.agree(f"of {what}", (out[rows], lse[rows]), (result.out[rows], result.lse[rows]))


def batch_rows_independent(trial: Trial) -> None:
    """A row of a padded batch equals the row alone, whatever the padding holds."""
    call, prompt = trial.call, trial.call.prompt_lengths
    if call.q.shape[0] == 1 and call.starts is None and call.lengths is None:
        raise NotApplicableError("the call has one batch row and no padding")
    real = trial.allowed.any(1)  # keys that some row may see
    poisoned = call
    if call.starts is not None or call.lengths is not None:
        padding, rows = ~_real_keys(call)[:, None, :, None], ~trial.real[..., None]
        poisoned = evolve(
            call,
            q=call.q.masked_fill(rows, torch.nan),
            k=call.k.masked_fill(padding, torch.nan),
            v=call.v.masked_fill(padding, torch.nan),
        )
    together = trial.run(poisoned)
    require(~torch.isnan(together.out), "NaN of the padding is in the output")
    for b in range(call.q.shape[0]):
        if not bool(real[b].any()):
            continue
        rows = torch.nonzero(trial.real[b, 0])[:, 0]
        keys = torch.nonzero(_real_keys(call)[b])[:, 0]
        first, last = int(rows[0]), int(rows[-1]) + 1
        start, behind = int(keys[0]), int(keys[-1]) + 1
        alone = evolve(
            call,
            q=call.q[b : b + 1, :, first:last],
            k=call.k[b : b + 1, :, start:behind],
            v=call.v[b : b + 1, :, start:behind],
            q_offset=trial.offset + first - start,
            starts=None,
            lengths=None,
            prompt_lengths=prompt[b : b + 1] if isinstance(prompt, Tensor) else prompt,
        )
        result = trial.run(alone)
        found = together.out[b, :, first:last], together.lse[b, :, first:last]
        trial.agree(f"of batch row {b} against the row alone", (result.out[0], result.lse[0]), found)


def _real_keys(call: AttentionCall) -> Tensor:
    """bool ``[B, Nkv]``: keys that are not padding."""
    batch, _, kv_len, _ = call.k.shape
    key = torch.arange(kv_len, device=call.k.device).expand(batch, -1)
    start = torch.zeros_like(key) if call.starts is None else call.starts[:, None]
    behind = start + kv_len if call.lengths is None else start + call.lengths[:, None]
    return (key >= start) & (key < behind)


def chunk_invariant(trial: Trial) -> None:
    """Cutting the prompt at multiples of the pipeline's grain changes nothing.

    Chunks share one Memory, and say how long the prompt is.
    """
    call, grain = trial.call, trial.pipeline.grain
    if grain is None:
        raise NotApplicableError("the pipeline declares no grain: its estimate looks at the call as a whole")
    if call.starts is not None or call.lengths is not None:
        raise NotApplicableError("rows of a padded batch have their own grids")
    offset, end = trial.offset, trial.offset + call.q.shape[2]
    inside = [cut for cut in range(grain, end, grain) if cut > offset]
    if not inside:
        raise NotApplicableError(f"no multiple of the grain {grain} lies inside the call")
    every = inside[:: max(1, len(inside) // 5)]
    for cuts in ([inside[len(inside) // 2]], every):
        what = f"in chunks cut at {cuts} (grain {grain}) against the prompt at once"
        trial.agree(what, (trial.result.out, trial.result.lse), _in_chunks(trial, [offset, *cuts, end]))


def _in_chunks(trial: Trial, bounds: list[int]) -> tuple[Tensor, Tensor]:
    call, memory, results = trial.call, Memory(), []
    prompt = bounds[-1] if call.prompt_lengths is None else call.prompt_lengths
    for first, last in pairwise(bounds):
        rows = slice(first - trial.offset, last - trial.offset)
        k, v = call.k[:, :, :last], call.v[:, :, :last]
        part = evolve(call, q=call.q[:, :, rows], k=k, v=v, q_offset=first, prompt_lengths=prompt)
        results.append(trial.pipeline.run(part, memory))
    return torch.cat([part.out for part in results], 2), torch.cat([part.lse for part in results], 2)


def parts_equal_the_whole(trial: Trial) -> None:
    """A call cut by heads, at the declared `head_scope`, gives what the whole gives: two layers of one request."""
    pipeline = trial.pipeline
    cut = evolve(pipeline, workspace=1)
    heads = len({part.heads for part in parts(cut, trial.call, 1)})
    if heads == 1:
        scope = pipeline.head_scope
        if scope is None:
            raise NotApplicableError("the pipeline declares no head_scope: a stage looks at all heads together")
        raise NotApplicableError(f"the call has a single {scope} of query heads")
    memories = Memory(), Memory()
    for layer in range(2):
        call = evolve(trial.call, layer=trial.call.layer + layer)
        whole, result = evolve(pipeline, workspace=None).run(call, memories[0]), cut.run(call, memories[1])
        what = f"of layer {call.layer} in {heads} parts by heads (head_scope {pipeline.head_scope}) against the whole"
        trial.agree(what, (whole.out, whole.lse), (result.out, result.lse))
