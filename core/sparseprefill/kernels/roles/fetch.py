"""The producer's tiles under skip-softmax: in another order, and values that nobody wants are spared."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.roles.gluon import barrier
from sparseprefill.kernels.roles.paging import entries_of, load_step
from sparseprefill.kernels.roles.ring import advance


@gluon.jit
def step_at(j, tiles, crossing, PARTS: gl.constexpr):
    """The step of an ascending list that comes j-th: the crossing ones from the last, those of the first tile, the rest."""
    head = gl.minimum(PARTS, tiles - crossing)
    first = gl.where(j < crossing + head, crossing + head - 1 - j, tiles - 1 - j + head)
    return gl.where(j < crossing, tiles - 1 - j, first)


@gluon.jit
def key_at(tile_ptr, j, tiles, crossing, shape):
    """The first key of the j-th step; of the last one, where there is no such step."""
    parts: gl.constexpr = shape.TILE_K // shape.BLOCK_N
    t = step_at(gl.minimum(j, tiles - 1), tiles, crossing, parts)
    return gl.load(tile_ptr + t // parts) * shape.TILE_K + (t % parts) * shape.BLOCK_N


@gluon.jit
def vote_of(skip, slot):
    """One consumer's vote on a step."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(skip.votes.index(slot).load(one), 0)


@gluon.jit
def fetch(
    ring, skip, cache, tile_ptr, tiles, crossing, b, head, start, kv_len, k_boxes, v_boxes, stage, phase, shape
):  # fmt: skip
    """The producer's tiles of an item, in the order of `SkipSoftmax`; the ring's stage and phase after them.

    With votes, the values of a step are sent for when the keys of all steps that the ring has room for behind it have
    been, and only if a consumer wants them; else their barrier is told that they are there, so that all keep in step.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    behind: gl.constexpr = shape.STAGES - 1 if skip.votes is not None else 0
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.arange(0, BLOCK_N, layout=line)
    v_stage = stage
    v_phase = phase
    if tiles > 0:
        key = key_at(tile_ptr, 0, tiles, crossing, shape)
        for j in range(tiles + behind):
            if j < tiles:
                here = key
                key = key_at(tile_ptr, j + 1, tiles, crossing, shape)
                entries = ()
                if shape.PAGE > 0:  # early: their latency passes while the stage empties
                    entries = entries_of(cache.table, here, kv_len, shape)
                mbarrier.wait(ring.k_empty.index(stage), phase)
                if j < crossing:
                    ring.positions.index(stage).store(here + number)
                    barrier()
                ready = ring.k_ready.index(stage)
                load_step(cache.k_desc, entries, b, head, here, start, ready, k_boxes, stage, shape)
                stage, phase = advance(stage, phase, shape.STAGES)
            if j >= behind:
                there = key_at(tile_ptr, j - behind, tiles, crossing, shape)
                v_entries = ()
                if shape.PAGE > 0:
                    v_entries = entries_of(cache.table, there, kv_len, shape)
                wanted = 1
                if skip.votes is not None:
                    mbarrier.wait(skip.told.index(2 * v_stage), v_phase ^ 1)
                    wanted = vote_of(skip, 2 * v_stage)
                    if wanted == 0:
                        mbarrier.wait(skip.told.index(2 * v_stage + 1), v_phase ^ 1)
                        wanted = vote_of(skip, 2 * v_stage + 1)
                    barrier()  # all warps have read the votes before their slots can be filled again
                mbarrier.wait(ring.v_empty.index(v_stage), v_phase)
                if wanted > 0:
                    ready = ring.v_ready.index(v_stage)
                    load_step(cache.v_desc, v_entries, b, head, there, start, ready, v_boxes, v_stage, shape)
                else:
                    mbarrier.arrive(ring.v_ready.index(v_stage), count=1)
                v_stage, v_phase = advance(v_stage, v_phase, shape.STAGES)
    return stage, phase
