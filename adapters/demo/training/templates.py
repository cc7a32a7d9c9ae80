"""The task sentences as token templates, filled with keys and values by one lookup."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import formats
from ..words import ADJECTIVES, NOUNS, Key

IGNORED, TEXT, ANSWER = 0, 1, 2
"""How a token counts in the loss: not at all, as text, as part of an answer."""

_VALUE = "1234567"


class Template:
    """One sentence as a line of tokens, with open places for keys and digits.

    Attributes:
        kinds: How each token counts in the loss.
        length: The tokens of the line, its line break included.
    """

    def __init__(self, vocabulary: "Words", text: str, answer: str, keys: int) -> None:
        tokens = vocabulary.encode(text + answer + "\n")
        start = len(vocabulary.encode(text))
        adjectives = vocabulary.adjectives[:keys].tolist()
        nouns = vocabulary.nouns[:keys].tolist()
        size = len(tokens)
        index, kinds, seen = list(range(size)), [TEXT] * size, 0
        for place, token in enumerate(tokens):
            if answer and start <= place < size - 1:
                kinds[place] = ANSWER
            if token in adjectives:
                index[place] = size + adjectives.index(token)
            elif token in nouns:
                index[place] = size + keys + nouns.index(token)
            elif vocabulary.in_value(tokens, place):
                index[place] = size + 2 * keys + seen
                seen += 1
            if index[place] >= size and kinds[place] == TEXT:
                kinds[place] = IGNORED
        device = vocabulary.device
        self.length = size
        self.kinds = torch.tensor(kinds, device=device)
        self._tokens = torch.tensor(tokens, device=device)
        self._index = torch.tensor(index, device=device)

    def fill(self, adjectives: Tensor, nouns: Tensor, digits: Tensor) -> Tensor:
        """Fill many lines.

        Args:
            adjectives: Tokens, (rows, lines, keys).
            nouns: Tokens, (rows, lines, keys).
            digits: Tokens, (rows, lines, values * digits).

        Returns:
            Tokens, (rows, lines, length).
        """
        fixed = self._tokens.expand(*adjectives.shape[:2], -1)
        return torch.cat([fixed, adjectives, nouns, digits], dim=-1)[..., self._index]


class Words:
    """The tokens of words and digits, and the templates made of them."""

    def __init__(self, tokenizer: object, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self.device = device
        self.adjectives = torch.tensor([self.encode(f" {w}")[0] for w in ADJECTIVES], device=device)
        self.nouns = torch.tensor([self.encode(f" {w}")[0] for w in NOUNS], device=device)
        self.digits = torch.tensor([self.encode(d)[0] for d in "0123456789"], device=device)
        self._digits = frozenset(self.digits.tolist())
        keys: list[Key] = list(zip(ADJECTIVES, NOUNS, strict=True))
        key, alone = keys[0], formats.answer(keys[:1], [_VALUE])
        self.needle = Template(self, formats.needle(key, _VALUE), "", 1)
        self.one = Template(self, formats.one_question(key), alone, 1)
        self.values = {n: Template(self, formats.values_question(key, n), _answer([key] * n), 1) for n in range(2, 6)}
        self.keys = {n: Template(self, formats.keys_question(keys[:n]), _answer(keys[:n]), n) for n in range(2, 6)}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a start token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
        return ids

    def in_value(self, tokens: Sequence[int], place: int) -> bool:
        """Tell whether a token belongs to a value, not to a count of values."""
        if tokens[place] not in self._digits:
            return False
        beside = [*tokens[max(place - 1, 0) : place], *tokens[place + 1 : place + 2]]
        return any(token in self._digits for token in beside)


def _answer(keys: Sequence[Key]) -> str:
    return formats.answer(keys, [_VALUE] * len(keys))
