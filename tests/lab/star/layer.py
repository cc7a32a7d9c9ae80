"""One layer's attention: dense on one GPU, PyTorch's ring, and Star through the code that a model runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen
from sparseprefill.adapters.calibration.measure import HeadSizes
from sparseprefill.adapters.star.anchor import Anchor, Keys
from sparseprefill.adapters.star.encode import Block, Inner
from sparseprefill.adapters.star.executor import Shard
from sparseprefill.adapters.star.layout import Layout
from sparseprefill.adapters.star.ranks import Ranks
from sparseprefill.adapters.star.unmasked import attend_all
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.bench.clock import Run
from sparseprefill.call import AttentionCall
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.dense import dense
from sparseprefill.memory import Memory

Tensors = Callable[[int, int], tuple[Tensor, Tensor, Tensor]]
"""q, k and v of a block: of so many tokens, by its number."""


@frozen(kw_only=True)
class LayerShape(HeadSizes):
    """A layer's heads, by default Llama 3.1 8B's, and where its tensors are made."""

    device: torch.device = field(factory=lambda: torch.device("cuda"))

    def random(self, heads: int, tokens: int, seed: int = 0) -> Tensor:
        """``[1, heads, tokens, head_dim]``, made on the device."""
        source = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(
            1, heads, tokens, self.head_dim, dtype=self.torch_dtype, device=self.device, generator=source
        )

    def qkv(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of so many tokens."""
        q, k, v = (
            self.random(h, tokens, 3 * seed + i) for i, h in enumerate((self.heads, self.kv_heads, self.kv_heads))
        )
        return q, k, v

    def striped(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with logits that stand out by 14 at 5 % of the keys."""
        q, k, v = self.qkv(tokens, seed)
        source = torch.Generator(self.device).manual_seed(1000 + seed)
        column = torch.rand(1, self.kv_heads, tokens, device=self.device, generator=source) < 0.05
        step = math.sqrt(14 * math.sqrt(self.head_dim)) / math.sqrt(self.head_dim)
        return q + step, k + (step * column[..., None]).to(self.torch_dtype), v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by cuDNN; by whatever there is on a CPU."""
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def one_gpu(shape: LayerShape, tokens: int) -> Run:
    """Dense attention of the whole prompt on each GPU by itself."""
    return partial(sdpa, *shape.qkv(tokens))


def ring(shape: LayerShape, mesh: Any, tokens: int, rotate: str = "allgather") -> Run:
    """PyTorch's context parallelism, cuDNN inside; it takes no grouped heads, so K and V are repeated beforehand.

    rotate: how keys go round: allgather, PyTorch's default, or alltoall.
    """
    made = [shape.random(shape.heads, tokens // mesh.size(), seed) for seed in range(3)]

    def run() -> Tensor:
        with circle(mesh, shape.device, rotate):
            return sdpa(*made)

    return run


@contextmanager
def circle(mesh: Any, device: torch.device, rotate: str = "allgather") -> Iterator[None]:
    """Inside it `scaled_dot_product_attention` takes each rank's part of the prompt; heads and tails balanced."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    # Each rank has its part already. The context wants a buffer to cut, and by its length balances heads and tails.
    dummy = torch.zeros(2 * mesh.size(), device=device)
    set_rotate_method(rotate)
    try:
        with context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[0], no_restore_buffers={dummy}):
            yield
    finally:
        set_rotate_method("allgather")


def star(shape: LayerShape, ranks: Ranks, layout: Layout, inner: Inner, tensors: Tensors | None = None) -> Run:
    """Phase 1 of one layer: the anchor's keys sent, all blocks of this rank attended to.

    tensors: q, k, v of a block by its number, for methods that look at them; random otherwise.
    """
    keys = Keys(shape.kv_heads, shape.head_dim, shape.head_dim, shape.torch_dtype, shape.device)
    share, first = layout.share(ranks.rank), layout.first(ranks.rank)
    held = {0: Shard.empty(keys, (max(layout.held(ranks.rank), 1),))}
    calls = {n: AttentionCall(*(tensors or shape.qkv)(len(layout.span(n)), n)) for n in share}

    def run() -> None:
        anchor = Anchor(ranks, {0: keys}, layout.prefix)
        for number, call in calls.items():
            Block(
                inner=inner,
                ranks=ranks,
                anchor=anchor,
                held=held,
                row=0,
                at=layout.span(number).start - first,
                before=layout.before(number),
                sends=layout.sends and ranks.rank == 0 and number == layout.anchors - 1,
                again=number != share[-1],
            ).attend(call)
        if layout.sends:
            anchor.finish()

    return run


def pieces(call: AttentionCall, memory: Memory) -> Tensor:
    """Dense attention to (anchor, block) as two of torch's kernels and a merge: the block, causal, and the anchor."""
    before = call.kv_len - call.q.shape[2]
    block = evolve(call, k=call.k[:, :, before:], v=call.v[:, :, before:])
    own = dense(block, AutoExecutor())
    if not before:
        return own.out
    out, lse = attend_all(AutoExecutor(), block, call.k[:, :, :before], call.v[:, :, :before])
    share = torch.sigmoid(lse - own.lse)[..., None]
    for head in range(0, out.shape[1], call.group):  # a group at a time: float32 copies of all would be gigabytes
        here = slice(head, head + call.group)
        own.out[:, here] = torch.lerp(own.out[:, here].float(), out[:, here].float(), share[:, here])
    return own.out
