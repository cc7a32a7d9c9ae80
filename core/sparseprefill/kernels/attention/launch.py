"""Launchers of the attention kernels: tensors in, tensors out; strides, flags and grids are worked out here."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

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
from sparseprefill.kernels.settings import FUSED, HOPPER, Settings, capability, power_of_two, settings, unlike_hopper
from sparseprefill.kernels.source import Source, aligned, strides
from sparseprefill.kernels.steps import LOG2E
from sparseprefill.plan import Kernel, Skipped

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.plan import SoftmaxState


FAILED: dict[Hashable, Exception] = {}
"""Variants of the Hopper kernel that do not compile or launch here, with the reason; empty while all of them work."""
REPAIRERS = 256
"""Most programs that look for blocks to repair."""


@frozen(eq=False)
class Choice:
    """Which kernel serves a call, decided once.

    call: the call to read from; its K and V are copied out of their pages where the Hopper kernel serves the copy, but
    not the pages. hopper: the module of the Hopper kernel, or None where the portable kernel serves. reason: what the
    Hopper kernel has against the call or the GPU, or that this variant of it fails here; None where it serves, and in
    the interpreter.
    """

    call: AttentionCall
    hopper: Any = None
    reason: str | None = None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the kernels were imported)."""
    return not isinstance(sparse_attention_fwd_kernel, triton.runtime.jit.JITFunction)


def choose(call: AttentionCall, mask: SparseMask, *, skips: bool = False, together: bool = False) -> Choice:
    """The kernel for the call, and what it reads. skips: whether it shall leave out steps (`Plan.skip_below`).
    together: whether the launch is one of several requests.

    Pages that the Hopper kernel does not read, or reads more slowly than a copy, are copied for it if they may be.
    `Pages.gathered` tells of it.
    """
    hopper = hopper_of(call)
    if hopper is None:
        return Choice(call, reason=_failure("at all") or unlike_hopper(call.q.device) or None)
    if (failed := _failure(variant(call, mask, skips=skips, together=together))) is not None:
        return Choice(call, reason=failed)
    reason = hopper.objection(call, mask, skips=skips)
    if _copied(hopper, call, mask, reason):
        call = evolve(call, k=call.k, v=call.v)
        reason = hopper.objection(call, mask)
    if reason is None:
        return Choice(call, hopper)
    _declined(reason)
    return Choice(call, reason=reason)


def shares(call: AttentionCall, mask: SparseMask) -> bool:
    """Whether the kernel that serves the call may serve other requests in the same launch: it reads pages where they
    stand."""
    hopper = hopper_of(call)
    return hopper is None or not _copied(hopper, call, mask, hopper.objection(call, mask))


def _copied(hopper: Any, call: AttentionCall, mask: SparseMask, reason: str | None) -> bool:
    """Whether the Hopper kernel serves a copy of the pages. reason: what it has against the pages themselves."""
    if call.pages is None or not call.pages.copies or hopper.features(call, mask) is not None:
        return False
    return reason is not None or bool(hopper.better_copied(call, mask))


def hopper_of(call: AttentionCall) -> Any:
    """The module of the Hopper kernel, `kernels.hopper.launch`; None on other devices, or where it has no Gluon."""
    return _hopper() if capability(call.q.device) == HOPPER else None


@cache
def _hopper() -> Any:
    # Gluon is experimental: names come and go with Triton's versions.
    try:
        from sparseprefill.kernels.hopper import launch
    except (ImportError, AttributeError) as error:
        return _fail("at all", error)
    return launch


def variant(call: AttentionCall, mask: SparseMask, *, skips: bool = False, together: bool = False) -> Hashable:
    """What the Hopper kernel is compiled for, but for its carry and state: one that fails says nothing of the others."""
    lists = (mask.has_tiles, mask.stripes is not None, mask.disjoint)
    optional = tuple(x is not None for x in (call.starts, call.lengths, call.sinks))
    page = None if call.pages is None else (call.pages.page, call.pages.k.dtype)
    grid = mask.tile_q, mask.tile_k, mask.group, mask.stripe_width
    made = call.q.dtype, call.q.shape[-1], *grid, lists, optional, page, skips
    return (*made, "several requests") if together else made


@cache
def _declined(reason: str) -> None:
    """Said once for each reason; `info`, since small tiles or a softcap are no fault of anybody."""
    text = "the portable kernel serves calls with %s: the Hopper kernel does not support them"
    logging.getLogger(__name__).info(text, reason)


def _fail(which: Hashable, error: Exception) -> None:
    """From now on the portable kernel serves this variant, which one warning says."""
    FAILED[which] = error
    text = "the Hopper kernel does not work with triton %s for %s; the portable kernel serves instead: %s"
    logging.getLogger(__name__).warning(text, triton.__version__, which, error)


