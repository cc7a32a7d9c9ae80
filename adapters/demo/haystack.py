"""Filler text with its token counts, and the burying of needles in it."""

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from attrs import frozen

from .text import text_lines


@frozen
class Haystack:
    """Lines of filler text, measured with one tokenizer, which never merges across a line break.

    counts: tokens of each line, its line break included. by_count: for each token count, one line that has it.
    """

    tokenizer: Callable[..., Any]
    lines: tuple[str, ...]
    counts: tuple[int, ...]
    by_count: dict[int, str]

    def tokens(self, line: str) -> int:
        """How many tokens a line has, without start token or line break."""
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
        while (count := self.counts[start]) <= room:
            filler.append(self.lines[start])
            counts.append(count)
            room -= count
            start = (start + 1) % len(self.lines)
        if room in self.by_count:
            filler.append(self.by_count[room])
            counts.append(room)
        return filler, counts


@lru_cache(maxsize=8)
def haystack_of(tokenizer: Callable[..., Any], lines: tuple[str, ...] | None = None) -> Haystack:
    """Measure filler text, by default all of it, with a tokenizer."""
    lines = text_lines() if lines is None else lines
    ids = tokenizer(list(lines), add_special_tokens=False)["input_ids"]
    counts = tuple(len(row) + 1 for row in ids)
    by_count = dict(zip(reversed(counts), reversed(lines), strict=True))
    return Haystack(tokenizer, lines, counts, by_count)
