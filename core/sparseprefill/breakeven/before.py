"""Tokens that a prompt found in a cache, by how they were computed."""

from __future__ import annotations

from attrs import frozen

GOES_ON = "behind cached tokens ({before}) the prompt goes on {how}"
LEFT = "behind cached tokens ({before}) the prompt runs sparse, by what is left of it"


@frozen(kw_only=True)
class Before:
    """Tokens of a prompt that a cache held as it began: computed by a method's mask (sparse), with every key (dense),
    or nobody here knows how. methods: that computed the sparse ones. why: nobody knows.

    Whoever keeps the cache writes down how each of its rows was written. A token is sparse if any layer computed it by
    a method; what decoding wrote is dense.
    """

    sparse: int = 0
    dense: int = 0
    unknown: int = 0
    methods: tuple[str, ...] = ()
    why: str = ""

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.sparse + self.dense + self.unknown

    @property
    def mostly(self) -> str:
        """ "sparse" or "dense" where more than half of them are; else "unknown"."""
        found = max(("sparse", self.sparse), ("dense", self.dense), key=lambda one: one[1])
        return found[0] if 2 * found[1] > self.tokens else "unknown"

    def __str__(self) -> str:
        by = f" by {', '.join(self.methods)}" if self.methods else ""
        parts = (
            f"{self.sparse:,} computed sparse{by}" if self.sparse else "",
            f"{self.dense:,} computed dense" if self.dense else "",
            f"{self.unknown:,} nobody knows how{': ' if self.why else ''}{self.why}" if self.unknown else "",
        )
        return "; ".join(one for one in parts if one)
