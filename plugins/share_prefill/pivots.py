"""The pivots of one request, from call to call: which may be used, and which are made anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill import kernels

from .heads import index, of_heads
from .records import Choice, Pivots, place_of, sizes_of

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory

    from .heads import LayerHeads


def renewed(
    call: AttentionCall, old: Pivots | None, clusters: int, heads: LayerHeads, choice: Choice, tiles: Tensor
) -> Pivots:
    """`old`, or None, with the pivots of the heads that ran dense. tiles: bool ``[B, S, R, C]``, by open cluster."""
    own = choice.own
    if kernels.serve(tiles):
        from . import launch

        before = None if old is None else (old.made, old.last, old.packed)
        codes, which = heads.codes(own.device), index(heads.open, own.device)
        made = launch.updated(before, call.layer, clusters, codes, which, choice.dense, own, tiles)
        return Pivots(sizes_of(call), place_of(call), *made)
    if old is None:
        old = Pivots.none(call, tiles.shape, clusters, own.dtype)
    head, fresh = heads.dense(choice.dense)
    return old.updated(call, index(heads.open, own.device), fresh, of_heads(own, head), tiles)


def earlier(call: AttentionCall, memory: Memory, key: str) -> Pivots | None:
    """Pivots made before this call in this very call of the model; None where there are none.

    Before: in earlier layers, and in this one by heads before the call's, where it is a part of a longer call. A pivot
    holds a pattern for the query rows that it was made from. The next chunk of the prompt has other rows, and its own
    pivots: it shows by other sizes, or by the layers starting over.
    """
    pivots: Pivots | None = memory.get(key, None)
    if pivots is None or place_of(call) <= pivots.at or pivots.sizes != sizes_of(call):
        return None
    return pivots
