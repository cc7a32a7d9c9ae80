"""What the requests of a load look like, from the text of ``--shape``."""

from __future__ import annotations

from attrs import field, frozen
from sparseprefill.adapters.cli.group import CommandError

from sparseprefill.validate import whole

from .engine import prompt

EXAMPLES = "whole:32768, prefix:131072+8192 or mix:2048,8192,32768"
LEAST = 16
"""Tokens of a request's own part, at least."""


@frozen(kw_only=True)
class Shape:
    """text: as it was asked for. prefix: tokens that all requests share, 0 for none. lengths: tokens of a request's own
    part, in turns."""

    text: str
    prefix: int = field(default=0, validator=whole(0))
    lengths: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``whole:N``, ``prefix:N+N`` or ``mix:N,N``; CommandError for another text."""
        kind, colon, rest = text.partition(":")
        parts = rest.split("+" if kind == "prefix" else ",")
        fits = {"whole": len(parts) == 1, "prefix": len(parts) == 2, "mix": len(parts) > 1}
        if not colon or not fits.get(kind) or not all(part.isascii() and part.isdigit() for part in parts):
            raise CommandError(f"--shape {text}: no such shape; write {EXAMPLES}")
        numbers = [int(part) for part in parts]
        if min(numbers) < LEAST:
            raise CommandError(f"--shape {text}: {min(numbers)} tokens are too few; write {LEAST} or more")
        return cls(text=text, prefix=numbers[0], lengths=(numbers[1],)) if kind == "prefix" else cls.of(text, numbers)

    @classmethod
    def of(cls, text: str, lengths: list[int]) -> Shape:
        """Without a prefix."""
        return cls(text=text, lengths=tuple(lengths))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.prefix + max(self.lengths)

    def kept(self, requests: int, answer: int) -> int:
        """Tokens of so many requests and their answers, the prefix once."""
        return self.prefix + sum(self.length(i) + answer for i in range(requests))

    def length(self, request: int) -> int:
        """Tokens of one request's own part."""
        return self.lengths[request % len(self.lengths)]

    def shared(self, vocabulary: int, seed: int) -> list[int]:
        """The tokens of the prefix."""
        return prompt(self.prefix, vocabulary, seed)

    def prompts(self, requests: int, vocabulary: int, seed: int, turn: int) -> list[list[int]]:
        """Token ids of so many prompts, all different but for the prefix; those of another turn are others."""
        first, shared = 1 + 1_000_003 * seed + 10_007 * turn, self.shared(vocabulary, seed)
        return [shared + prompt(self.length(i), vocabulary, first + i) for i in range(requests)]
