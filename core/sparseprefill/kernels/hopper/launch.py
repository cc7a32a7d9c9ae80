"""The calls that the Hopper kernel serves, and its launch; `record` says what it can do."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.attention.arguments import Arguments as Given
from sparseprefill.kernels.attention.arguments import flat
from sparseprefill.kernels.attention.together import Together
from sparseprefill.kernels.family.chips import multiprocessors
from sparseprefill.kernels.family.record import Job, Launched, Wanted
from sparseprefill.kernels.hopper.kernel import hopper_attention_fwd_kernel
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.lists.order import MOST, Draws, draws_of_lists, draws_of_requests, most_pieces, prepare
from sparseprefill.kernels.roles.arguments import Arguments, Cache, Eight, Outputs, Parts, Sizes
from sparseprefill.kernels.roles.paging import PANEL
from sparseprefill.kernels.roles.quantise import TILE, errors_of
from sparseprefill.kernels.roles.quantise import eight as quantised
from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.source import Source, aligned, strides
from sparseprefill.mask.geometry import kept
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.recorded import apart
from sparseprefill.pages import Pages

BLOCK_M = 128
"""Query rows of a work item: two consumers of 64."""
STAGES = {64: 4, 128: 3, 256: 2}
"""Steps of K and V in shared memory, by head dimension."""
BLOCK_N = {64: 128, 128: 128, 256: 64}
"""Most keys of a step, by head dimension."""
REGISTERS = (216, 48, 32)
"""Per thread of the consumers, the producer and the scheduler: 216 + 216 + 48 + 32 is a multiprocessor's share."""
ALONE = (216, 72, 72)
"""The same where the copy engine brings stripes: one warp keeps it busy, and shares a warpgroup with the scheduler. Four
gather, or convert; of tiles alone one and four take the same time (H100)."""
DEFER = True
"""Values of tiles wait for the votes, where steps may be left out: they are as many bytes as the keys."""
CONVERTING = (192, 96, 32)
"""The same where the producer converts what an fp8 cache holds."""
STAGES_FP8, AHEAD = {64: 4, 128: 2, 256: 2}, {64: 2, 128: 2, 256: 1}
"""Over an fp8 cache: steps in shared memory that are converted, and that are not yet, by head dimension."""
STAGES_EIGHT, ROUNDING = {128: 4}, (232, 24, 24)
"""Of steps in 8 bits: steps in shared memory, and registers; the producer gathers nothing there. With 224 registers of a
consumer a prompt of 131,072 tokens took 2 % longer, with 216 8 % (H100)."""
LEAST_KEYS, LEAST_ITEMS, LEAST_BLOCKS = 1 << 16, 1 << 13, 16
"""Keys, query blocks of all heads and of one from which 8 bits are tried: of shorter prompts and chunks the passes over K
and V, and what is sampled and stays in 16 bits, cost what they save (docs/performance.md)."""
SAMPLED = 4
"""Query blocks of each head of which the error is looked at, in the first half of the rows: that of the longest list is
computed twice by one multiprocessor while most others wait."""
NOTHING = Eight(*(None,) * 8)
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Types that the producer converts."""
LEAST_PAGE = 16
"""Tokens of the smallest page: 8 rows make one period of shared memory's swizzle."""
LONG, COPY = 1 << 15, 1 << 30
"""Of pages smaller than a step: keys, and bytes of K and V, from which and up to which a copy costs less than its loads in
many pieces (docs/performance.md)."""
READS, READS_OF_ALL = 8, 64
"""Keys for each query row up to which it does: of sparse masks, and of those that read every key for every row."""
READS_FP8 = 16, 32
"""The same over an fp8 cache, whatever its pages: of stripes alone, and of sparse masks with tiles."""
LEAST_STEPS = 16
"""Steps of the shortest piece: each costs what two steps do, its state written and read again."""
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""Of queries, keys and values in shared memory."""
ROOM = 4
"""Words of the scratch tensor before what counts pieces, and before the flags; the first is the counter of items."""


def objection(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """Reason for which another kernel has to serve a call that the record's features allow, or None."""
    reason = _shape_objection(call, mask)
    if reason is not None:
        return reason
    if call.pages is not None:
        return _pages_objection(call, call.pages, wanted.skips)
    if not (aligned(call.k) and aligned(call.v)):
        return "rows that are not aligned to 16 bytes"
    if mask.stripes is not None and not (_specialised(call.k) and _specialised(call.v)):
        return "stripes of keys or values whose strides are not multiples of 16 elements"
    return None


