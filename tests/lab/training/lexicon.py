"""Many words for keys: the lower-case words of the filler text, a part of them held back for evaluation."""

import re
from collections.abc import Iterable
from zlib import crc32

_WORD = re.compile(r"(?<![\w'])[a-z]{3,11}(?![\w'])")
_HELD_BACK = 10


def text_words(lines: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of some text, sorted: those for training and, about one in ten, those for evaluation."""
    words = sorted({word for line in lines for word in _WORD.findall(line)})
    held = [word for word in words if crc32(word.encode()) % _HELD_BACK == 0]
    return tuple(word for word in words if crc32(word.encode()) % _HELD_BACK), tuple(held)
