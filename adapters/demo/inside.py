"""Answers inside a text: lines whose value only a line far before them gives, read in one prefill and never decoded.

A question behind a prompt is answered by the prompt's last rows, which the dense tail serves whatever a method keeps.
Here the rows in the middle must look back themselves, as in a chat of many turns, a log, code, or any cache that is
read again. Four families, in the wordings that the embedded model knows:

- ``restated``: a fact, and much later the same fact again;
- ``turns``: a fact, and much later a question with its answer, after which the text goes on;
- ``linked``: a fact about one key, and later the same value for another key that is said to have it, twice in a row;
- ``lists``: a question for several values whose answer breaks off, and goes on after other text.

An answer is right if each of its tokens is the likeliest one while the text itself is read (teacher forcing).
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from attrs import frozen

from . import formats
from .formats import Key

Family = Literal["restated", "turns", "linked", "lists"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""All families, in the order of the tables."""
SHORTEST = 4096
"""Tokens of the shortest text: a shorter one has no room to look back beyond `WINDOW` many times."""
WINDOW = 1024
"""Most answers lie farther behind their fact, so that a sliding window of so many tokens cannot find them."""
MOST = 8
"""The most answers of one family."""
Place = tuple[Family, int, int]
"""An answer in a text: its family, its first character, and the one behind its last."""
_NEAR, _FAR = 288, WINDOW + 256
"""Filler tokens between a fact and its answer at least: of one answer in ten, and of the others."""
_END = 320
"""Filler tokens behind the last answer, so that it stands in no row that a dense tail serves."""
_FACTS = (
    "The special magic number for {key} is {value}.",
    "One of the special magic numbers for {key} is: {value}.",
    "The code for {key} is {value}.",
    "Note: {key} has {value}.",
    "item {key} = {value}",
)

_LINKS = (
    "The special magic number for {new} and for {key} is {value}.",
    "The special magic number for {new} is the one for {key}, and the special magic number for {key} is {value}.",
    "The special magic number for {new} and the special magic number for {key} is {value}.",
    "The special magic number for {new} is as for {key} is {value}.",
)


@frozen
class Passage:
    """One line of the text, and the answers in it, of a family.

    depth: where it stands in the filler text, from 0 to 1. answers: first character of each answer, and the one behind
    its last. ends: the last key of a chain and its value, for a question behind the text.
    """

    depth: float
    text: str
    family: Family | None = None
    answers: tuple[tuple[int, int], ...] = ()
    ends: tuple[Key, str] | None = None


def make_passages(keys: Callable[[], Key], rng: random.Random, tokens: int) -> list[Passage]:
    """Make the lines of all families for a text of about so many tokens.

    keys: gives a key that nothing else in the text has. rng: chooses values, wordings and places. tokens: `SHORTEST`
    at least; with 8,192 and more there are `MOST` answers of each family, with fewer fewer.
    """
    count = min(MOST, tokens // 1024) // 2 * 2
    made: list[Passage] = []
    for index in range(count):
        made += _restated(keys(), rng, tokens, _FACTS[index % len(_FACTS)])
    for index in range(count):
        made += _turn(keys(), rng, tokens, long=bool(index % 2))
    for index in range(count // 2):
        made += _linked([keys() for _ in range(3)], rng, tokens, _LINKS[index % len(_LINKS)])
    for _ in range(count // 2):
        made += _list([keys() for _ in range(4)], rng, tokens)
    return made


def places_of(text: str, passages: Sequence[Passage]) -> tuple[Place, ...]:
    """Places of the answers in the text, in its order.

    A line that stands there twice, first as a fact and then again, is taken in the order of the depths.
    """
    waiting: dict[str, list[Passage]] = {}
    for passage in sorted(passages, key=lambda one: one.depth):
        waiting.setdefault(passage.text, []).append(passage)
    found: list[Place] = []
    begin = 0
    for line in text.split("\n"):
        if waiting.get(line):
            passage = waiting[line].pop(0)
            family = passage.family
            if family is not None:
                found.extend((family, begin + a, begin + b) for a, b in passage.answers)
        begin += len(line) + 1
    return tuple(found)


def _chain(rng: random.Random, tokens: int, count: int) -> list[float]:
    """Depths within a text of about so many tokens, of lines one after the other, far apart but for one pair in ten."""
    near = rng.random() < 0.1
    least = (_NEAR if near else _FAR) / tokens
    room = 1 - _END / tokens - least * (count - 1)
    if near:
        room = min(room, (WINDOW - _NEAR) / tokens * (count - 1))
    ends = sorted(rng.random() for _ in range(count))
    start = rng.random() * (1 - _END / tokens - least * (count - 1) - room)
    return [start + end * room + index * least for index, end in enumerate(ends)]


def _restated(key: Key, rng: random.Random, tokens: int, form: str) -> list[Passage]:
    said, again = _chain(rng, tokens, 2)
    text = form.format(key=formats.name(key), value=(value := _value(rng)))
    return [Passage(said, text), _passage(again, "restated", text, [value])]


def _turn(key: Key, rng: random.Random, tokens: int, *, long: bool) -> list[Passage]:
    said, asked = _chain(rng, tokens, 2)
    value = _value(rng)
    question = formats.one_question(key)
    if long:
        question = formats.long_question(key, rng.choice(formats.openings()), rng.choice(formats.ASKED))
    answer = formats.answer([key], [value])
    return [Passage(said, formats.needle(key, value)), _passage(asked, "turns", question + answer, [value])]


def _linked(keys: Sequence[Key], rng: random.Random, tokens: int, link: str) -> list[Passage]:
    """A fact, and two keys that have its value, each by way of the one before; then the line gives it as a fact."""
    depths, value = _chain(rng, tokens, len(keys)), _value(rng)
    made = [Passage(depths[0], formats.needle(keys[0], value))]
    for depth, key, new in zip(depths[1:], keys, keys[1:], strict=False):
        text = link.format(new=formats.name(new), key=formats.name(key), value=value)
        first = text.index(value)
        whole = f"{text} {formats.needle(new, value)}"
        ends = (new, value) if new is keys[-1] else None
        made.append(Passage(depth, whole, "linked", ((first, first + len(value)),), ends))
    return made


def _list(keys: Sequence[Key], rng: random.Random, tokens: int) -> list[Passage]:
    """The values of four keys, a question for all of them that is answered by half, and later the other half."""
    said, asked, resumed = _chain(rng, tokens, 3)
    values = [_value(rng) for _ in keys]
    made = [Passage(said * rng.random(), formats.needle(key, value)) for key, value in zip(keys, values, strict=True)]
    begun = formats.answer(keys[:2], values[:2]).removesuffix(".") + ","
    made.append(Passage(asked, formats.keys_question(keys) + begun))
    going_on = formats.needle(keys[1], values[1]).removesuffix(f"{values[1]}.") + formats.answer(keys[1:], values[1:])
    made.append(_passage(resumed, "lists", going_on, values[2:]))
    return made


def _passage(depth: float, family: Family, text: str, values: Sequence[str]) -> Passage:
    answers: list[tuple[int, int]] = []
    for value in values:  # the last place of each: a long question may name numbers of its own
        first = text.rindex(value)
        answers.append((first, first + len(value)))
    return Passage(depth, text, family, tuple(answers))


def _value(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (formats.DIGITS - 1), 10**formats.DIGITS))
