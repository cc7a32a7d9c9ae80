"""Blocks of a context by rank. Sizes as the method `star-attention` has them on one device."""

from __future__ import annotations

from attrs import frozen

LONG, BLOCK = 131072, 32768  # section 3.4: a quarter of the context up to 128K tokens, then 32K


@frozen
class Sizes:
    """Parameters of the method, in tokens: block_size (None: see section 3.4), anchor_length (None: a block), tile."""

    block_size: int | None = None
    anchor_length: int | None = None
    tile: int = 128

    def layout(self, tokens: int, ranks: int) -> Layout:
        """The layout of so many tokens. Blocks and anchor are rounded up to whole tiles, the context down."""
        size = self.block_size
        if size is None:
            size = BLOCK if tokens > LONG else max(-(-tokens // 4), 1)
        block = self._up(size)
        anchor = block if self.anchor_length is None else self._up(self.anchor_length)
        return Layout(tokens // self.tile * self.tile, block, anchor, ranks)

    def _up(self, tokens: int) -> int:
        return -(-tokens // self.tile) * self.tile


@frozen
class Layout:
    """One batch row: `context` tokens of phase 1 in blocks of `block` tokens, the anchor before them, over `ranks`."""

    context: int
    block: int
    anchor: int
    ranks: int

    @property
    def count(self) -> int:
        """Number of blocks; the last may be short."""
        return -(-self.context // self.block)

    @property
    def prefix(self) -> int:
        """Tokens of the anchor that there are."""
        return min(self.anchor, self.context)

    @property
    def anchors(self) -> int:
        """Blocks that the anchor reaches into: rank 0 computes them, and sends their keys."""
        return -(-self.prefix // self.block)

    def share(self, rank: int) -> range:
        """The blocks of a rank: as even as can be, the first ranks one more, rank 0 at least those of the anchor.

        Rank 0 is a first rank on purpose: a block of the anchor has no anchor before it, and costs a third.
        """
        first = max(self.anchors, -(-self.count // self.ranks))
        if rank == 0:
            return range(min(first, self.count))
        rest, others = max(self.count - first, 0), self.ranks - 1
        even, more = divmod(rest, others)
        begin = first + (rank - 1) * even + min(rank - 1, more)
        return range(begin, begin + even + (rank - 1 < more)) if rest else range(0)

    def span(self, number: int) -> range:
        """The tokens of a block."""
        return range(number * self.block, min((number + 1) * self.block, self.context))

    def before(self, number: int) -> int:
        """Tokens of the anchor that stand before a block."""
        return min(self.anchor, number * self.block)

    def held(self, rank: int) -> int:
        """Context tokens whose keys a rank keeps."""
        return sum(len(self.span(number)) for number in self.share(rank))

    def first(self, rank: int) -> int:
        """Position of the first of them."""
        share = self.share(rank)
        return share.start * self.block if share else self.context

    @property
    def sends(self) -> bool:
        """True if there is an anchor, and any rank but the first has a block, so that it has to travel."""
        return self.prefix > 0 and any(self.share(rank) for rank in range(1, self.ranks))
