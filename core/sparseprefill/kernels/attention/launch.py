"""Launchers of the attention kernels: tensors in, strides, flags and grids worked out here."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseprefill.kernels.attention.kernel import sparse_attention_fwd_kernel, sparse_attention_repair_kernel
from sparseprefill.kernels.attention.tile_mass import tile_mass_fwd_kernel
from sparseprefill.kernels.settings import Settings, settings
from sparseprefill.kernels.source import Source
from sparseprefill.kernels.source import strides as _strides
from sparseprefill.kernels.steps import LOG2E
from sparseprefill.softmax import SoftmaxState

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.plan import Plan


FAILED: list[Exception] = []
"""Why the special kernel is not used any more; empty while it works."""


@frozen(eq=False)
class Outputs:
    """Fresh tensors that one launch fills: either out and lse, or a state."""

    out: Tensor | None = None
    lse: Tensor | None = None
    state: SoftmaxState | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Batch, head and row strides of out, batch and head strides of lse; zeros where a state is filled."""
        if self.out is None or self.lse is None:
            return (0,) * 5
        return (*_strides(self.out), *_strides(self.lse)[:2])


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the kernels were imported)."""
    return not isinstance(sparse_attention_fwd_kernel, triton.runtime.jit.JITFunction)


def choose(call: AttentionCall, tile_q: int, tile_k: int) -> Settings:
    """Launch settings for this call's device, head dimension and dtype."""
    capability = torch.cuda.get_device_capability(call.q.device) if call.q.is_cuda else (0, 0)
    return settings(capability, triton.next_power_of_2(call.q.shape[-1]), call.q.element_size(), tile_q, tile_k)


def specialised(call: AttentionCall, mask: SparseMask) -> Any:
    """The module with a faster kernel for this call and device (`kernels.hopper.launch`), or None."""
    module = _special_of(call)
    if module is None:
        return None
    reason = module.objection(call, mask)
    if reason is None:
        return module
    _declined(reason)
    return None


@cache
def _declined(reason: str) -> None:
    """Said once for each reason; `info`, since small tiles or a softcap are no fault of anybody."""
    text = "the portable kernel serves calls with %s, which the Hopper kernel does not"
    logging.getLogger(__name__).info(text, reason)


def _special_of(call: AttentionCall) -> Any:
    """The module for the call's device, or None."""
    if not call.q.is_cuda or torch.cuda.get_device_capability(call.q.device) != (9, 0):
        return None
    return None if FAILED else _hopper()


def readable(call: AttentionCall, mask: SparseMask) -> AttentionCall:
    """The call; with K and V copied out of their pages where the faster kernel serves a copy, but not the pages.

    The copy costs less than what it wins. `Pages.gathered` tells of it.
    """
    if call.pages is None or specialised(call, mask) is not None:
        return call
    module = _special_of(call)
    if module is None or module.features(call, mask) is not None:
        return call
    return evolve(call, k=call.k, v=call.v)


@cache
def _hopper() -> Any:
    # Gluon is experimental: names come and go with Triton's versions.
    try:
        from sparseprefill.kernels.hopper import launch
    except (ImportError, AttributeError) as error:
        return _fail(error)
    return launch


def _fail(error: Exception) -> None:
    """From now on the portable kernel serves, which one warning says."""
    FAILED.append(error)
    text = "the Hopper kernel does not work with triton %s; the portable kernel serves instead: %s"
    logging.getLogger(__name__).warning(text, triton.__version__, error)


def _flags_of(special: Any, *arguments: Any) -> Tensor | None:
    """What the special kernel flags, or None where it cannot be compiled or launched here."""
    try:
        flags: Tensor = special.launch(*arguments)
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError) as error:
        _fail(error)
        return None
    return flags


