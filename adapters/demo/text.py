"""Filler text with its token counts, and the burying of needles in it.

The text is taken from the Python installation at hand: topics that ``help()`` shows, and docstrings. The repository
stores none of it. Other Python versions give slightly other text, and so other tasks for the same seed.
"""

from __future__ import annotations

import ast
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from attrs import field, frozen

from ..evaluation.texts import definitions, sources, uncollected

_SHORTEST, _LONGEST = 16, 120
_STEP = 256


@lru_cache(maxsize=1)
def text_lines() -> tuple[str, ...]:
    """Return the filler text as lines, always in the same order.

    A line holds printable ASCII only, with single spaces, and has neither a space nor a line break at its ends.
    """
    from pydoc_data.topics import topics

    docstrings = (ast.get_docstring(node) for path in sources() for node in definitions(path))
    with uncollected():  # of the syntax trees of a whole library: it would take more than half of the time
        texts = dict.fromkeys([*(topics[key] for key in sorted(topics)), *docstrings])
    return tuple(line for text in texts for line in _clean(text or ""))


def _clean(text: str) -> Iterator[str]:
    for raw in text.splitlines():
        line = " ".join(raw.split())
        fits = _SHORTEST <= len(line) <= _LONGEST
        if fits and line.isascii() and line.isprintable() and "magic number" not in line:
            yield line


@frozen(eq=False)
class Haystack:
    """Lines of filler text, measured with one tokenizer, which never merges across a line break.

    Lines are measured where a text reaches them, `_STEP` at a time: all of them take seconds.
    """

    tokenizer: Callable[..., Any]
    lines: tuple[str, ...]
    _counts: dict[int, tuple[int, ...]] = field(factory=dict, init=False)

    def count(self, number: int) -> int:
        """Tokens of a line, its line break included."""
        step, place = divmod(number, _STEP)
        if step not in self._counts:
            some = list(self.lines[step * _STEP : (step + 1) * _STEP])
            ids = self.tokenizer(some, add_special_tokens=False)["input_ids"]
            self._counts[step] = tuple(len(row) + 1 for row in ids)
        return self._counts[step][place]

    def tokens(self, line: str) -> int:
        """Number of a line's tokens, without start token or line break."""
        return len(self.tokenizer(line, add_special_tokens=False)["input_ids"])

    def bury(self, rng: random.Random, needles: Sequence[tuple[float, str]], length: int) -> str:
        """Text of at most ``length`` tokens that holds the needles, each with its depth, from 0 to 1, and its line.

        It falls short of ``length`` only where no line of filler text has the number of tokens that is left. rng:
        chooses where the filler text starts.
        """
        room = length - sum(self.tokens(line) + 1 for _, line in needles)
        if room < 0:
            raise ValueError(f"the needles and the question need {-room} more tokens")
        filler, counts = self._fill(rng.randrange(len(self.lines)), room)
        ends = list(accumulate(counts, initial=0))
        places = [(bisect_left(ends, depth * ends[-1]), line) for depth, line in needles]
        parts: list[str] = []
        done = 0
        for place, line in sorted(places, key=lambda spot: spot[0]):
            parts += [*filler[done:place], line]
            done = place
        return "".join(f"{part}\n" for part in [*parts, *filler[done:]])

    def _fill(self, start: int, room: int) -> tuple[list[str], list[int]]:
        filler: list[str] = []
        counts: list[int] = []
        while (count := self.count(start)) <= room:
            filler.append(self.lines[start])
            counts.append(count)
            room -= count
            start = (start + 1) % len(self.lines)
        every = range(len(self.lines)) if room > 1 else ()  # a line and its line break
        last = next((number for number in every if self.count(number) == room), None)
        if last is not None:
            filler.append(self.lines[last])
            counts.append(room)
        return filler, counts


@lru_cache(maxsize=8)
def haystack_of(tokenizer: Callable[..., Any], lines: tuple[str, ...] | None) -> Haystack:
    """Filler text, all of it where `lines` is None, for a tokenizer."""
    return Haystack(tokenizer, text_lines() if lines is None else lines)
