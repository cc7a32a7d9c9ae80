"""Arguments of the kernel and its roles, as tuples, and how the roles talk.

A launcher fills `Arguments`, which a launch takes apart (`attention.arguments.flat`); the kernel builds its tuples again.
A field may be None, which device code asks for (``mask.bitmap is not None``); the branch is decided when it is compiled.

All that passes between roles lies in slots of shared memory, which are filled and emptied in turn. A slot has two
barriers: `ready`, which completes when it has been filled, and `empty`, which completes when all who read it are done.

- `Queries`, 1 slot. The scheduler fills it through the copy engine, whose bytes complete `ready`; the two consumers
  complete `empty` when their last logits are computed. Items without a step pass it by.
- `Ring`, STAGES slots, in which K and V have barriers of their own. The producer fills them: tiles' bytes complete
  `ready`, of stripes the producer arrives once its gathered copies have landed. The two consumers complete `k_empty`
  when a step's logits are computed and masked (`positions` lie there as long as the keys), and `v_empty` one step
  later, when its values are summed.
- `Skip.votes`, 2 * STAGES slots, where steps may be left out: consumer n fills slot 2 * stage + n with every step and
  arrives at `told`, which counts 1. The producer asks for a step's votes when it has sent the keys of STAGES - 1 steps
  after it. Nobody tells a consumer that its vote was read: it fills the slot again when that step's keys have come
  round, which the producer sends later.
- `Work`, SLOTS slots. The scheduler fills them and arrives; the producer and both consumers complete `empty`.

So `ready` counts 1 arrival, `empty` as many as there are readers. A barrier flips its phase, 0 or 1, whenever it
completes, and a wait names the phase whose end it awaits. Readers begin with phase 0, those who fill with phase 1, which
a fresh barrier takes for long over: all slots start out empty. Everybody walks slots in the same order and flips the
phase after the last slot, which is all the agreement there is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sparseprefill.kernels.attention.arguments import Mask, State


class Shape(NamedTuple):
    """Sizes known when the kernel is compiled: the mask's tiles, the blocks of a step, head dimension, steps in the ring.

    GROUP: query tiles that share a list of stripes. WIDTH: keys of a stripe. BOX: of them, those that the copy engine
    brings at once; 0 where they are gathered one by one. PAGE: tokens of a page, a power of two; 0 without pages. FP8: what the cache holds, "e4m3" or "e5m2"; None where that is what the kernel computes in. AHEAD:
    steps that are on their way from an fp8 cache at once.
    """

    TILE_Q: Any
    TILE_K: Any
    GROUP: Any
    WIDTH: Any
    BOX: Any
    BLOCK_M: Any
    BLOCK_N: Any
    D: Any
    STAGES: Any
    PAGE: Any
    FP8: Any
    AHEAD: Any


class Queries(NamedTuple):
    """The block of queries at work. desc: of q, in halves. eight: where each consumer puts its half in int8; or None."""

    desc: Any
    smem: Any  # [2, 1, 1, BLOCK_M // 2, D]
    ready: Any  # [1]
    empty: Any  # [1]
    eight: Any  # [2, BLOCK_M // 2, D]


class Ring(NamedTuple):
    """Steps of keys and values on their way.

    positions: of the step's keys, where rows need a mask; told and freed with the keys. cache_rows: where the keys of a
    step of stripes stand in the pages of a cache; a note of the producer's to itself, without barriers. k_eight, v_eight:
    the same slots as steps in 8 bits see them, of twice as many keys; scales: factors of such a step's tile, one for each
    row of a consumer, told and freed with the keys. None where no step is in 8 bits.
    """

    k_smem: Any  # [STAGES, 1, 1, BLOCK_N, D]
    v_smem: Any  # [STAGES, 1, 1, BLOCK_N, D]
    positions: Any  # [STAGES, BLOCK_N]
    k_ready: Any  # [STAGES, 1]
    k_empty: Any
    v_ready: Any
    v_empty: Any
    cache_rows: Any  # [BLOCK_N] with pages and stripes, else [1]
    k_eight: Any  # [STAGES, 1, 1, 2 * BLOCK_N, D]
    v_eight: Any  # [STAGES, 1, 1, D, 2 * BLOCK_N]
    scales: Any  # [STAGES, BLOCK_M // 2]


class Raw(NamedTuple):
    """Keys and values of an fp8 cache as they stand there, in words of four numbers, on their way to the producer; None,
    both, with any other cache. A thread reads what it has copied there itself, so there are no barriers."""

    k: Any  # [AHEAD, BLOCK_N, D / 4]
    v: Any


class Eight(NamedTuple):
    """K and V as `quantise` makes them for steps in 8 bits; all None where there are none.

    k_desc, v_desc: of int8 keys ``[B, Hkv, Nkv, D]`` and of e4m3 values, transposed, ``[B, Hkv, D, places]``. k_scale:
    float32 ``[B * Hkv, tiles]``, factors of key tiles. k_mean, v_mean: float32 ``[B * Hkv, D]``. v_scale, v_inverse: what
    makes sums of values of a step's, and the other way round. exact: int8 ``[B * Hq]``, heads whose steps all stay in 16
    bits.
    """

    k_desc: Any
    v_desc: Any
    k_scale: Any
    k_mean: Any
    v_scale: Any
    v_inverse: Any
    v_mean: Any
    exact: Any


class Skip(NamedTuple):
    """Steps that are left out; all None where none may be.

    below: float32 ``[B]``, thresholds. counts: int32 ``[B * Hq * blocks, 2]``, pairs that each consumer left out. votes,
    told: whether a consumer wants the values of a step, and the barrier by which the producer learns of it; None where
    values are fetched without asking.
    """

    below: Any
    counts: Any
    votes: Any  # [2 * STAGES, 1]
    told: Any  # [2 * STAGES, 1]


class Work(NamedTuple):
    """Items on their way: fields as `work` numbers them. counter: items drawn so far by all programs together.

    order: int32, the items in the order in which they are drawn; None for that of their numbers. draws: how many that
    are, None for all. pieces: instead of both where long lists are cut, as `lists.order` tells of them.
    """

    smem: Any  # [SLOTS * FIELDS, 1]
    ready: Any  # [SLOTS, 1]
    empty: Any
    counter: Any
    order: Any
    draws: Any
    pieces: Any


class Parts(NamedTuple):
    """Softmax states of the pieces of items that are cut, by the numbers of their draws, which are the first ones of
    all; all None where nothing is.

    arrived: int32, for each consumer of the item's first draw how many of its pieces are there. level: float32 maxima in
    base 2, then sums. acc: float32.
    """

    arrived: Any  # [draws, 2]
    level: Any  # [draws, 2, BLOCK_M]
    acc: Any  # [draws, BLOCK_M, D]


class Sizes(NamedTuple):
    """Lengths of the call, and where its batch rows begin and end (see `paging.batch_row`).

    starts, lengths: ``[B]`` or None. blocks: of one head; items: of all. kv_group: query heads a KV head. requests: where
    batch rows are requests, the table of what is their own (`attention.arguments`), else None; blocks are then those of
    the longest.
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
    requests: Any


