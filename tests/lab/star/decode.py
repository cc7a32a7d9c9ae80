"""Phase 2 of one layer and one token: the ranks' keys, one collective, the merge; and dense decoding on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from sparseprefill.adapters.star.executor import AnchoredBlockExecutor, Shard
from sparseprefill.adapters.star.ranks import Ranks
from sparseprefill.adapters.star.unmasked import attend_all
from torch import Tensor
from torch.nn import functional

from lab.bench.clock import Run
from sparseprefill.call import AttentionCall
from sparseprefill.executors.auto import AutoExecutor

from .layer import LayerShape

TAIL, STEPS = 64, 50


def many(run: Run) -> Run:
    """So many steps behind one another, as layers are."""

    def steps() -> None:
        for _ in range(STEPS):
            run()

    return steps


def graphed(run: Run) -> Run:
    """The same steps as a CUDA graph, without the host's time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(STEPS):
            run()
    return graph.replay


def repeated(repeat: Callable[[Run], Run], make: Callable[[], Run]) -> Run:
    """Steps of what `make` returns."""
    return repeat(make())


def sdpa(shape: LayerShape, tokens: int) -> Run:
    """Dense decoding as transformers has it."""
    q, k, v = _held(shape, tokens)
    return partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)


def split(shape: LayerShape, tokens: int) -> Run:
    """Dense decoding by the kernel that a rank uses, which divides the keys among its programs."""
    q, k, v = _held(shape, tokens)
    return partial(attend_all, AutoExecutor(), AttentionCall(q, k, v), k, v)


def _held(shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (shape.random(shape.kv_heads, tokens, seed) for seed in (1, 2))
    return shape.random(shape.heads, 1), k, v


def star(shape: LayerShape, ranks: Ranks, tokens: int) -> Run:
    """One token over all ranks; the last one holds the tail."""
    share = tokens // ranks.size
    k, v = (shape.random(shape.kv_heads, share, seed) for seed in (1, 2))
    new_k, new_v = (shape.random(shape.kv_heads, TAIL, seed) for seed in (3, 4))
    q, shard, owner = shape.random(shape.heads, 1), Shard(k, v, (share,)), ranks.rank == ranks.size - 1
    executor = AnchoredBlockExecutor(AutoExecutor(), ranks)

    def step() -> Tensor:
        return executor.attend(AttentionCall(q, new_k, new_v), shard, owner=owner, lse=False)[0]

    return step
