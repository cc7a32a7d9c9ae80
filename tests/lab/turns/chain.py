"""Two turns that hang together: the second question asks about what the first was answered with."""

from __future__ import annotations

import random

from sparseprefill.adapters.evaluation.prompts import Prompt

from .talk import Talk, closed, cut, spread, text_of, turn_of, woven
from .words import Words

CHAINS = 12
"""Boxes in a text, each with a key and a door."""
THINGS = (
    *("violin", "compass", "hammer", "mirror", "saddle", "kettle", "ladder", "anchor"),
    *("basket", "candle", "whistle", "blanket", "telescope", "umbrella", "bicycle", "accordion"),
)


def talk_of(words: Words, natural: Prompt, tokens: int, questions: int, seed: int) -> Talk:
    """A conversation of `tokens` tokens about a text with chains in it; of two questions each, so at least two.

    Its columns are the keys, which a line of the text has, and the doors, which only the answer before leads to.
    ParameterError where the text has no room for the lines.
    """
    rng = random.Random(f"chain/{natural.name}/{seed}")
    chains = max(1, min(CHAINS, questions // 2))
    things = rng.sample(THINGS, CHAINS)
    numbers = [str(one) for one in rng.sample(range(100, 1000), 2 * CHAINS)]
    keys, doors = numbers[:CHAINS], numbers[CHAINS:]
    lines = [words.ids(f"\nThe box of the {a} holds the key {b}.\n") for a, b in zip(things, keys, strict=True)]
    lines += [words.ids(f"\nThe key {a} opens the door {b}.\n") for a, b in zip(keys, doors, strict=True)]
    rng.shuffle(lines)
    turns = []
    for index in spread(chains, CHAINS):
        box = f"the box of the {things[index]}"
        turns += [
            turn_of(words, "key", f"Which key does {box} hold?", f"T{box[1:]} holds the key", *_number(keys[index])),
            turn_of(
                words,
                "door",
                "And which door does that key open?",
                "The key",
                f" {keys[index]} opens the door {doors[index]}",
                doors[index],
            ),
        ]
    closed_turns = closed(words, turns)
    text, _ = woven(cut(words, natural.ids, tokens, closed_turns, lines), lines)
    return Talk(natural.name, text_of(words, text), closed_turns)


def _number(value: str) -> tuple[str, str]:
    return f" {value}", value
