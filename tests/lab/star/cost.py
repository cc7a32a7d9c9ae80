"""What a row may take, so that none begins which would not end in time: by its products, below the usual rate."""

from __future__ import annotations

from attrs import frozen
from sparseprefill.adapters.star.layout import Layout

from .layer import LayerShape

RATE = 400e12  # products and sums a second; the kernels reach about 550e12 on the GPUs that the table is for
PARAMETERS = 218.1e6  # of one layer of the model


@frozen
class Cost:
    """Seconds on one GPU, generously."""

    shape: LayerShape

    def pairs(self, count: float) -> float:
        """Attention of so many pairs of a query and a key, in all heads."""
        return self._seconds(4 * self.shape.heads * self.shape.head_dim * count)

    def dense(self, tokens: int, ranks: int = 1) -> float:
        """A whole prompt, causal, divided by ranks."""
        return self.pairs(tokens**2 / 2 / ranks)

    def star(self, layout: Layout) -> float:
        """The blocks of one rank."""
        spans = [(len(layout.span(n)), layout.before(n)) for n in layout.share(layout.ranks - 1)]
        return self.pairs(sum(size * (size / 2 + before) for size, before in spans))

    def linear(self, tokens: float) -> float:
        """The products of a layer with its weights."""
        return self._seconds(2 * PARAMETERS * tokens)

    def _seconds(self, work: float) -> float:
        return work / RATE
