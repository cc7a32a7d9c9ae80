"""What the roles of the kernel are handed: small tuples, built inside the kernel from its flat arguments.

How the four roles talk to each other
-------------------------------------
Everything between them is in shared memory, in slots that are filled and emptied again and again. Each slot has two
barriers, `ready` (full, may be read) and `empty` (may be filled again), and nobody else tells anybody anything:

==========  =====  ==========================================  ==========================================
slots       of     `ready` completes when                      `empty` completes when
==========  =====  ==========================================  ==========================================
`Queries`   1      the copy engine has landed both halves      both consumers have issued their last product
`Ring` k    STAGES the step's keys have landed                 both consumers have their logits (and masks)
`Ring` v    STAGES the step's values have landed               both consumers have added them up
`Work`      SLOTS  the scheduler has written the item          producer and both consumers have read it
==========  =====  ==========================================  ==========================================

A barrier flips its phase each time it completes, and `mbarrier.wait(barrier, phase)` returns once phase `phase` is over.
Who waits for `ready` begins with phase 0; who waits for `empty` begins with phase 1, the phase "before the first", which
counts as over: fresh slots are empty. Each role walks the slots in the same order and flips its phase after the last one,
so that roles agree on slots and phases without a word. K and V of a step share a slot number and a phase, not a barrier:
the slot of the keys is free as soon as the logits are there, that of the values one step later.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes known when the kernel is compiled: the mask's tiles, the blocks of a step, head dimension, steps in the ring.

    GROUP: query tiles that share a list of stripes. PAGE: tokens of a page, a power of two; 0 without pages.
    """

    TILE_Q: Any
    TILE_K: Any
    GROUP: Any
    BLOCK_M: Any
    BLOCK_N: Any
    D: Any
    STAGES: Any
    PAGE: Any


class Queries(NamedTuple):
    """The block of queries at work. desc: of q, in halves."""

    desc: Any
    smem: Any  # [2, 1, 1, BLOCK_M // 2, D]
    ready: Any  # [1]
    empty: Any  # [1]


class Ring(NamedTuple):
    """Steps of keys and values on their way.

    positions: of the step's keys, where rows need a mask; told and freed with the keys. cache_rows: where the keys of a
    step of stripes stand in the pages of a cache; a note of the producer's to itself, without barriers.
    """

    k_smem: Any  # [STAGES, 1, 1, BLOCK_N, D]
    v_smem: Any  # [STAGES, 1, 1, BLOCK_N, D]
    positions: Any  # [STAGES, BLOCK_N]
    k_ready: Any  # [STAGES, 1]
    k_empty: Any
    v_ready: Any
    v_empty: Any
    cache_rows: Any  # [BLOCK_N] with pages and stripes, else [1]


class Work(NamedTuple):
    """Items on their way: fields as `work` numbers them. counter: items drawn so far by all programs together."""

    smem: Any  # [SLOTS * FIELDS, 1]
    ready: Any  # [SLOTS, 1]
    empty: Any
    counter: Any


class Sizes(NamedTuple):
    """Lengths of the call, and where its batch rows begin and end (see `work.batch_row`).

    starts, lengths: ``[B]`` or None. blocks: of one head; items: of all. kv_group: query heads a KV head.
    """

    starts: Any
    lengths: Any
    q_offset: Any
    q_len: Any
    kv_len: Any
    blocks: Any
    items: Any
    heads: Any
    kv_group: Any


class Lists(NamedTuple):
    """`IndexLists` of tiles or stripes; all None where the mask has none."""

    counts: Any
    offsets: Any
    indices: Any


class Mask(NamedTuple):
    """tile_rows, columns: size of the grid of tiles. group_rows: lists of stripes a head.

    bitmap: uint8 ``[B, Hq, tile_rows, columns]``, where stripes may lie in selected tiles, which count once; or None.
    """

    tiles: Lists
    stripes: Lists
    bitmap: Any
    tile_rows: Any
    group_rows: Any
    columns: Any


class Cache(NamedTuple):
    """K and V, ``[B, Hkv, Nkv, D]``: descriptors for tiles, pointers for stripes.

    With pages, table names those of the request, and stride_kb counts rows, not elements, from one page to the next.
    """

    k_desc: Any
    v_desc: Any
    k: Any
    v: Any
    table: Any
    stride_kb: Any
    stride_kh: Any
    stride_kn: Any
    stride_vb: Any
    stride_vh: Any
    stride_vn: Any


class State(NamedTuple):
    """A softmax in progress: m, l ``[B, Hq, Nq]`` and acc ``[B, Hq, Nq, D]``, float32 and contiguous; or all None."""

    m: Any
    l: Any  # noqa: E741
    acc: Any


class Outputs(NamedTuple):
    """Where results go: either out and lse, or a state. sinks: logits that join the denominator of out, or None.

    nonfinite: int8 ``[B * Hq * blocks]``, 1 where a sum of the block is NaN or infinite.
    """

    out: Any
    lse: Any
    state: State
    nonfinite: Any
    sinks: Any
    stride_ob: Any
    stride_oh: Any
    stride_on: Any
    stride_lb: Any
    stride_lh: Any
