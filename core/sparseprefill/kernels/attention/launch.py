"""Launchers of the attention kernels: tensors in, tensors out; strides, flags and grids are worked out here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from attrs import evolve
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.attention.arguments import (
    Arguments,
    Cache,
    Lists,
    Logits,
    Mask,
    Matrix,
    Outputs,
    Queries,
    Sizes,
    State,
    flat,
)
from sparseprefill.kernels.attention.kernel import FLAGS, sparse_attention_fwd_kernel, tile_mass_fwd_kernel
from sparseprefill.kernels.attention.together import Together
from sparseprefill.kernels.family.chips import chip
from sparseprefill.kernels.family.choose import choose, launched
from sparseprefill.kernels.family.record import Family, Job, Launched, Wanted
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, Settings, power_of_two, settings
from sparseprefill.kernels.source import Source, aligned, strides
from sparseprefill.kernels.steps import LOG2E
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Kernel, Skipped, SoftmaxState

REPAIRERS = 256
"""Most programs that look for blocks to repair."""
EXACTLY = Wanted()
"""The call's precision, and nothing else."""


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the kernels were imported)."""
    return not isinstance(sparse_attention_fwd_kernel, triton.runtime.jit.JITFunction)


def shares(call: AttentionCall, mask: SparseMask, known: tuple[Family, ...]) -> bool:
    """True if the kernel that serves the call may serve other requests in the same launch: it reads pages where they
    stand. known: the kernels that may serve."""
    choice = choose(call, mask, EXACTLY, known)
    return choice.family.features.requests and choice.call.pages is call.pages


def sparse_attention_fwd(
    call: AttentionCall,
    mask: SparseMask,
    known: tuple[Family, ...],
    carry: SoftmaxState | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    below: Tensor | None = None,
    reduced: Wanted = EXACTLY,
) -> tuple[Tensor, Tensor, Kernel, Skipped | None, Tensor | None]:
    """Attention over the mask, resumed from `carry`: out ``[B, Hq, Nq, Dv]`` as q, LSE ``[B, Hq, Nq]`` float32, which
    kernel computed them, what it left out, and the heads' errors where it worked in a reduced precision.

    known: the kernels that may serve. into: tensors for out and lse, whose rows are contiguous, in place of fresh ones.
    below: `Plan.skip_below`. reduced: the precision that is wanted, and its bound.
    """
    if into is None:
        # Laid out as q is, which spares a host that keeps heads beside tokens a copy.
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        into = empty_output(call), lse
    return *into, *_launch(call, mask, known, carry, *into, None, below, reduced=reduced)


def empty_output(call: AttentionCall) -> Tensor:
    """``[B, Hq, Nq, Dv]``, laid out as q is; of values of another size, heads beside tokens."""
    batch, heads, rows, width = call.q.shape
    if call.value_dim == width:
        return torch.empty_like(call.q)
    return call.q.new_empty(batch, rows, heads, call.value_dim).transpose(1, 2)


def sparse_attention_together(
    calls: Sequence[AttentionCall],
    masks: Sequence[SparseMask],
    known: tuple[Family, ...],
    reduced: Wanted = EXACTLY,
    outs: Sequence[Tensor] = (),
) -> tuple[list[tuple[Tensor, Tensor]], Kernel]:
    """Out and LSE of several requests, as `sparse_attention_fwd` of each, from one launch; and which kernel it was.

    calls, masks: those with one `together.key`, of calls that may share a launch (`shares`). known: the kernels that may
    serve. outs: tensors for the outputs, `alike`, in place of a new one.
    """
    requests = Together.of(calls, masks, outs)
    kernel, *_ = _launch(calls[0], masks[0], known, None, requests.out, requests.lse, None, None, requests, reduced)
    return requests.results(), kernel


def sparse_attention_state(
    call: AttentionCall,
    mask: SparseMask,
    known: tuple[Family, ...],
    carry: SoftmaxState | None = None,
    below: Tensor | None = None,
) -> State:
    """Attention left unnormalised: m, l and acc of a `SoftmaxState`, float32. known: the kernels that may serve."""
    shape = call.q.shape[:3]
    options: dict[str, Any] = {"dtype": torch.float32, "device": call.q.device}
    acc = torch.empty(*shape, call.value_dim, **options)
    state = State(torch.empty(shape, **options), torch.empty(shape, **options), acc)
    _launch(call, mask, known, carry, None, None, state, below)
    return state


def _launch(
    call: AttentionCall,
    mask: SparseMask,
    known: tuple[Family, ...],
    carry: SoftmaxState | None,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
    below: Tensor | None,
    requests: Together | None = None,
    reduced: Wanted = EXACTLY,
) -> tuple[Kernel, Skipped | None, Tensor | None]:
    """Fill out and lse, or the state; which kernel did, what it left out where there are thresholds for that, and the
    errors ``[B, Hq]`` of a reduced precision. requests: instead of the call's own rows; call and mask are then the
    first's, and say what holds for all.

    Two launches: the second repeats, with care for NaN and infinities of V in keys that a row may not see, only those
    query blocks in which the first met a NaN. Those vote once more, as blocks of the portable kernel.
    """
    wanted = reduced.of(below is not None, carry is not None, state is not None, requests is not None)
    made = None
    while made is None:
        choice = choose(call, mask, wanted, known)
        given = _arguments(choice.call, mask, carry, out, lse, state, below, requests)
        job = Job(call=choice.call, mask=mask, wanted=choice.wanted, arguments=given, requests=requests)
        made = launched(choice, job)
    if not made.repaired:
        chosen = _settings(job.call, mask)
        nonfinite = _flags(job, chosen) if made.nonfinite is None else made.nonfinite
        _repair(*_ready(job, nonfinite, chosen), given.flags)
    counted, voting = given.outputs.skipped, made.voting
    skipped = None if counted is None or voting is None else Skipped(counted.sum(-1), *voting)
    return Kernel(choice.family.name, choice.reason), skipped, made.errors


def _arguments(
    call: AttentionCall,
    mask: SparseMask,
    carry: SoftmaxState | None,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
    below: Tensor | None,
    requests: Together | None,
) -> Arguments:
    """Arguments of a kernel, but for its flags, of which it tells the number."""
    geometry, (batch, heads), chosen = call.geometry, call.q.shape[:2], _settings(call, mask)
    q, rows, table, lists, bitmap = call.q, geometry.tile_rows(mask.tile_q), None, mask.arrays, mask.bitmap
    if requests is not None:
        q, rows, table, batch = requests.q, requests.tile_rows, requests.table, len(requests.masks)
        lists, bitmap = requests.lists[0], requests.bitmaps[0]
    blocks = rows * (mask.tile_q // chosen.block_m)
    # For each query block of the portable kernel, and for each half of one, which may vote by itself.
    counted = None if below is None else torch.zeros(batch, heads, blocks * 2, dtype=torch.int32, device=call.q.device)
    out_strides = (0,) * 5 if out is None or lse is None else (*strides(out), *strides(lse)[:2])
    grid = rows, geometry.tile_rows(mask.group_rows), geometry.tile_columns(mask.tile_k)
    lengths = geometry.starts, geometry.lengths, geometry.q_offset, geometry.q_len, geometry.kv_len
    thresholds = None if below is None else below.contiguous()
    return Arguments(
        Queries(q, *strides(q)),
        _cache(Source.of(call)),
        Mask(Lists(*lists[:3]), Lists(*lists[3:]), bitmap, *grid),
        _state(carry),
        Outputs(out, lse, _state(state), None, call.sinks, counted, *out_strides),
        Sizes(*lengths, heads, call.group, table),
        Logits(call.softmax_scale * LOG2E.value, call.softcap, call.geometry.window, thresholds),
        batch * heads * blocks,
    )


def forward(job: Job) -> Launched:
    """The portable kernel over all query blocks, and once more over those that it flags; see `attention.record`."""
    chosen, lines = _settings(job.call, job.mask), _lines(job)
    blocks = _blocks_of(job, chosen)
    # Requests with fewer blocks than the longest leave flags unwritten.
    make = torch.empty if job.requests is None else torch.zeros
    nonfinite = make(job.arguments.flags, dtype=torch.int8, device=job.call.q.device)
    arguments, options = _ready(_described(job, chosen), nonfinite, chosen)
    enqueue(sparse_attention_fwd_kernel, (blocks, lines), *arguments, **options, REPAIR=False)
    _repair(arguments, options, job.arguments.flags)
    voting = (chosen.block_m, chosen.block_m, chosen.block_n) if job.wanted.skips else None
    return Launched(repaired=True, voting=voting)


def _repair(arguments: tuple[Any, ...], options: dict[str, Any], flags: int) -> None:
    """The portable kernel over the query blocks that are flagged. flags: query blocks of all heads."""
    programs = min(-(-flags // FLAGS.value), REPAIRERS)
    enqueue(sparse_attention_fwd_kernel, (programs,), *arguments, **options, REPAIR=True)


def _ready(job: Job, nonfinite: Tensor, chosen: Settings) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants of the portable kernel."""
    given, call, mask = job.arguments, job.call, job.mask
    given = given._replace(outputs=given.outputs._replace(nonfinite=nonfinite))
    options: dict[str, Any] = {
        "TILE_Q": mask.tile_q, "TILE_K": mask.tile_k, "GROUP": mask.group, "WIDTH": mask.stripe_width,
        **_blocks(chosen, call.q.shape[-1], 0 if call.pages is None else call.pages.page), **chosen.options,
        "V": call.value_dim, "BLOCK_V": power_of_two(call.value_dim),
    }  # fmt: skip
    return flat(given), options