def copied(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> bool:
    """True if the kernel serves a copy of the call's pages, which may be copied: pages that it does not read, or reads
    more slowly than a copy."""
    if _shape_objection(call, mask) is not None:
        return False
    return objection(call, mask, wanted) is not None or better_copied(call, mask)


def _shape_objection(call: AttentionCall, mask: SparseMask) -> str | None:
    """Reason for which the kernel cannot run a call, whatever K and V are read from; None if it can."""
    if mask.tile_q % BLOCK_M or mask.tile_k < 64 or mask.tile_k & (mask.tile_k - 1):
        return f"tiles of {mask.tile_q} x {mask.tile_k}"
    return None if aligned(call.q) else "rows that are not aligned to 16 bytes"


def _pages_objection(call: AttentionCall, pages: Pages, skips: bool) -> str | None:
    """Reason for which the kernel cannot read these pages, or None."""
    fp8 = pages.k.dtype in FORMATS
    if pages.converted and (skips or not fp8):
        return f"pages of {pages.k.dtype} that are read as {pages.dtype}"
    if pages.page < LEAST_PAGE or pages.page & (pages.page - 1):
        return f"pages of {pages.page} tokens"
    if call.starts is not None:
        return "padding before the keys in pages"
    steps = pages.k.stride()
    if steps != pages.v.stride():
        return "pages of K and V that differ in strides"
    if steps[1] == 0 or steps[0] % steps[1] or pages.k.shape[0] * (steps[0] // steps[1]) >= 1 << 31:
        return f"pages of strides {steps}"
    if not (aligned(pages.k) and aligned(pages.v)):
        return "rows of pages that are not aligned to 16 bytes"
    return None


def better_copied(call: AttentionCall, mask: SparseMask) -> bool:
    """True if a copy of K and V serves the call sooner than their pages, and is not too large: where keys are read often.

    That goes for tiles of long prompts, in pages that take several loads a step; rows of stripes are gathered one by one
    from wherever they stand. Of an fp8 cache it goes for both, since each read converts.
    """
    pages, width = call.pages, call.q.shape[3]
    if pages is None or 2 * call.kv_heads * call.kv_len * width * call.q.element_size() > COPY:
        return False
    fp8, whole = pages.k.dtype in FORMATS, mask.tiles is not None and mask.tiles.whole
    if not fp8 and (pages.page >= min(mask.tile_k, BLOCK_N[width]) or not mask.has_tiles or call.kv_len < LONG):
        return False
    reads = READS_OF_ALL if whole else READS_FP8[mask.has_tiles] if fp8 else READS
    return call.q.shape[2] * reads >= call.kv_len


def unrounded(call: AttentionCall, mask: SparseMask) -> str | None:
    """Reason for which a call that the kernel serves is not done in 8 bits, or None. Sizes and features alone; no device is asked."""
    if call.q.shape[3] != TILE.value:
        return f"head dimension {call.q.shape[3]}; {TILE.value} is the one with 8 bits"
    if mask.stripes is not None or mask.tiles is None:
        return "columns in the mask, or no tiles; tiles alone are done in 8 bits"
    if (mask.tile_q, mask.tile_k) != (BLOCK_M, TILE.value):
        return f"tiles of {mask.tile_q} x {mask.tile_k}; those of {BLOCK_M} x {TILE.value} are done in 8 bits"
    if call.starts is not None or call.lengths is not None:
        return "padding"
    if call.pages is not None and (call.pages.k.dtype in FORMATS or not call.pages.copies):
        return "an fp8 cache" if call.pages.copies else "pages that may not be copied"
    if call.kv_len < LEAST_KEYS:
        return f"{call.kv_len} keys; 8 bits pay from {LEAST_KEYS}"
    blocks = mask.geometry.tile_rows(BLOCK_M)
    items = blocks * call.q.shape[0] * call.q.shape[1]
    if blocks < LEAST_BLOCKS or items < LEAST_ITEMS:
        return f"{items} query blocks of {BLOCK_M} rows; 8 bits pay from {LEAST_ITEMS}"
    return None


def launch(job: Job) -> Launched:
    """Run the kernel in 16 bits. Its pairs left out are two numbers for each query block, one of each half."""
    call, mask, given, requests = job.call, job.mask, job.arguments, job.requests
    blocks = _blocks(mask, given)
    if requests is not None:
        order, draws = _draws_together(requests, blocks)
    else:
        order, draws = None, None if job.wanted.skips else _draws(call, mask, blocks)
    nonfinite = _run(call, mask, given, order, requests, draws=draws)
    # Query rows of a block, those that vote together (of one consumer), and keys of a step.
    voting = (BLOCK_M, BLOCK_M // 2, min(mask.tile_k, BLOCK_N[call.q.shape[3]])) if job.wanted.skips else None
    return Launched(nonfinite=nonfinite, voting=voting)


def launch_eight(job: Job) -> Launched:
    """Run the kernel in 8 bits. Errors are those of sampled rows beside the same in 16 bits, as a share of their norm;
    heads where they are more than the bound run in 16 bits. Nothing is read on the host.
    """
    call, mask, given, bound = job.call, job.mask, job.arguments, job.wanted.bound
    out, blocks = given.outputs.out, _blocks(mask, given)
    batch, heads = call.q.shape[:2]
    items, rows, every, one_way = _sampled(batch * heads, blocks, given.sizes.q_offset % BLOCK_M, out.device)
    eight = quantised(call, one_way[0])
    _run(call, mask, given, items, eight=eight._replace(exact=one_way[1]))
    exact = out.index_select(2, rows)
    _run(call, mask, given, items, eight=eight)
    first = -(given.sizes.q_offset % BLOCK_M)
    errors, beyond = errors_of(out, exact, first, blocks, SAMPLED, BLOCK_M, bound)
    eight = eight._replace(exact=beyond)
    return Launched(nonfinite=_run(call, mask, given, every, eight=eight), errors=errors)


@kept
def _sampled(lines: int, blocks: int, behind: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The items of the sampled blocks of `lines` heads, their rows, all items (so that one variant of the kernel serves
    both), and int8 ``[2, lines]`` of zeros and ones. behind: rows by which the first block begins before the call's."""
    tiles = torch.arange(1, 2 * SAMPLED, 2, device=device) * blocks // (4 * SAMPLED)
    head = torch.arange(lines, device=device)[:, None] * blocks
    items = (head + blocks - 1 - tiles).to(torch.int32).flatten()  # of a head's items the last block comes first
    rows = (tiles[:, None] * BLOCK_M + torch.arange(BLOCK_M, device=device) - behind).flatten()
    every = torch.arange(lines * blocks, dtype=torch.int32, device=device)
    return items, rows, every, torch.arange(2, dtype=torch.int8, device=device)[:, None].expand(2, lines).contiguous()


def _blocks(mask: SparseMask, given: Given) -> int:
    """Query blocks of a head."""
    rows: int = given.mask.tile_rows
    return rows * (mask.tile_q // BLOCK_M)


def _run(
    call: AttentionCall,
    mask: SparseMask,
    given: Given,
    order: Tensor | None,
    requests: Together | None = None,
    eight: Eight | None = None,
    draws: Draws | None = None,
) -> Tensor:
    """One launch, of all items, of those in `order`, or of pieces of them as programs draw them (see `lists.order`)."""
    apart(prepare, call.q.device)
    (batch, heads, _, width), q, source = call.q.shape, given.queries.ptr, Source.of(call)
    block_n, fp8 = min(mask.tile_k, BLOCK_N[width]), FORMATS.get(source.k.dtype)
    stages, registers = (STAGES, REGISTERS) if fp8 is None else (STAGES_FP8, CONVERTING)
    box = _box(mask, source, block_n)
    if eight is not None:
        block_n, stages, registers = TILE.value // 2, STAGES_EIGHT, ROUNDING
    elif box:
        registers = ALONE
    batch = batch if requests is None else len(requests.masks)
    blocks = _blocks(mask, given)
    items = batch * heads * blocks
    programs = multiprocessors(q.device)
    if draws is None:
        cut, parts = 0, Parts(None, None, None)
        room = torch.zeros(_room(items, cut), dtype=torch.int32, device=q.device)
    else:
        cut, room = most_pieces(programs), draws.room
        states = torch.empty(cut * BLOCK_M * (2 + width), dtype=torch.float32, device=q.device)
        parts = Parts(room[ROOM : ROOM + 2 * cut], states[: 2 * cut * BLOCK_M], states[2 * cut * BLOCK_M :])
    counter, nonfinite = room[:1], room[ROOM + 2 * cut :].view(torch.int8)[:items]
    drawn = None if order is None else order.numel()
    outputs, sizes = given.outputs, given.sizes
    strides = (outputs.stride_ob, outputs.stride_oh, outputs.stride_on, outputs.stride_lb, outputs.stride_lh)
    arguments = Arguments(
        _descriptor(q, BLOCK_M // 2),
        _cache(source, block_n, box),
        given.mask,
        given.carry,
        Outputs(outputs.out, outputs.lse, outputs.state, nonfinite, outputs.sinks, source.v_scale, *strides),
        Sizes(*sizes[:5], blocks, items, *sizes[5:]),
        given.logits.scale,
        source.k_scale,
        given.logits.below,
        outputs.skipped,
        counter,
        order,
        drawn,
        None if draws is None else draws.words,
        parts,
        NOTHING if eight is None else eight,
    )
    enqueue(hopper_attention_fwd_kernel, (min(drawn or items, programs) if draws is None else programs,),
        *flat(arguments),
        TILE_Q=mask.tile_q, TILE_K=mask.tile_k, GROUP=mask.group, WIDTH=mask.stripe_width, BOX=box,
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, D=width, STAGES=stages[width], PAGE=source.page, REGISTERS=registers, FP8=fp8,
        AHEAD=0 if fp8 is None else AHEAD[width], PRODUCERS=1 if box else 4,
        DEFER=DEFER and given.logits.below is not None, num_warps=4, **FUSED,
    )  # fmt: skip
    return nonfinite


def _room(items: int, cut: int) -> int:
    """Words of the scratch tensor: behind the first, two for each of `cut` pieces, and a byte for the flag of each item;
    a multiple of four, as launches take alignment for granted."""
    return cdiv(ROOM + 2 * cut + cdiv(items, 4), 4) * 4


def _draws(call: AttentionCall, mask: SparseMask, blocks: int) -> Draws | None:
    """The query blocks of all heads as programs draw them, the longest first, long ones in pieces (`lists.order`); None
    where heads may follow each other: of blocks that are all short, or so many that it makes up for it."""
    items = blocks * call.q.shape[0] * call.q.shape[1]
    if items > MOST or not _uneven(mask):
        return None
    programs = multiprocessors(call.q.device)
    return draws_of_lists(*_lengths(mask), _least(mask), programs, _room(items, most_pieces(programs)))


def _draws_together(requests: Together, blocks: int) -> tuple[Tensor | None, Draws | None]:
    """int32 ``[items]``, the query blocks that requests have, of `blocks` for each head; or these as `_draws` has them.

    Where heads may follow each other, so do the requests, in their order.
    """
    masks, device = requests.masks, requests.q.device
    items = _items(requests.blocks(BLOCK_M), blocks, requests.q.shape[1], device)
    if items.numel() > MOST or not any(map(_uneven, masks)):
        return items, None
    mask, lists = masks[0], requests.lists[0]
    counts, more = (lists[3], lists[0]) if mask.stripes is not None else (lists[0], None)
    assert counts is not None
    sizes = blocks, mask.tile_q // BLOCK_M, mask.tile_k // mask.stripe_width, requests.q.shape[1]
    of_lists = mask.stripes is not None, mask.tile_q, mask.group
    programs, flags = multiprocessors(device), len(masks) * requests.q.shape[1] * blocks
    room, least = _room(flags, most_pieces(programs)), _least(mask)
    return None, draws_of_requests(requests.table, items, counts, more, sizes, of_lists, least, programs, room)


@kept
def _items(own: tuple[int, ...], blocks: int, heads: int, device: torch.device) -> Tensor:
    """int32: numbers of the items that there are, request by request. own: query blocks of a head of each."""
    head = torch.arange(heads, dtype=torch.int32, device=device)[:, None] * blocks
    # Of a head's items the last block comes first (`work.query_block`).
    last = [torch.arange(blocks - count, blocks, dtype=torch.int32, device=device) for count in own]
    return torch.cat([(i * heads * blocks + head + some).flatten() for i, some in enumerate(last)])


def _uneven(mask: SparseMask) -> bool:
    """True if some query blocks may be much longer than others: they are not all short."""
    return bool(mask.blocks) and mask.geometry.tile_columns(BLOCK_M) > LEAST_STEPS


def _least(mask: SparseMask) -> int:
    """Length of the shortest piece, as `_lengths` counts."""
    entry = mask.tile_k if mask.stripes is None else mask.stripe_width
    return max(1, LEAST_STEPS * BLOCK_M // entry)


def _lengths(mask: SparseMask) -> tuple[Tensor, Tensor | None, int, int]:
    """Counts of the mask's lists, of stripes where it has some, then of tiles, each of which is so many stripes; and how
    many query blocks share a list."""
    counts, per = [one.lists.counts for one in mask.regrouped(1).blocks], mask.tile_q // BLOCK_M
    if len(counts) < 2:
        return counts[0], None, 0, per
    return counts[1], counts[0], mask.tile_k // mask.stripe_width, per


def _descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Descriptor of ``[B, H, N, D]``: blocks of `rows` tokens of a head, and of `columns` dimensions if not all."""
    block = [1, 1, rows, columns or x.shape[-1]]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, LAYOUT)


Pair = tuple[TensorDescriptor | None, TensorDescriptor | None]


def _box(mask: SparseMask, source: Source, block_n: int) -> int:
    """Keys of a stripe that the copy engine brings at once, fewer than a step has; 0 where it is to gather them."""
    if mask.stripes is None or mask.stripe_width < LEAST_PAGE or source.k.dtype in FORMATS:
        return 0
    return min(mask.stripe_width, block_n // 2, source.page or block_n)


def _cache(source: Source, block_n: int, box: int) -> Cache:
    """Keys and values as the kernel reads them: of pages, `stride_b` counts rows from one to the next."""
    k, v = source.k, source.v
    tiles: Pair = (None, None)
    boxes: Pair = (None, None)
    if not source.page:
        if box:
            boxes = _descriptor(k, box, PANEL.value), _descriptor(v, box, PANEL.value)
        tiles = _descriptor(k, block_n), _descriptor(v, block_n)
        return Cache(*tiles, *boxes, k, v, None, *strides(k), *strides(v))
    if k.dtype in FORMATS:  # words of four numbers
        k, v = k.view(torch.int32), v.view(torch.int32)
    else:
        tiles = cache_descriptors(source, block_n)
        if box:
            boxes = cache_descriptors(source, block_n, box)
    return Cache(*tiles, *boxes, k, v, source.table, *page_strides(k), *page_strides(v))


def cache_descriptors(source: Source, block_n: int, box: int = 0) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of K and V in pages: a step's keys of a head in one page, or, of smaller pages, those of a panel.

    box: so many keys in a panel instead.
    """
    page = source.k.shape[1]
    block = (box, PANEL.value) if box else (block_n, None) if page >= block_n else (page, PANEL.value)
    # Heads first, as in tensors: the copy engine takes strides in any order.
    k, v = (_descriptor(x.permute(0, 2, 1, 3), *block) for x in (source.k, source.v))
    return k, v


def page_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of K or V in pages: rows from page to page, elements from head to head and from row to row."""
    return x.stride(0) // x.stride(1), x.stride(2), x.stride(1)


def _specialised(x: Tensor) -> bool:
    """True if the compiler learns that rows are aligned: it is told of strides that are multiples of 16, not of 8."""
    return all(stride % 16 == 0 for stride in strides(x))
