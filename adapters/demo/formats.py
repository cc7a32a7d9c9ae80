"""The words that name a needle, and the sentences of the tasks: needles, questions and answers.

Every word is one token of the embedded model's tokenizer when a space stands before it, so that a key is always two
tokens. Every sentence is a line of its own. All families share one answer grammar, in which each number directly
follows the key that it belongs to, as it does in the needle. A question's text ends in a space; its answer starts with
a digit and ends with a full stop.
"""

from __future__ import annotations

from collections.abc import Sequence

_ADJECTIVES = """
amber ancient bitter bold brave bright broken calm clever cold cool crisp
curly damp dark deep dry dusty eager early faint fair fancy fresh gentle
giant golden grand gray green happy heavy hidden hollow humble icy jolly
kind large late lively lone loud lucky merry mild misty modern narrow neat
noble pale plain proud purple quick quiet rapid rough royal shy silent
small tall
"""

_NOUNS = """
anchor apple arrow badge barn basket bell bird boat bottle bridge brook
candle canyon castle cloud clover coin comet crane desert dragon drum eagle
falcon feather fern field flame forest fox garden glacier harbor hawk hill
island kettle lake lantern lemon lion maple meadow mirror moon mountain
ocean olive orchard otter owl pearl pebble piano pine planet river rocket
saddle shadow ship silver spider
"""

ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
"""The first words of a key."""

NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
"""The second words of a key."""

Key = tuple[str, str]
"""An adjective and a noun."""

DIGITS = 7
"""Digits of a value; the first is never 0."""


def name(key: Key) -> str:
    """Return the two words of a key as text."""
    return f"{key[0]} {key[1]}"


def needle(key: Key, value: str) -> str:
    """Return the line that hides a value in the context."""
    return f"The special magic number for {name(key)} is {value}."


def one_question(key: Key) -> str:
    """Return the question for the only value of one key."""
    return f"What is the special magic number for {name(key)}? {_lead(key)}"


def keys_question(keys: Sequence[Key]) -> str:
    """Return the question for one value of each of several keys."""
    listed = ", ".join(name(key) for key in keys)
    return f"What are the special magic numbers for {listed}? {_lead(keys[0])}"


def values_question(key: Key, count: int) -> str:
    """Return the question for all ``count`` values of one key."""
    return f"What are the {count} special magic numbers for {name(key)} in ascending order? {_lead(key)}"


OPENINGS = (
    "Please read the text above once more, from its first line to its last.",
    "You have now seen all the notes.",
    "Thank you for reading this far.",
    "Think about what the passage says and do not guess.",
    "I am going to ask you about one detail of the text above.",
    "Somewhere in the lines above there is a fact that I need.",
    "Now answer from memory, using only the document that you were given.",
    "The document is complete and nothing else will be added to it.",
    "Here is my request, and it is a simple one.",
    "Let us see how much of this you remember.",
    "A colleague of mine needs one figure from this document today.",
    "Based on the context given above, please answer the question that follows.",
)
"""Beginning of a long question."""

WAYS = (
    "Reply with the value alone, without any explanation.",
    "Ignore everything that does not bear on it.",
    "Give the answer in a single short sentence.",
    "There may be similar lines, so look closely at the name.",
    "The answer is written in the text, word for word.",
    "Do not repeat the rest of the passage.",
    "Be brief and be exact.",
    "It is mentioned only once, and it may be anywhere.",
)
"""Form of the answer to a long question."""

ASKED = (
    "What is the special magic number for {key}?",
    "Which special magic number does the text give for {key}?",
    "Can you tell me the special magic number for {key}?",
    "I would like to know the special magic number for {key}.",
    "Find the special magic number that belongs to {key}.",
    "Question: what was said to be the special magic number for {key}?",
)
"""Name of the key in a long question."""


def openings() -> list[str]:
    """Return what may stand before the key of a long question, all of it."""
    return [*OPENINGS, *(f"{opening} {way}" for opening in OPENINGS for way in WAYS)]


def long_question(key: Key, opening: str, asked: str) -> str:
    """Return the question for the only value of one key as a person would ask it, in 20 to 60 tokens."""
    return f"{opening} {asked.format(key=name(key))} {_lead(key)}"


def answer(keys: Sequence[Key], values: Sequence[str]) -> str:
    """Return the answer: the values, each after the first led by its key."""
    rest = (f", for {name(key)} is {value}" for key, value in zip(keys[1:], values[1:], strict=True))
    return values[0] + "".join(rest) + "."


def _lead(key: Key) -> str:
    return f"The special magic number for {name(key)} is "
