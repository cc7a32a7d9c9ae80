"""FlashAttention-4's block-sparse forward (``flash_attn.cute``, package flash-attn-4), from capability 9.0.

The lists are `SparseMask.to_fa4`'s: blocks that a query block sees whole, and blocks that causality cuts, in which a
function decides. Source: flash_attn/cute/interface.py and block_sparsity.py of 4.0.0b36.
"""

from __future__ import annotations

from importlib import import_module

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.chips import capability
from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square
from sparseprefill.mask.mask import SparseMask

from .causal import causal
from .common import keep, missing, rows_reach_the_end

KEYS = 128
"""Keys of a block: for each head dimension of the record, the tile that the library runs at capability 9.0."""
ROWS, DOUBLE = 128, 256
"""Query rows of which a block is a multiple. From capability 10.0 a program has two times 128."""


def objection(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """By what is installed, sizes and the chip."""
    reason = missing("flash_attn.cute", "flash-attention-4") or rows_reach_the_end(call)
    if reason is not None:
        return reason
    rows = DOUBLE if capability(call.q.device)[0] > 9 and call.q.shape[2] > ROWS else ROWS
    if mask.tile_k != KEYS or mask.tile_q % rows:
        return f"tiles of {mask.tile_q} x {mask.tile_k}; it takes {rows} x {KEYS} on this chip"
    if call.geometry.q_offset % mask.tile_q:
        return "a first query row inside a tile"
    return None


def launch(job: Job) -> Launched:
    """Output and LSE, from a copy of q, k and v where their heads do not lie beside tokens."""
    attend = import_module("flash_attn.cute").flash_attn_func
    tensors = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    call, lists = job.call, job.mask.to_fa4()
    heads = call.q.shape[1]
    # Lists of one head would make it compile another kernel.
    counts = (x.expand(-1, heads, *x.shape[2:]).contiguous() for x in lists[:4])
    out, lse = attend(
        *(x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v)),
        softmax_scale=call.softmax_scale,
        mask_mod=causal(call.geometry.q_offset > 0),
        pack_gqa=False,
        block_sparse_tensors=tensors(*counts, block_size=lists.block_size),
        return_lse=True,
    )
    keep(job, out.transpose(1, 2), lse)
    return Launched()


FLASH_ATTENTION_4 = Family(
    name="flash-attention-4",
    rank=dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 10),
    launch=launch,
    features=Features(dims=square(64, 96, 128) | {(192, 128)}),
    objection=objection,
)
"""In front of the portable kernel, and behind those that are tuned for a chip."""
