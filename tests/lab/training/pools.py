"""Pools of strings as tokens on the device, from which the open places of sentences are filled."""

import random
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import frozen
from sparseprefill.adapters.demo import formats
from sparseprefill.adapters.demo.formats import ADJECTIVES, NOUNS
from torch import Tensor

from .lexicon import text_words
from .ruler import FWE_DOTS, FWE_LETTERS, VT_LETTERS, VT_SHOT_LETTERS

LARGE = 1 << 14
"""Strings of a pool that is a sample of many more."""

_LONGEST_WORD = 6

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Tokens of each of several strings, without a start token."""


@frozen(eq=False)
class Piece:
    """Tokens of what fills one place of many lines: (rows, lines, width), and which of them are not padding."""

    tokens: Tensor
    valid: Tensor

    def __getitem__(self, lines: slice) -> "Piece":
        """The piece of some of the lines."""
        return Piece(self.tokens[:, lines], self.valid[:, lines])

    def repeat(self, count: int) -> "Piece":
        """Each line `count` times in a row."""
        return Piece(self.tokens.repeat_interleave(count, 1), self.valid.repeat_interleave(count, 1))


class Pool:
    """Strings as padded tokens on a device."""

    def __init__(self, encode: Encode, texts: Iterable[str], device: torch.device) -> None:
        rows = encode(list(texts))
        width = max(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]
        self._tokens = torch.tensor(padded, device=device)
        sizes = torch.tensor([len(row) for row in rows], device=device)
        self._valid = torch.arange(width, device=device) < sizes[:, None]
        self.count = len(rows)
        self.mean = sum(map(len, rows)) / len(rows)

    def piece(self, index: Tensor) -> Piece:
        """The strings at `index`, (rows, lines)."""
        return Piece(self._tokens[index], self._valid[index])


class Pools:
    """All pools, and the randomness with which they are drawn from."""

    def __init__(self, tokenizer: Any, lines: Sequence[str], device: torch.device, seed: int) -> None:
        """Encode the pools.

        Args:
            tokenizer: A ``tokenizers.Tokenizer``.
            lines: The filler text whose words serve as keys.
            device: Where batches are made.
            seed: Chooses the strings of the large pools, and then all that is drawn.
        """
        self._tokenizer, self.device = tokenizer, device
        self.generator = torch.Generator(device).manual_seed(seed)
        rng = random.Random(f"pools/{seed}")
        self._digits = torch.tensor([self.encode(digit)[0] for digit in string.digits], device=device)
        words = self._words(rng, text_words(lines)[0])
        names = ["".join(rng.choices(string.ascii_uppercase, k=VT_LETTERS)) for _ in range(LARGE)]
        shorter = ["".join(rng.choices(string.ascii_uppercase, k=VT_SHOT_LETTERS)) for _ in range(LARGE // 4)]
        coded = ["".join(rng.choices(string.ascii_lowercase, k=FWE_LETTERS)) for _ in range(LARGE)]
        hexes = {n: [f"{rng.getrandbits(4 * n):0{n}x}" for _ in range(LARGE)] for n in (3, 4, 8, 12)}
        spaced = {
            "adjective": ADJECTIVES,
            "noun": NOUNS,
            "first": words,
            "name": names,
            "shot": shorter,
            "coded": [FWE_DOTS, *coded],
            "hex8": hexes[8],
        }
        plain = {
            "second": words,
            "hex4": hexes[4],
            "version": [f"4{text}" for text in hexes[3]],
            "variant": [f"{rng.choice('89ab')}{text}" for text in hexes[3]],
            "hex12": hexes[12],
            "opening": formats.openings(),
        }
        texts = {name: [f" {text}" for text in pool] for name, pool in spaced.items()} | plain
        self._pools = {name: Pool(self.encode_all, pool, device) for name, pool in texts.items()}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a start token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each of several texts."""
        return [row.ids for row in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def mean(self, name: str) -> float:
        """Tokens of one string of a pool on average; a name ``digitsN`` means N digits."""
        return float(name[6:]) if name.startswith("digits") else self._pools[name].mean

    def draw(self, name: str, rows: int, lines: int) -> Piece:
        """Draw strings of a pool."""
        return self._pools[name].piece(self.integers(self._pools[name].count, rows, lines))

    def piece(self, name: str, index: Tensor) -> Piece:
        """The strings of a pool at an index, (rows, lines)."""
        return self._pools[name].piece(index)

    def digits(self, rows: int, lines: int, count: int) -> Piece:
        """Draw numbers of `count` digits; the first is never 0."""
        first = self.integers(9, rows, lines, 1) + 1
        return self.as_digits(torch.cat([first, self.integers(10, rows, lines, count - 1)], dim=-1))

    def as_digits(self, values: Tensor) -> Piece:
        """Digits, (rows, lines, count), as tokens."""
        tokens = self._digits[values]
        return Piece(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def any_tokens(self, *shape: int) -> Tensor:
        """Draw tokens of the whole vocabulary but its special ones, the first two."""
        return 2 + self.integers(self._tokenizer.get_vocab_size() - 2, *shape)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Draw integers."""
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    def rand(self, *shape: int) -> Tensor:
        """Draw numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _words(self, rng: random.Random, real: Sequence[str]) -> list[str]:
        """Words of the text, and as many made of two pieces of the vocabulary, so that no key is known by heart."""
        vocabulary = sorted(self._tokenizer.get_vocab())
        pieces = [piece for piece in vocabulary if piece.isascii() and piece.isalpha() and piece.islower()]
        made = ["".join(rng.choices(pieces, k=2)) for _ in range(LARGE)]
        words = [*real, *(word for word in made if 3 <= len(word) <= 12)]
        ids = self.encode_all([f" {word}" for word in words])
        return [word for word, row in zip(words, ids, strict=True) if len(row) <= _LONGEST_WORD]
