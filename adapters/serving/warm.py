"""Kernels are compiled when the engine starts, not while its first request waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.metrics import watched_recall
from sparseprefill.pages import Pages
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import ALL_ROWS

from .failures import ends_engine, reason
from .layer import Layer
from .runtime import Runtime

LAYERS = 2
"""Layers that take part: what a method finds in one, it may use in the next."""
TOGETHER = 2
"""Requests that share the made-up steps of several."""
FEW, SHARE = 128, 128
"""Rows of a short chunk behind the longest context: at least so many, and one of so many keys. Kernels then read pages
in place, which they may have copied for more rows; they are compiled for each."""
SMALL, ODD = 300, 3
"""Tokens of a short prompt; how far others are from a whole number of groups."""
FILLED = 4
"""Pages of the made-up cache, which stand for all of a request's."""
Where = Callable[[Tensor, Tensor, int], Pages]
"""Makes pages of a cache, a table, and the number of keys."""
log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Sizes:
    """Sizes of the calls of one kind of layer.

    query_heads, kv_heads, head_dim, page: of a layer and its cache. stored: type of the cache's numbers. dtype: of the
    model. outside: whether a page holds one head's tokens together. step: tokens of the longest chunk. longest: of the
    longest request. small: query rows of a call that is computed with every key, 0 where none is. device: of them all.
    """

    device: torch.device
    query_heads: int
    kv_heads: int
    head_dim: int
    page: int
    stored: torch.dtype
    dtype: torch.dtype
    outside: bool
    step: int
    longest: int
    small: int = 0

    def cache(self) -> Tensor:
        """``[FILLED, Hkv, page, 2 * D]`` as vLLM lays it out; numbers that are finite in every type."""
        shape = (FILLED, self.kv_heads, self.page, 2 * self.head_dim)
        order = (0, 1, 2, 3) if self.outside else (0, 2, 1, 3)
        made = torch.rand([shape[i] for i in order], dtype=torch.float32, device=self.device)
        return ((made * 64).to(torch.uint8) if self.stored.itemsize == 1 else made.to(self.stored)).permute(order)

    def calls(self, tail: int) -> list[tuple[int, int, int]]:
        """Query rows, keys, tokens of the prompt.

        A short prompt, and a chunk that is a prompt; where a prompt's end has a dense tail, one that others follow,
        which has none. Chunks behind twice their rows, four times and so on up to the longest context, and there two
        short ones: kernels read few pages in place and copy others, and order uneven lists. Most begin and end inside
        groups of tokens, which kernels load otherwise than whole ones.
        """
        longest = self.longest
        first = min(self.step, longest)
        found = [(rows, rows, rows) for rows in (min(SMALL, first), first // FEW * FEW, first) if rows]
        if 0 < tail < ALL_ROWS and first < longest:
            found.append((first, first, first << 1))
        half = min(self.step, (longest >> 1) - ODD)  # of the keys, or less: lists are then uneven
        between = [(self.step << i) - ODD for i in range(1, (longest // self.step).bit_length())]
        several = [
            (rows, keys) for rows in (first, half) for keys in (longest, *between) if 0 < rows <= keys <= longest
        ]
        found += [(*one, longest) for one in several]
        few, whole = max(1, longest // SHARE // FEW) * FEW, longest // FEW * FEW
        if few + ODD < min(self.step, longest >> 1):
            found += [(few, whole, longest), (few + ODD, whole - ODD, longest)]
        return [*dict.fromkeys(found)]


def warm(
    pipeline: Pipeline,
    layers: Sequence[Layer],
    sizes: Sizes,
    pages: Where,
    first_head: int = 0,
    *,
    recall: bool = False,
) -> None:
    """Run a method on made-up requests in a few of the layers, as a prefill does, alone and several in a step.

    recall: whose recall is measured.
    """
    for rows, keys, prompt in sizes.calls(pipeline.tail):
        memory = Memory()
        for layer in layers[:LAYERS]:
            (call,) = _step(layer, sizes, pages, rows, keys, prompt, first_head)
            result = pipeline.run(call, memory)
            if recall:
                watched_recall(call, result)
        if pipeline.executing.together:
            half = max(1, rows // TOGETHER)
            shorter = (half, keys - rows + half, prompt - rows + half)
            memories = [Memory() for _ in range(TOGETHER)]
            for layer in layers[:LAYERS]:
                pipeline.run_many(_step(layer, sizes, pages, *shorter, first_head, TOGETHER), memories)
    if sizes.small:
        (call,) = _step(layers[0], sizes, pages, sizes.small, sizes.small, None, first_head)
        pipeline.executor.execute(call, Plan(SparseMask.full(call)))


def _step(
    layer: Layer,
    sizes: Sizes,
    pages: Where,
    rows: int,
    keys: int,
    prompt: int | None,
    first_head: int,
    requests: int = 1,
) -> list[AttentionCall]:
    """Calls of requests in one cache, whose rows follow each other as a step has them."""
    shape = (requests * rows, sizes.query_heads, sizes.head_dim)
    q, cache = torch.randn(shape, device=sizes.device, dtype=sizes.dtype), sizes.cache()
    table = torch.arange(-(-keys // sizes.page), device=sizes.device, dtype=torch.int32) % FILLED
    given = {"first_head": first_head, "prompt_lengths": prompt, **layer.facts}
    parts = [part.transpose(0, 1)[None] for part in q.split(rows)]
    return [AttentionCall.of_pages(part, pages(cache, table, keys), **given) for part in parts]


def warm_engine(runtime: Runtime, layers: Sequence[Layer], sizes: Sizes, pages: Where) -> None:
    """`warm` for an engine's layers, once for each kind; what goes wrong is logged, no more."""
    if not layers or not kernels.serve_device(sizes.device) or sizes in runtime.warmed:
        return
    runtime.warmed.add(sizes)
    begin = time.perf_counter()
    try:
        with torch.inference_mode():
            for session in (one.session for one in runtime.every):
                for pipeline in session.route.known:
                    warm(pipeline, layers, sizes, pages, runtime.model.first_head, recall=session.measures_recall)
            torch.cuda.synchronize(sizes.device)
    except Exception as error:  # the engine starts all the same, and a request that fails says why
        if ends_engine(error):
            raise
        log.warning("sparseprefill: compiling the kernels at start failed: %s", reason(error))
        log.debug("warm", exc_info=error)
    else:
        log.info("sparseprefill: kernels are ready, in %.1f s", time.perf_counter() - begin)
    finally:
        torch.cuda.empty_cache()  # the server has counted this memory as its own
