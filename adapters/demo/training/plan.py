"""What is trained when: lengths by stage, and the make-up of each batch."""

import random

from attrs import frozen

TOKENS = 65_536
"""Tokens of a batch, about."""


@frozen
class Stage:
    """A part of the training time and the chances of each length in it."""

    share: float
    chances: dict[int, float]

    def draw(self, rng: random.Random) -> int:
        """Draw the length of one batch."""
        return rng.choices(list(self.chances), list(self.chances.values()))[0]


STAGES: tuple[Stage, ...] = (
    Stage(0.15, {256: 0.3, 512: 0.7}),
    Stage(0.16, {512: 0.2, 1024: 0.2, 2048: 0.6}),
    Stage(0.22, {1024: 0.1, 2048: 0.2, 4096: 0.3, 8192: 0.4}),
    Stage(0.20, {1024: 0.1, 4096: 0.15, 8192: 0.25, 16384: 0.5}),
    Stage(0.27, {1024: 0.06, 4096: 0.1, 8192: 0.12, 16384: 0.2, 32768: 0.36, 40960: 0.16}),
)
"""The stages of a full training run."""

SMOKE_STAGES: tuple[Stage, ...] = (Stage(0.6, {256: 1.0}), Stage(0.4, {512: 1.0}))
"""The stages of a run that only shows that everything works."""


def stage_at(stages: tuple[Stage, ...], progress: float) -> int:
    """Return the index of the stage at a progress from 0 to 1."""
    end = 0.0
    for index, stage in enumerate(stages):
        end += stage.share
        if progress < end:
            return index
    return len(stages) - 1


@frozen
class Mix:
    """How many needles and questions each row of a batch holds.

    Attributes:
        alone: Keys asked by a question each.
        silent: Keys that are not asked.
        groups: Keys with several values.
        values: Values of each of these keys.
        lists: Questions that ask several keys.
        listed: Keys asked by each of these questions.
        early: The chance of a question to stand before the end of the text.
    """

    alone: int
    silent: int
    groups: int
    values: int
    lists: int
    listed: int
    early: float

    @property
    def keys(self) -> int:
        """All keys of a row."""
        return self.alone + self.silent + self.groups + self.lists * self.listed


# Tokens of a needle, and of a question with its answer and needles, at most.
_NEEDLE, _ALONE = 20, 50


def _group_cost(values: int) -> int:
    return 32 + values * (_NEEDLE + 14)


def draw_mix(rng: random.Random, length: int) -> Mix:
    """Draw the make-up of a batch of rows of ``length`` tokens."""
    room = int(0.75 * (length - 32))
    values, listed = rng.randint(2, 5), rng.randint(2, 5)
    if length <= 512:
        values, listed = min(values, 4), min(listed, 4)
    if rng.random() < 0.1:
        return _draw_as_task(rng, room, values, listed)
    room = min(room, int(4000 * 2 ** -rng.uniform(0, 3)))
    shares = [rng.random() + 0.5, rng.random(), rng.random()]
    unit = room / sum(shares)
    groups = int(unit * shares[1] / _group_cost(values))
    lists = int(unit * shares[2] / _group_cost(listed))
    room -= groups * _group_cost(values) + lists * _group_cost(listed)
    silent = int(rng.uniform(0, 0.4) * room / _NEEDLE)
    alone = max(0 if groups + lists else 1, (room - silent * _NEEDLE) // _ALONE)
    early = 0.0 if rng.random() < 0.35 else rng.uniform(0.2, 0.9)
    return Mix(alone, silent, groups, values, lists, listed, early)


def _draw_as_task(rng: random.Random, room: int, values: int, listed: int) -> Mix:
    kind = rng.randrange(4)
    if kind == 0:
        return Mix(1, 0, 0, 2, 0, 2, 0.0)
    room -= (_ALONE, _group_cost(values), _group_cost(listed))[kind - 1]
    silent = max(0, min(room // _NEEDLE, rng.choice((0, 4, 15, 32, 64))))
    return Mix(int(kind == 1), silent, int(kind == 2), values, int(kind == 3), listed, 0.0)
