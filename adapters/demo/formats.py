"""The sentences of the tasks: needles, questions and answers.

Every sentence is a line of its own. All families share one answer grammar, in
which each number directly follows the key that it belongs to, as it does in
the needle. A question's text ends in a space; its answer starts with a digit
and ends with a full stop.
"""

from collections.abc import Sequence

from .words import Key

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


def answer(keys: Sequence[Key], values: Sequence[str]) -> str:
    """Return the answer: the values, each after the first led by its key."""
    rest = (f", for {name(key)} is {value}" for key, value in zip(keys[1:], values[1:], strict=True))
    return values[0] + "".join(rest) + "."


def _lead(key: Key) -> str:
    return f"The special magic number for {name(key)} is "
