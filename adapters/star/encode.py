"""Phase 1: the blocks of a context, one after the other, each behind the anchor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from attrs import define, evolve, field
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.memory import Memory

from .anchor import Anchor, Keys
from .attention import Switch
from .executor import Shard
from .layout import Layout
from .ranks import Ranks

Inner = Callable[[AttentionCall, Memory], Tensor]
"""Attention to (anchor, block): output ``[B, Hq, Nq, Dv]`` of a call; the memory is the block's own."""


@define(eq=False)
class Block:
    """The phase of one block: `row` of the batch, its first token at `at` among those that this rank holds.

    before: tokens of the anchor in front of it. sends: its end completes the anchor. again: this rank has more blocks.
    """

    inner: Inner
    ranks: Ranks
    anchor: Anchor
    held: dict[int, Shard]
    row: int
    at: int
    before: int
    sends: bool
    again: bool
    memory: Memory = field(factory=Memory)

    def attend(self, call: AttentionCall) -> Tensor:
        """Output of a block's rows over (anchor, block), whose keys it keeps."""
        held, row = self.held[call.layer], slice(self.row, self.row + 1)
        inside = slice(self.at, self.at + call.k.shape[2])
        held.k[row, :, inside], held.v[row, :, inside] = call.k, call.v
        here = held.k[row], held.v[row]
        if self.sends:
            self.anchor.send(*(x[:, :, : self.anchor.length] for x in here))
        if self.before:
            front = here if self.ranks.rank == 0 else self.anchor.take(call.layer, keep=self.again)
            k, v = (torch.cat([x[:, :, : self.before], y], 2) for x, y in zip(front, (call.k, call.v), strict=True))
            call = evolve(call, k=k, v=v)
        return self.inner(call, self.memory)


@torch.no_grad()
def encode(
    switch: Switch,
    ranks: Ranks,
    layers: dict[int, Keys],
    inner: Inner,
    rows: Sequence[Sequence[int]],
    layouts: Sequence[Layout],
) -> dict[int, Shard]:
    """This rank's keys of the contexts, by layer; empty where it has none. rows: token ids. Every rank calls it."""
    lengths = tuple(layout.held(ranks.rank) for layout in layouts)
    held = {layer: Shard.empty(keys, lengths) for layer, keys in layers.items()} if any(lengths) else {}
    device = next(switch.decoder.parameters()).device
    for row, (ids, layout) in enumerate(zip(rows, layouts, strict=True)):
        share, first = layout.share(ranks.rank), layout.first(ranks.rank)
        anchor = Anchor(ranks, layers, layout.prefix)
        for number in share:
            span = layout.span(number)
            phase = Block(
                inner=inner,
                ranks=ranks,
                anchor=anchor,
                held=held,
                row=row,
                at=span.start - first,
                before=layout.before(number),
                sends=layout.sends and ranks.rank == 0 and number == layout.anchors - 1,
                again=number != share[-1],
            )
            tokens = torch.tensor([list(ids[span.start : span.stop])], dtype=torch.int64, device=device)
            positions = torch.arange(span.start, span.stop, device=device)[None]
            with switch.to(phase):
                switch.decoder(input_ids=tokens, position_ids=positions, use_cache=False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that the host knows how far it is, once a block
            ranks.seen = time.monotonic()
        if layout.sends:
            anchor.finish()
    return held