class Cache(NamedTuple):
    """K and V, ``[B, Hkv, Nkv, D]``: descriptors for tiles, others for boxes of stripes (or None), pointers for stripes
    that are gathered.

    With pages, table names those of the request, of several the first, and stride_kb counts rows, not elements, from one
    page to the next. An fp8 cache has no descriptors; of it, pointers and strides are those of words of four numbers.
    """

    k_desc: Any
    v_desc: Any
    k_box: Any
    v_box: Any
    k: Any
    v: Any
    table: Any
    stride_kb: Any
    stride_kh: Any
    stride_kn: Any
    stride_vb: Any
    stride_vh: Any
    stride_vn: Any


class Outputs(NamedTuple):
    """Places of the results: either out and lse, or a state. sinks: logits that join the denominator of out, or None.

    nonfinite: int8 ``[B * Hq * blocks]``, 1 where a sum of the block is NaN or infinite. v_scale: factor on the values of
    an fp8 cache, or None; a pointer among the arguments, the number itself for the roles.
    """

    out: Any
    lse: Any
    state: State
    nonfinite: Any
    sinks: Any
    v_scale: Any
    stride_ob: Any
    stride_oh: Any
    stride_on: Any
    stride_lb: Any
    stride_lh: Any


class Arguments(NamedTuple):
    """Everything that one launch is given, but what the kernel is compiled for.

    queries: descriptor of q, in halves. scale: factor on q.k, log2(e) included. k_scale: factor on the keys of an fp8
    cache, or None. below, skipped: see `Skip.below` and `Skip.counts`. counter, order, draws, pieces: see `Work`. parts:
    see `Parts`. eight: see `Eight`.
    """

    queries: Any
    cache: Cache
    mask: Mask
    carry: State
    outputs: Outputs
    sizes: Sizes
    scale: Any
    k_scale: Any
    below: Any
    skipped: Any
    counter: Any
    order: Any
    draws: Any
    pieces: Any
    parts: Parts
    eight: Eight
