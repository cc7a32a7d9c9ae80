"""Where kernels over `group_products` read the keys of a call: in their pages, or from a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.kernels.source import Keys

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

READS = 8
"""Of tensor descriptors: keys for each query row up to which a copy costs less than pointers into pages do."""
COPY = 1 << 30
"""Bytes of such a copy, at most."""


def group_keys(call: AttentionCall, size: int, *, tma: bool) -> Keys:
    """Keys as the kernels read them: from their pages, or, as if there were none, from a copy.

    Pages serve where groups of `size` tokens lie within one or fill several, so not where groups may begin or end
    inside a page, by its size or by `starts`; and not where `Keys.of` says so. tma: whether tensors are read by
    descriptors, which cannot follow a table: queries that read all keys often, as those of a whole prompt do, then gain
    more by them than a copy costs.
    """
    pages = call.pages
    if pages is not None:
        cut = (pages.page % size and size % pages.page) or call.starts is not None
        if cut or (tma and _often(call)):
            pages.keys()  # the pages keep the copy, which `Keys.of` then takes
    return Keys.of(call)


def _often(call: AttentionCall) -> bool:
    held = call.kv_heads * call.kv_len * call.q.shape[3] * call.q.element_size()
    return call.q.shape[2] * READS >= call.kv_len and held <= COPY
