"""Many requests that look alike: a conversation of notes about topics, and the n-th note about one is wanted again.

The idea is that of multi-round coreference (https://arxiv.org/abs/2409.12640); the notes are natural text.
"""

from __future__ import annotations

import random

from sparseprefill.adapters.evaluation.prompts import Prompt

from sparseprefill.errors import ParameterError

from .talk import Talk, Turn
from .words import Ids, Words

COUNTED = 40
"""First tokens of a note that count."""
EACH = 512
"""Tokens of a conversation for each note."""
FEWEST = 12
"""Notes of a short conversation."""
TIMES = ("first", "second", "third")
FAMILIES = ("only", *(f"{one} of three" for one in TIMES))
TOPICS = (
    *("apples", "bridges", "candles", "deserts", "engines", "forests", "glaciers", "harbors", "islands"),
    *("jackets", "kites", "lamps", "mountains", "needles", "oceans", "pianos", "quarries", "rivers", "saddles"),
    *("tunnels", "umbrellas", "valleys", "wagons", "yachts", "zebras", "anchors", "baskets", "clocks"),
    *("dolphins", "eagles", "fountains", "gardens", "hammers", "insects", "jewels", "kettles", "ladders"),
    *("mirrors", "notebooks", "orchards", "pencils", "quilts", "robots", "shadows", "towers", "uniforms"),
    *("villages", "windows", "barley", "cameras", "dragons", "envelopes", "feathers", "guitars", "horses"),
    *("icebergs", "jungles", "kitchens", "lizards", "magnets", "napkins", "otters", "parrots", "railways"),
    *("sailors", "theaters", "volcanoes", "whales", "castles", "drums", "elephants", "ferries", "geysers"),
    *("hotels", "lanterns", "markets", "nurses", "oysters", "pumpkins", "ropes", "spiders", "tractors"),
    *("violins", "wolves", "beaches", "cactus", "diamonds", "flutes", "grapes", "helmets"),
)


def talk_of(words: Words, natural: Prompt, tokens: int, questions: int, seed: int) -> Talk:
    """A conversation of `tokens` tokens, with questions asked in turn about topics of one note, and about the first,
    second and third note of topics that have three.

    questions: at most; there are no more than one about each of these. ParameterError where the notes would be too
    short.
    """
    rng = random.Random(f"requests/{natural.name}/{seed}")
    count = max(FEWEST, min(len(TOPICS), tokens // EACH))
    triples = max(2, count // FEWEST)
    topics = rng.sample(TOPICS, count - 2 * triples)
    order = [*topics[triples:], *topics[:triples] * len(TIMES)]
    rng.shuffle(order)
    around = [_asked(words, topic) for topic in order]
    thrice, asked = topics[:triples], min(questions, triples * len(FAMILIES))
    turns = _turns(words, asked, thrice, [one for one in order if one not in thrice])
    longest = max(len(prompt) for _, prompt, _ in turns) + COUNTED + 1
    room = tokens - longest - len(words.begin) - sum(map(len, around)) - len(words.again) * (count - 1)
    size = room // count
    if size < COUNTED:
        least = tokens + count * COUNTED - room
        raise ParameterError(f"tokens is {tokens}: {count} notes need more; pass {least} or more")
    ids, text = list(words.begin), words.bare(natural.ids)
    notes: dict[str, list[Ids]] = {}
    for index, (topic, before) in enumerate(zip(order, around, strict=True)):
        note = text[index * size : (index + 1) * size]
        notes.setdefault(topic, []).append(note)
        ids += [*(words.again if index else ()), *before, *note]
    wanted = tuple(
        Turn(family, prompt, notes[topic][max(0, FAMILIES.index(family) - 1)][:COUNTED])
        for family, prompt, topic in turns
    )
    return Talk(natural.name, tuple(ids), wanted, forced=True)


def _asked(words: Words, topic: str) -> Ids:
    return (*words.ids(f"Write a short note about {topic}."), *words.answer, *words.ids(_head(topic)))


def _head(topic: str) -> str:
    return f"Note about {topic}:\n"


def _turns(words: Words, count: int, thrice: list[str], once: list[str]) -> list[tuple[str, Ids, str]]:
    """Family, prompt, and topic of each question. once: in the order of their notes."""
    made, rounds = [], -(-count // len(FAMILIES))
    for index in range(count):
        turn, which = divmod(index, len(FAMILIES))
        topic = thrice[turn % len(thrice)] if which else once[len(once) * (2 * turn + 1) // (2 * rounds)]
        note = f"the {TIMES[which - 1]} note" if which else "the note"
        question = words.ids(f"Repeat {note} about {topic} that you wrote, word for word.")
        made.append((FAMILIES[which], (*words.again, *question, *words.answer, *words.ids(_head(topic))), topic))
    return made
