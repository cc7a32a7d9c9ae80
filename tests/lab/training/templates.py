"""Sentences as token templates: fixed tokens and open places, filled for a whole batch by lookups.

A place is written ``{pool}`` or ``{pool.name}``. A space before it belongs to what fills it, as in the tokenizer.
"""

import re
from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from .pools import Piece, Pools

IGNORED, TEXT, ANSWER = 0, 1, 2
"""How a token counts in the loss: not at all, as text, as part of an answer."""

KEYS: Mapping[str, str] = {
    "pair": "{adjective} {noun}",
    "words": "{first}-{second}",
    "uuid": "{hex8}-{hex4}-{version}-{variant}-{hex12}",
    "name": "{name}",
    "coded": "{coded}",
    "number": "{digits7}",
}
"""Kinds of keys and values, each made of one or more places."""

_PLACE = re.compile(r" ?\{([\w.]+)\}")
_SPACED = frozenset({"adjective", "noun", "first", "name", "shot", "coded", "hex8"})


@frozen(eq=False)
class Lines:
    """Filled lines of one template: (rows, lines, width); `kinds` is (width,), since a column is of one place."""

    tokens: Tensor
    valid: Tensor
    kinds: Tensor


def place(kind: str, name: str) -> str:
    """Return the template of a key or value of some kind whose places carry a name."""
    return re.sub(r"\{(\w+)\}", rf"{{\1.{name}}}", KEYS[kind])


class Template:
    """One sentence; its line break, where it has one, is part of it.

    Attributes:
        places: Full names of the open places, in order, each once.
        mean: The tokens of a filled line, on average.
    """

    def __init__(self, pools: Pools, text: str, answer: str = "", end: str = "") -> None:
        """Encode a sentence.

        Args:
            pools: What encodes text and knows the sizes of what fills a place.
            text: What is read. What fills a place for the first time can't be guessed and counts nothing.
            answer: What is to be answered.
            end: What follows the answer.
        """
        self._pools = pools
        self._parts: list[tuple[Tensor | str, int]] = []
        self._kinds: Tensor | None = None
        self.places: tuple[str, ...] = ()
        self.mean = 0.0
        self._always = torch.ones(1, dtype=torch.bool, device=pools.device)
        for part, fixed, first in ((text, TEXT, IGNORED), (answer, ANSWER, ANSWER), (end, TEXT, TEXT)):
            self._add(part, fixed, first)

    def fill(self, rows: int, lines: int, pieces: Mapping[str, Piece]) -> Lines:
        """Fill many lines: a piece for each of `places`, all (rows, lines, any width)."""
        tokens, valid = [], []
        for part, _ in self._parts:
            if isinstance(part, str):
                tokens.append(pieces[part].tokens)
                valid.append(pieces[part].valid)
            else:
                tokens.append(part.expand(rows, lines, -1))
                valid.append(self._always.expand(rows, lines, part.shape[-1]))
        if self._kinds is None:  # a pool's strings are always of one width
            widths = torch.tensor([part.shape[-1] for part in tokens])
            kinds = torch.tensor([kind for _, kind in self._parts])
            self._kinds = kinds.repeat_interleave(widths).to(self._pools.device)
        return Lines(torch.cat(tokens, -1), torch.cat(valid, -1), self._kinds)

    def _add(self, text: str, fixed: int, first: int) -> None:
        done = 0
        for found in _PLACE.finditer(text):
            name = found[1]
            pool = name.split(".")[0]
            # A number's space is a token of its own, and a plain string's belongs to what stands before it.
            begin = found.start() if pool in _SPACED else found.start(1) - 1
            if pool in _SPACED and text[begin] != " ":
                raise ValueError(f"no space stands before {{{name}}} in {text!r}")
            self._fixed(text[done:begin], fixed)
            self._parts.append((name, fixed if name in self.places else first))
            self.places = tuple(dict.fromkeys((*self.places, name)))
            self.mean += self._pools.mean(pool)
            done = found.end()
        self._fixed(text[done:], fixed)

    def _fixed(self, text: str, kind: int) -> None:
        if text:
            tokens = torch.tensor(self._pools.encode(text), device=self._pools.device)
            self._parts.append((tokens, kind))
            self.mean += len(tokens)