def _failure(which: Hashable) -> str | None:
    """Why a variant of the Hopper kernel does not work here, in one line; None where it was not found to fail."""
    error = FAILED.get(which)
    if error is None:
        return None
    text = (str(error).splitlines() or [""])[0][:200]
    return f"the Hopper kernel does not work here for {which}: {type(error).__name__}: {text}"


def _flags_of(launch: Any, which: Hashable, *arguments: Any) -> Any:
    """What a launch of the Hopper kernel returns, or None where this variant cannot be compiled or launched here."""
    try:
        flags = launch(*arguments)
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError) as error:
        _fail(which, error)
        return None
    return flags


def _unrounded(choice: Choice, mask: SparseMask, resumed: bool, skips: bool, together: bool) -> str:
    """Why a call is not done in 8 bits; empty where it is."""
    if choice.hopper is None:
        return "the portable kernel"
    features = {"a softmax to resume": resumed, "tiles that may be left out": skips, "a shared launch": together}
    for what, there in features.items():
        if there:
            return what
    reason: str | None = choice.hopper.unrounded(choice.call, mask)
    return reason or _failure(("8 bits", variant(choice.call, mask))) or ""


def sparse_attention_fwd(
    call: AttentionCall,
    mask: SparseMask,
    carry: SoftmaxState | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    below: Tensor | None = None,
    bound: float | None = None,
) -> tuple[Tensor, Tensor, Kernel, Skipped | None, Tensor | None]:
    """Attention over the mask, resumed from `carry`: out ``[B, Hq, Nq, D]`` as q, LSE ``[B, Hq, Nq]`` float32, which
    kernel computed them, what it left out, and the heads' errors where it worked in 8 bits.

    into: tensors for out and lse, whose rows are contiguous, in place of fresh ones. below: `Plan.skip_below`. bound:
    the error up to which a head is done in 8 bits; None for none.
    """
    if into is None:
        # Laid out as q is, which spares a host that keeps heads beside tokens a copy.
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        into = torch.empty_like(call.q), lse
    return *into, *_launch(call, mask, carry, *into, None, below, bound=bound)


def sparse_attention_together(
    calls: Sequence[AttentionCall], masks: Sequence[SparseMask], bound: float | None = None
) -> tuple[list[tuple[Tensor, Tensor]], Kernel]:
    """Out and LSE of several requests, as `sparse_attention_fwd` of each, from one launch; and which kernel it was.

    calls, masks: those with one `together.key`, of calls that may share a launch (`shares`).
    """
    requests = Together.of(calls, masks)
    kernel, *_ = _launch(calls[0], masks[0], None, requests.out, requests.lse, None, None, requests, bound)
    return requests.results(), kernel


def sparse_attention_state(
    call: AttentionCall, mask: SparseMask, carry: SoftmaxState | None = None, below: Tensor | None = None
) -> State:
    """Attention left unnormalised: m, l and acc of a `SoftmaxState`, float32."""
    shape = call.q.shape[:3]
    options: dict[str, Any] = {"dtype": torch.float32, "device": call.q.device}
    acc = torch.empty(*shape, call.value_dim, **options)
    state = State(torch.empty(shape, **options), torch.empty(shape, **options), acc)
    _launch(call, mask, carry, None, None, state, below)
    return state


