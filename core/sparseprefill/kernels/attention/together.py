"""Calls that can share a launch, and what the kernels read of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.attention.arguments import FIELDS
from sparseprefill.kernels.source import Source
from sparseprefill.mask.geometry import kept
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.recorded import RECORDING, apart
from sparseprefill.plan import Plan


@frozen(eq=False)
class Together:
    """Requests of one launch.

    masks: of each. lists, bitmaps: `arrays` and `bitmap` of each mask. q: ``[1, Hq, N, D]``, from the first row of all to the last.
    out, lse: ``[1, Hq, n, D]`` and ``[1, Hq, n]``, in which each request's rows lie in `places`. tile_rows: query tiles of
    the longest. table: what is each one's own (`arguments`), on the device.
    """

    masks: tuple[SparseMask, ...]
    lists: tuple[tuple[Tensor | None, ...], ...]
    bitmaps: tuple[Tensor | None, ...]
    q: Tensor
    out: Tensor
    lse: Tensor
    places: tuple[slice, ...]
    tile_rows: int
    table: Tensor

    @classmethod
    def of(cls, calls: Sequence[AttentionCall], masks: Sequence[SparseMask], outs: Sequence[Tensor] = ()) -> Together:
        """Put calls and masks of one `key` together. Nothing is read from a device; one small copy may go to it.

        outs: of each call a tensor for its output, `alike`; by default there is a new one for all.
        """
        recording = RECORDING.get()
        of_masks = [(*mask.arrays, mask.bitmap) for mask in masks]
        if recording is not None:
            of_masks = list(zip(*map(recording.gathered, zip(*of_masks, strict=True)), strict=True))
        lists, bitmaps = tuple(one[:-1] for one in of_masks), tuple(one[-1] for one in of_masks)
        lengths = [call.q.shape[2] for call in calls]
        q, rows = _span([call.q for call in calls])
        heads, width = q.shape[1], calls[0].value_dim
        if outs:
            out, begins = _span(outs)
        else:  # heads beside tokens, as hosts keep them: each request's rows lie together
            begins = [sum(lengths[:i]) for i in range(len(lengths))]
            out = torch.empty(sum(lengths), heads, width, dtype=q.dtype, device=q.device).transpose(0, 1)[None]
        places = tuple(slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True))
        lse = torch.empty(1, heads, out.shape[2], dtype=torch.float32, device=q.device)
        pages = [Source.of(call).table for call in calls]
        tensors = [(one, *of, bits) for one, of, bits in zip(pages, lists, bitmaps, strict=True)]
        sizes = [_sizes(call, mask) for call, mask in zip(calls, masks, strict=True)]
        table = tuple(
            (row, begin, *numbers, *_behind(mine, tensors[0]))
            for row, begin, numbers, mine in zip(rows, begins, sizes, tensors, strict=True)
        )
        tiles, made = max(mask.geometry.tile_rows(mask.tile_q) for mask in masks), _on_device(table, q.device)
        if recording is not None:  # where these tensors lie then, it alone knows
            made = apart(torch.clone, made)
            recording.told(made, [x for one in table for x in one], _tensors_of(table, tensors))
        return cls(tuple(masks), lists, bitmaps, q, out, lse, places, tiles, made)

    def results(self) -> list[tuple[Tensor, Tensor]]:
        """out ``[1, Hq, Nq, D]`` and LSE ``[1, Hq, Nq]`` of each request, views."""
        return [(self.out[:, :, one], self.lse[:, :, one]) for one in self.places]

    def blocks(self, block_m: int) -> tuple[int, ...]:
        """Query blocks of one head of each request."""
        return tuple(mask.geometry.tile_rows(mask.tile_q) * (mask.tile_q // block_m) for mask in self.masks)


def key(call: AttentionCall, plan: Plan) -> Hashable | None:
    """Whatever is alike of calls that can share a launch; None of one that has to run alone.

    K and V lie in the pages of one cache as they are, and the rows of q in one tensor.
    """
    pages = call.pages
    if pages is None or pages.converted or call.starts is not None or call.lengths is not None:
        return None
    if plan.carry is not None or plan.probe is not None or plan.skip_below is not None:
        return None
    mask, q = plan.mask, call.q
    if q.stride(3) != 1 or q.stride(2) < 1:
        return None
    rows = q.untyped_storage().data_ptr(), q.storage_offset() % q.stride(2)
    cache = tuple((x.data_ptr(), x.shape, x.stride()) for x in (pages.k, pages.v))
    sinks = None if call.sinks is None else (call.sinks.data_ptr(), call.sinks.dtype, call.sinks.stride())
    grid = mask.tile_q, mask.tile_k, mask.group, mask.stripe_width
    of_mask = (*grid, mask.has_tiles, mask.stripes is not None, mask.overlapping)
    logits = (call.softmax_scale, call.softcap, call.geometry.window, sinks)
    return rows, q.shape[1], q.shape[3], call.value_dim, q.stride()[1:3], q.dtype, cache, logits, of_mask


def alike(outs: Sequence[Tensor]) -> bool:
    """True if a launch may write to these tensors: rows of one, as a host has them."""
    first = outs[0]
    same = all(x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for x in outs)
    strides = all(x.stride() == first.stride() and x.shape[0] == 1 for x in outs)
    step = first.stride(2)
    if not (same and strides and first.stride(3) == 1 and step > 0):
        return False
    return all((x.storage_offset() - first.storage_offset()) % step == 0 for x in outs)


def _span(parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """All rows between the first and the last of tensors of one storage; where each begins among them."""
    first = min(parts, key=Tensor.storage_offset)
    step = first.stride(2)
    rows = [(part.storage_offset() - first.storage_offset()) // step for part in parts]
    count = max(row + part.shape[2] for row, part in zip(rows, parts, strict=True))
    return first.as_strided((1, first.shape[1], count, first.shape[3]), first.stride()), rows


def _sizes(call: AttentionCall, mask: SparseMask) -> tuple[int, ...]:
    g = mask.geometry
    tiles = (g.tile_rows(mask.tile_q), g.tile_rows(mask.group_rows), g.tile_columns(mask.tile_k))
    return (g.q_len, call.kv_len, g.q_offset, *tiles)


def _behind(mine: Sequence[Tensor | None], first: Sequence[Tensor | None]) -> tuple[int, ...]:
    """By how many elements tensors begin behind the first request's; 0 where there are none."""
    pairs = zip(mine, first, strict=True)
    return tuple(0 if a is None or b is None else (a.data_ptr() - b.data_ptr()) // a.element_size() for a, b in pairs)


def _tensors_of(
    table: tuple[tuple[int, ...], ...], tensors: Sequence[Sequence[Tensor | None]]
) -> list[tuple[int, Tensor, Tensor]]:
    """Of each distance in the table its number among all entries, and the two tensors; `_behind` ends each line."""
    found, width = list[tuple[int, Tensor, Tensor]](), len(table[0])
    for n, mine in enumerate(tensors):
        first = (n + 1) * width - len(mine)
        pairs = enumerate(zip(mine, tensors[0], strict=True), first)
        found += [(i, a, b) for i, (a, b) in pairs if a is not None and b is not None and a is not b]
    return found


@kept
def _on_device(table: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int64 ``[requests, FIELDS]``; a copy that nobody waits for. A CUDA graph, in which the host's memory would be read
    again at each replay, writes the numbers itself."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        each = [torch.full((1,), number, dtype=torch.int64, device=device) for line in table for number in line]
        return torch.cat(each).view(len(table), FIELDS.value)
    made = torch.tensor(table, dtype=torch.int64, device="cpu")
    return made.view(len(table), FIELDS.value).to(device, non_blocking=True)
