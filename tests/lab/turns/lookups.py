"""Key-value lookups: lines spread over a text, and several turns that ask for one of them each."""

from __future__ import annotations

import random

from sparseprefill.adapters.evaluation.prompts import Prompt

from .talk import Talk, closed, cut, spread, text_of, turn_of, woven
from .words import Words

LINES = 24
"""Lines in a text, of which some are asked for, all at most."""
THIRDS = ("begin", "middle", "end")
FIRST = (
    *("amber", "silent", "northern", "crooked", "painted", "frozen", "hidden", "twin", "copper", "dusty"),
    *("gentle", "hollow", "ivory", "jagged", "lonely", "marble", "narrow", "olive", "polished", "quiet", "rusty"),
    *("scarlet", "timid", "velvet"),
)
SECOND = (
    *("falcon", "harbor", "walnut", "glacier", "lantern", "meadow", "badger", "spindle", "cottage", "dagger"),
    *("engine", "fiddle", "garnet", "helmet", "island", "jacket", "kettle", "lemon", "mantle", "needle"),
    *("orchid", "pepper", "quarry", "raven"),
)
"""Words of the keys, each of which stands in one key alone."""


def talk_of(words: Words, natural: Prompt, tokens: int, questions: int, seed: int) -> Talk:
    """A conversation of `tokens` tokens about a text with lines in it.

    Its columns are the thirds of the text. ParameterError where the text has no room for the lines.
    """
    rng = random.Random(f"lookups/{natural.name}/{seed}")
    keys = [f"{a} {b}" for a, b in zip(rng.sample(FIRST, LINES), rng.sample(SECOND, LINES), strict=True)]
    values = [str(one) for one in rng.sample(range(10**5, 10**6), len(keys))]
    lines = [words.ids(f"\nThe badge number of {k} is {v}.\n") for k, v in zip(keys, values, strict=True)]
    asked = spread(min(questions, LINES), LINES)
    rng.shuffle(asked)
    turns = closed(
        words,
        [
            turn_of(
                words,
                THIRDS[index * len(THIRDS) // len(keys)],
                f"What is the badge number of {keys[index]}?",
                f"The badge number of {keys[index]} is",
                f" {values[index]}",
                values[index],
            )
            for index in asked
        ],
    )
    text, _ = woven(cut(words, natural.ids, tokens, turns, lines), lines)
    return Talk(natural.name, text_of(words, text), turns)