def _launch(
    call: AttentionCall,
    mask: SparseMask,
    carry: SoftmaxState | None,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
    below: Tensor | None,
    requests: Together | None = None,
    bound: float | None = None,
) -> tuple[Kernel, Skipped | None, Tensor | None]:
    """Fill out and lse, or the state; which kernel did, what it left out where there are thresholds for that, and the
    errors ``[B, Hq]`` of what it did in 8 bits. requests: instead of the call's own rows; call and mask are then the
    first's, and say what holds for all.

    Two launches: the second repeats, with care for NaN and infinities of V in keys that a row may not see, only those
    query blocks in which the first met a NaN. Those vote once more, as blocks of the portable kernel.
    """
    geometry, (batch, heads), together = call.geometry, call.q.shape[:2], requests is not None
    chosen, choice = _settings(call, mask), choose(call, mask, skips=below is not None, together=together)
    call = choice.call
    source, width = Source.of(call), call.value_dim
    if requests is None:
        q, rows, table = call.q, geometry.tile_rows(mask.tile_q), None
        lists, bitmap = mask.arrays, mask.bitmap
    else:
        q, rows, table, batch = requests.q, requests.tile_rows, requests.table, len(requests.masks)
        lists, bitmap = requests.lists[0], requests.bitmaps[0]
    blocks = rows * (mask.tile_q // chosen.block_m)
    # For each query block, and in the Hopper kernel for each half of one, which votes by itself.
    counted = None if below is None else torch.zeros(batch, heads, blocks * 2, dtype=torch.int32, device=call.q.device)
    out_strides = (0,) * 5 if out is None or lse is None else (*strides(out), *strides(lse)[:2])
    grid = rows, geometry.tile_rows(mask.group_rows), geometry.tile_columns(mask.tile_k)
    lengths = geometry.starts, geometry.lengths, geometry.q_offset, geometry.q_len, geometry.kv_len
    thresholds = None if below is None else below.contiguous()
    given = Arguments(
        Queries(q, *strides(q)),
        _cache(source, chosen, width),
        Mask(Lists(*lists[:3]), Lists(*lists[3:]), bitmap, *grid),
        _state(carry),
        Outputs(out, lse, _state(state), None, call.sinks, counted, *out_strides),
        Sizes(*lengths, heads, call.group, table),
        Logits(call.softmax_scale * LOG2E.value, call.softcap, call.geometry.window, thresholds),
        None,  # told below, like `Outputs.nonfinite`: the Hopper kernel may have other blocks
    )
    voting = (chosen.block_m, chosen.block_m, chosen.block_n)
    alone = "" if bound is None else "the call's precision, for 8 bits need a Hopper GPU"
    nonfinite, served, errors = None, Kernel("portable", choice.reason or alone), None
    rounded = None if bound is None else _unrounded(choice, mask, carry is not None, below is not None, together)
    if rounded == "":
        which: Hashable = ("8 bits", variant(call, mask))
        made = _flags_of(choice.hopper.launch_eight, which, call, mask, given, bound)
        nonfinite, errors = (None, None) if made is None else made
        served, rounded = Kernel("hopper, 8 bits"), _failure(which)
    if nonfinite is None and choice.hopper is not None:
        which = variant(call, mask, skips=below is not None, together=together)
        nonfinite = _flags_of(choice.hopper.launch, which, call, mask, given, requests)
        if nonfinite is not None and below is not None:
            voting = choice.hopper.voting(mask, width)
        why = f"16 bits, for {rounded}" if rounded else ""
        served = Kernel("hopper", why) if nonfinite is not None else Kernel("portable", _failure(which) or "")
    forward = nonfinite is None
    if nonfinite is None:
        # Requests with fewer blocks than the longest leave flags unwritten.
        made = torch.empty if requests is None else torch.zeros
        nonfinite = made(batch * heads * blocks, dtype=torch.int8, device=q.device)
    given = given._replace(outputs=given.outputs._replace(nonfinite=nonfinite), flags=nonfinite.numel())
    options: dict[str, Any] = {
        "TILE_Q": mask.tile_q, "TILE_K": mask.tile_k, "GROUP": mask.group, "WIDTH": mask.stripe_width,
        **_blocks(chosen, width, source.page), **chosen.options,
    }  # fmt: skip
    arguments = flat(given)
    if forward:
        sparse_attention_fwd_kernel[(blocks, batch * heads)](*arguments, **options, REPAIR=False)
    programs = min(-(-nonfinite.numel() // FLAGS.value), REPAIRERS)
    sparse_attention_fwd_kernel[(programs,)](*arguments, **options, REPAIR=True)
    return served, None if counted is None else Skipped(counted.sum(-1), *voting), errors


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
    tile_mass_fwd_kernel[(rows, batch * heads)](
        call.q, source.k, source.table, source.k_scale, lse.contiguous(), probe.contiguous(), mass,
        geometry.starts, geometry.lengths, *tiles.arrays, *strides(call.q), *strides(source.k, source.page),
        call.softmax_scale * LOG2E.value, call.softcap, call.geometry.window, geometry.q_offset, geometry.q_len, geometry.kv_len,
        rows, columns, heads, call.group,
        TILE_Q=mask.tile_q, TILE_K=mask.tile_k, **_blocks(chosen, call.q.shape[-1], source.page),
        num_warps=chosen.warps, num_stages=chosen.stages, **FUSED,
    )  # fmt: skip
    return mass


def _settings(call: AttentionCall, mask: SparseMask) -> Settings:
    """Launch settings for this call's device, head dimension and dtype."""
    return settings(
        capability(call.q.device), power_of_two(call.q.shape[-1]), call.q.element_size(), mask.tile_q, mask.tile_k
    )


def _blocks(chosen: Settings, width: int, page: int) -> dict[str, Any]:
    """What both kernels have to know when they are compiled."""
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


def _cache(source: Source, chosen: Settings, width: int) -> Cache:
    tma, block = _tma(source, chosen), [1, 1, chosen.block_n, power_of_two(width)]

    def matrix(x: Tensor, scale: Tensor | None) -> Matrix:
        return Matrix(x, TensorDescriptor.from_tensor(x, block) if tma else None, scale, *strides(x, source.page))

    return Cache(matrix(source.k, source.k_scale), matrix(source.v, source.v_scale), source.table)


def _tma(source: Source, chosen: Settings) -> bool:
    """Tensor descriptors need 16-byte aligned rows; pages are read by pointers."""
    return chosen.tma and not source.page and aligned(source.k) and aligned(source.v)