def sparse_attention_fwd(
    call: AttentionCall, plan: Plan, *, state: bool, into: tuple[Tensor, Tensor] | None = None
) -> Outputs:
    """Run the kernel over the plan's mask, from its carry: out and lse, or (state=True) the unnormalised state.

    into: tensors for out and lse, whose rows are contiguous, in place of fresh ones.
    Two launches: the second repeats, with care for NaN and infinities of V in keys that a row may not see, only those
    query blocks in which the first met a NaN.
    """
    mask, geometry = plan.mask, call.geometry
    chosen = choose(call, mask.tile_q, mask.tile_k)
    call = readable(call, mask)
    source = Source.of(call)
    shape, width = call.q.shape[:3], call.value_dim
    options = {"dtype": torch.float32, "device": call.q.device}
    filled = _outputs(call, state, options) if into is None else Outputs(*into)
    rows = geometry.tile_rows(mask.tile_q)
    blocks = rows * (mask.tile_q // chosen.block_m)
    dedupe = mask.tiles is not None and mask.stripes is not None and not mask.disjoint
    carry = None if plan.carry is None else plan.carry.state
    lists = (*_lists(mask.tiles or mask.stripes), *_lists(mask.stripes or mask.tiles))
    overlap = mask.tile_map().contiguous().view(torch.uint8) if dedupe else None
    special = specialised(call, mask)
    none = (None, None, None)
    given = (*(none if mask.tiles is None else lists[:3]), *(none if mask.stripes is None else lists[3:]))
    fill = (filled.out, filled.lse, filled.state)
    flagged = None if special is None else _flags_of(special, call, mask, given, overlap, carry, *fill)
    odd = (
        torch.empty(shape[0] * shape[1] * blocks, dtype=torch.int8, device=call.q.device)
        if flagged is None
        else flagged
    )
    arguments = (
        call.q, source.k, source.v, *_descriptors(source, chosen, width), *source.extra,
        geometry.starts, geometry.lengths, call.sinks,
        *lists, overlap,
        *_state(carry),
        filled.out, filled.lse, *_state(filled.state), odd,
        *_strides(call.q), *source.strides(source.k), *source.strides(source.v), *filled.strides,
        call.softmax_scale * LOG2E.value, call.softcap or 0.0, geometry.q_offset, geometry.q_len, geometry.kv_len,
        rows, geometry.tile_rows(mask.group_rows), geometry.tile_columns(mask.tile_k), call.window or 0, shape[1], call.group,
    )  # fmt: skip
    flags: dict[str, Any] = {
        "TILE_Q": mask.tile_q, "TILE_K": mask.tile_k, "GROUP": mask.group,
        "HAS_TILES": mask.tiles is not None, "HAS_STRIPES": mask.stripes is not None, "DEDUPE": dedupe,
        "HAS_CARRY": carry is not None, "STORE_STATE": state, "HAS_SINKS": call.sinks is not None,
        "TMA": _tma(source, chosen), **_common(call, chosen, width, source.page),
    }  # fmt: skip
    launch: dict[str, Any] = {"num_warps": chosen.warps, "num_stages": chosen.stages, **chosen.registers}
    if flagged is None:
        sparse_attention_fwd_kernel[(blocks, shape[0] * shape[1])](*arguments, **flags, **launch)
    programs = min(triton.cdiv(odd.numel(), 128), 256)
    sparse_attention_repair_kernel[(programs,)](odd.numel(), *arguments, **flags, **launch)
    return filled


def tile_mass_fwd(call: AttentionCall, plan: Plan, lse: Tensor) -> Tensor:
    """float32 ``[B, Hq, R, C]``: `Result.probe` of the plan's probed heads."""
    mask, geometry = plan.mask, call.geometry
    chosen = choose(call, mask.tile_q, mask.tile_k)
    rows, columns = geometry.tile_rows(mask.tile_q), geometry.tile_columns(mask.tile_k)
    batch, heads = call.q.shape[:2]
    mass = torch.zeros(batch, heads, rows, columns, dtype=torch.float32, device=call.q.device)
    if mask.tiles is None or plan.probe is None:
        return mass
    source = Source.of(call)
    tile_mass_fwd_kernel[(rows, batch * heads)](
        call.q, source.k, source.table, source.k_scale, lse.contiguous(), plan.probe.contiguous(), mass,
        geometry.starts, geometry.lengths, *_lists(mask.tiles), *_strides(call.q), *source.strides(source.k),
        call.softmax_scale * LOG2E.value, call.softcap or 0.0, geometry.q_offset, geometry.q_len, geometry.kv_len,
        rows, columns, call.window or 0, heads, call.group,
        TILE_Q=mask.tile_q, TILE_K=mask.tile_k, **_common(call, chosen, call.q.shape[-1], source.page),
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return mass


def _common(call: AttentionCall, chosen: Settings, width: int, page: int) -> dict[str, Any]:
    return {
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "D": width,
        "BLOCK_D": triton.next_power_of_2(width),
        "HAS_STARTS": call.starts is not None,
        "HAS_LENGTHS": call.lengths is not None,
        "WINDOW": call.window is not None,
        "SOFTCAP": call.softcap is not None,
        "PAGE": page,
        "PRECISION": "ieee",
    }


def _outputs(call: AttentionCall, state: bool, options: dict[str, Any]) -> Outputs:
    shape, width = tuple(call.q.shape[:3]), call.value_dim
    if state:
        acc = torch.empty(*shape, width, **options)
        return Outputs(state=SoftmaxState(torch.empty(shape, **options), torch.empty(shape, **options), acc))
    # Laid out as q is, which spares a host that keeps heads beside tokens a copy.
    return Outputs(torch.empty_like(call.q), torch.empty(shape, **options))


def _state(state: SoftmaxState | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if state is None else tuple(x.contiguous() for x in (state.m, state.l, state.acc))


def _lists(lists: Any) -> tuple[Tensor, Tensor, Tensor]:
    return lists.counts.contiguous(), lists.offsets.contiguous(), lists.indices


def _tma(source: Source, chosen: Settings) -> bool:
    """Tensor descriptors need 16-byte aligned rows; pages are read by pointers."""
    size, tensors = source.k.element_size(), (source.k, source.v)
    aligned = all(x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:3]) for x in tensors)
    return chosen.tma and not source.page and aligned


def _descriptors(source: Source, chosen: Settings, width: int) -> tuple[Any, Any]:
    if not _tma(source, chosen):
        return None, None
    block = [1, 1, chosen.block_n, triton.next_power_of_2(width)]
    return TensorDescriptor.from_tensor(source.k, block), TensorDescriptor.from_tensor(source.v, block)
