"""Laws over two runs: what a change of the input, of the batch or of the chunks may do to the result."""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import evolve
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.memory import Memory
from sparseprefill.parts.split import parts
from sparseprefill.testing.trial import NotApplicableError, Trial, require
from sparseprefill.testing.truth import attention
from sparseprefill.testing.votes import computed


def causal(trial: Trial) -> None:
    """Rows before a cut do not feel what comes after it: other numbers and NaN in queries, keys and values.

    An estimator may look at the whole call and choose other keys, so rows are compared with the softmax over the mask
    that the changed run reports, taken of the unchanged tensors. A pipeline with a grain must, at its multiples, give
    the very same rows.
    """
    call, grain = trial.call, trial.pipeline.grain
    end = trial.offset + call.q.shape[2]
    middle = trial.offset + call.q.shape[2] // 2
    cuts = {middle, end - 1, end} | ({end - 1 - (end - 1) % grain} if grain else set())
    cuts = {cut for cut in cuts if trial.offset < cut < call.kv_len}
    if not cuts:
        raise NotApplicableError("no row of the call has a future key")
    for cut in sorted(cuts):
        rows = slice(0, cut - trial.offset)
        for name, value in (("changed", None), ("NaN", torch.nan)):
            changed = _after(call, cut, trial.offset, value)
            result = trial.run(changed)
            what = f"rows before token {cut} with everything after it {name}"
            out, lse = attention(call, computed(changed, result))
            trial.same(f"output of {what}", out[:, :, rows], result.out[:, :, rows])
            trial.same(f"LSE of {what}", lse[:, :, rows], result.lse[:, :, rows])
            if grain and cut % grain == 0 and call.starts is None:
                what = f"{what}, at a multiple of the declared grain {grain}"
                trial.same(f"output of {what}", trial.result.out[:, :, rows], result.out[:, :, rows])


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
    for key in sorted({kv_len // 7, kv_len // 3, kv_len // 2, (3 * kv_len) // 4}):
        k, v = call.k.clone(), call.v.clone()
        k[:, :, key], v[:, :, key] = torch.nan, torch.nan
        poisoned = evolve(call, k=k, v=v)
        result = trial.run(poisoned)
        keep = computed(poisoned, result)
        _others(trial, result.out, result.lse, keep, ~keep[..., key], f"rows that leave out key {key}, which is NaN")
    row = call.q.shape[2] // 2
    q = call.q.clone()
    q[:, :, row] = torch.nan
    poisoned = evolve(call, q=q)
    result = trial.run(poisoned)
    others = torch.ones_like(trial.real)
    others[:, :, row] = False
    _others(trial, result.out, result.lse, computed(poisoned, result), others, f"rows other than {row}, which is NaN")


def _others(trial: Trial, out: Tensor, lse: Tensor, keep: Tensor, rows: Tensor, what: str) -> None:
    wanted_out, wanted_lse = attention(trial.call, keep)
    trial.same(f"output of {what}", wanted_out[rows], out[rows])
    trial.same(f"LSE of {what}", wanted_lse[rows], lse[rows])


def batch_rows_independent(trial: Trial) -> None:
    """A row of a padded batch equals the row alone, whatever the padding holds."""
    call, prompt = trial.call, trial.call.prompt_lengths
    if call.q.shape[0] == 1 and call.starts is None and call.lengths is None:
        raise NotApplicableError("the call has one batch row and no padding")
    real = torch.stack([trial.allowed[b].any(0) for b in range(call.q.shape[0])])  # keys that some row may see
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
        what = f"of batch row {b} against the row alone"
        trial.same(f"output {what}", result.out[0], together.out[b, :, first:last])
        trial.same(f"LSE {what}", result.lse[0], together.lse[b, :, first:last])


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
        out, lse = _in_chunks(trial, [offset, *cuts, end])
        what = f"in chunks cut at {cuts} (grain {grain}) against the prompt at once"
        trial.same(f"output {what}", trial.result.out, out)
        trial.same(f"LSE {what}", trial.result.lse, lse)


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
        trial.same(f"output {what}", whole.out, result.out)
        trial.same(f"LSE {what}", whole.lse, result.lse)