def _flags(job: Job, chosen: Settings) -> Tensor:
    """Flags of a kernel that has none: all query blocks of a head whose output is not finite somewhere."""
    outputs = job.arguments.outputs
    found: Tensor = outputs.state.acc if outputs.out is None else outputs.out
    heads = found.isfinite().all(-1).all(-1).logical_not().to(torch.int8)  # [B, Hq]; of requests [1, Hq]
    lines = heads.expand(_lines(job) // heads.shape[1], -1)
    return lines[..., None].expand(*lines.shape, _blocks_of(job, chosen)).flatten()


def _blocks_of(job: Job, chosen: Settings) -> int:
    """Query blocks of the portable kernel in one head."""
    rows: int = job.arguments.mask.tile_rows
    return rows * (job.mask.tile_q // chosen.block_m)


def _lines(job: Job) -> int:
    """Heads of all batch rows, or of all requests."""
    batch = job.call.q.shape[0] if job.requests is None else len(job.requests.masks)
    return batch * job.call.q.shape[1]


def tile_mass_fwd(call: AttentionCall, mask: SparseMask, lse: Tensor, probe: Tensor) -> Tensor:
    """float32 ``[B, Hq, R, C]``: attention mass of the mask's tiles, averaged over their real rows.

    lse: float32 ``[B, Hq, Nq]`` of the whole attention. probe: bool ``[B, Hq]``, heads that are asked for; zero for the
    others.
    """
    geometry, (batch, heads), tiles = call.geometry, call.q.shape[:2], mask.tiles
    chosen = _settings(call, mask)
    rows, columns = geometry.tile_rows(mask.tile_q), geometry.tile_columns(mask.tile_k)
    mass = torch.zeros(batch, heads, rows, columns, dtype=torch.float32, device=call.q.device)
    if tiles is None:
        return mass
    source = Source.of(call)
    enqueue(tile_mass_fwd_kernel, (rows, batch * heads),
        call.q, source.k, source.table, source.k_scale, lse.contiguous(), probe.contiguous(), mass,
        geometry.starts, geometry.lengths, *tiles.arrays, *strides(call.q), *strides(source.k, source.page),
        call.softmax_scale * LOG2E.value, call.softcap, call.geometry.window, geometry.q_offset, geometry.q_len, geometry.kv_len,
        rows, columns, heads, call.group,
        TILE_Q=mask.tile_q, TILE_K=mask.tile_k, **_blocks(chosen, call.q.shape[-1], source.page),
        num_warps=chosen.warps, num_stages=chosen.stages, **FUSED,
    )  # fmt: skip
    return mass


def _settings(call: AttentionCall, mask: SparseMask) -> Settings:
    """Launch settings for this call's device, head dimensions and dtype."""
    width, size = power_of_two(max(call.q.shape[-1], call.value_dim)), call.q.element_size()
    return settings(chip(call.q.device), width, size, mask.tile_q, mask.tile_k)


def _blocks(chosen: Settings, width: int, page: int) -> dict[str, Any]:
    """Constants that both kernels are compiled for."""
    return {
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "D": width,
        "BLOCK_D": power_of_two(width),
        "PAGE": page,
        "PRECISION": "ieee",
    }


def _state(state: SoftmaxState | State | None) -> State:
    return State(None, None, None) if state is None else State(*(x.contiguous() for x in (state.m, state.l, state.acc)))


def _cache(source: Source) -> Cache:
    """K and V, read by pointers: so does the repair behind other kernels, which is launched for every call and seldom
    has anything to do, while each descriptor takes the host several microseconds."""
    page = source.page
    k = Matrix(source.k, None, source.k_scale, *strides(source.k, page))
    return Cache(k, Matrix(source.v, None, source.v_scale, *strides(source.v, page)), source.table)


def _described(job: Job, chosen: Settings) -> Job:
    """The launch with descriptors of K and V, where the copy engine can bring them."""
    if not _tma(Source.of(job.call), chosen):
        return job
    given, call = job.arguments, job.call

    def matrix(x: Matrix, width: int) -> Matrix:
        block = [1, 1, chosen.block_n, power_of_two(width)]
        return x._replace(desc=TensorDescriptor.from_tensor(x.ptr, block))

    k, v = matrix(given.cache.k, call.q.shape[-1]), matrix(given.cache.v, call.value_dim)
    return evolve(job, arguments=given._replace(cache=given.cache._replace(k=k, v=v)))


def _tma(source: Source, chosen: Settings) -> bool:
    """Tensor descriptors need 16-byte aligned rows; pages are read by pointers."""
    return chosen.tma and not source.page and aligned(source.k) and aligned(source.v)
