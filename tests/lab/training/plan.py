"""What is trained when: stages with their lengths and families, the make-up of rows, and the sizes of models."""

import random
from collections.abc import Mapping
from typing import Literal, get_args

from attrs import frozen

from .network import Shape

TOKENS = 65_536
"""Tokens of a batch, about."""

PARTS = 4
"""The most families of rows in one batch."""

Family = Literal["echo", "lists", "needles", "noise", "keys", "uuids", "chain", "frequent"]
"""Families of rows.

``echo``: runs of random tokens, and all of them again in another order, where nearly every token of the second half is
an answer: copying, from which looking up grows, is learned from these within a few hundred steps. ``lists``: pairs in
many wordings, and all of them again in another order, the simplest recall there is. ``needles``: the sentences of
`formats`. ``noise``, ``keys``, ``uuids``, ``chain``, ``frequent``: RULER's niah_single_1, niah_multikey_2,
niah_multikey_3, ruler_vt and ruler_fwe, mostly with more than one question.
"""

FAMILIES: tuple[Family, ...] = get_args(Family)
"""All families of rows."""

_FIRST: Mapping[Family, float] = {"echo": 0.6, "lists": 0.4}
_EARLY: Mapping[Family, float] = {
    "echo": 0.25,
    "lists": 0.3,
    "needles": 0.2,
    "noise": 0.05,
    "keys": 0.15,
    "uuids": 0.05,
}
_FULL: Mapping[Family, float] = {
    "echo": 0.04,
    "lists": 0.1,
    "needles": 0.32,
    "noise": 0.09,
    "keys": 0.17,
    "uuids": 0.13,
    "chain": 0.1,
    "frequent": 0.05,
}


_GATED: tuple[Family, ...] = ("needles", "noise", "keys")


@frozen
class Stage:
    """A part of a run.

    Attributes:
        share: How much of the run it is meant to take, beside the shares of the others.
        chances: The chance of each length. The longest one is the stage's own, and its answers decide when it ends.
        gate: The share of right answer tokens, in the worst family of `gated`, at which it may end early.
        families: The chance of each family.
        rate: The learning rate, as a part of the highest.
        tokens: Tokens of a batch, about.
        gated: The families that decide. Every model of these sizes learns them, and without them longer rows teach
            nothing. Chains decide at 2,048 tokens: a seed that goes on without them does not learn them in long rows.
    """

    share: float
    chances: Mapping[int, float]
    gate: float = 0.97
    families: Mapping[Family, float] = _FULL
    rate: float = 1.0
    tokens: int = TOKENS
    gated: tuple[Family, ...] = _GATED

    @property
    def length(self) -> int:
        """The longest length."""
        return max(self.chances)

    def draw(self, rng: random.Random) -> int:
        """Draw the length of one batch."""
        return rng.choices(list(self.chances), list(self.chances.values()))[0]

    def draw_families(self, rng: random.Random, rows: int) -> list[Family]:
        """Draw the families of one batch."""
        return rng.choices(list(self.families), list(self.families.values()), k=min(rows, PARTS))


# Copying is learned soonest from short rows: attention begins even, and a row of 64 tokens dilutes least.
_START = Stage(0.06, {64: 0.4, 128: 0.6}, 0.95, _FIRST, gated=("echo", "lists"))

STAGES: tuple[Stage, ...] = (
    _START,
    Stage(0.12, {128: 0.1, 256: 0.3, 512: 0.6}, families=_EARLY),
    Stage(0.14, {512: 0.2, 1024: 0.2, 2048: 0.6}, rate=0.9, gated=(*_GATED, "chain")),
    Stage(0.2, {1024: 0.1, 2048: 0.2, 4096: 0.3, 8192: 0.4}, rate=0.8),
    Stage(0.2, {1024: 0.1, 4096: 0.15, 8192: 0.25, 16384: 0.5}, rate=0.7),
    Stage(0.28, {1024: 0.06, 4096: 0.12, 8192: 0.12, 16384: 0.2, 32768: 0.34, 40960: 0.16}, rate=0.6),
)
"""The stages of the embedded model."""

LONG_STAGES: tuple[Stage, ...] = (
    _START,
    Stage(0.08, {128: 0.1, 256: 0.3, 512: 0.6}, families=_EARLY),
    Stage(0.1, {512: 0.2, 1024: 0.2, 2048: 0.6}, rate=0.9, gated=(*_GATED, "chain")),
    Stage(0.14, {1024: 0.1, 2048: 0.2, 4096: 0.3, 8192: 0.4}, rate=0.8),
    Stage(0.1, {1024: 0.1, 4096: 0.2, 8192: 0.3, 16384: 0.4}, rate=0.7),
    Stage(0.16, {2048: 0.1, 8192: 0.2, 16384: 0.2, 32768: 0.5}, rate=0.6),
    Stage(0.36, {2048: 0.1, 8192: 0.15, 32768: 0.25, 65536: 0.2, 131072: 0.3}, rate=0.5, tokens=131_072),
)
"""The stages of the model for 128K tokens."""

SMOKE_STAGES: tuple[Stage, ...] = (
    Stage(0.6, {128: 1.0}, 0.95, _FIRST, tokens=4096, gated=("echo", "lists")),
    Stage(0.4, {512: 1.0}, tokens=4096),
)
"""The stages of a run that only shows that everything works."""


@frozen
class Size:
    """What belongs to one size of model.

    Attributes:
        shape: The network.
        positions: The longest length, as the checkpoint has it.
        stages: The stages of its training.
        peak: The highest learning rate.
        lengths: The lengths that are evaluated.
        tasks: Tasks of each family and length at the end of a run, from which seeds and recipes are compared.
        ruler_tasks: The same of RULER's tasks.
        reserve: Seconds of a run that are kept for the evaluation.
    """

    shape: Shape
    positions: int
    stages: tuple[Stage, ...]
    peak: float
    lengths: tuple[int, ...]
    tasks: int
    ruler_tasks: int
    reserve: float


SIZES: Mapping[str, Size] = {
    "embedded": Size(Shape(), 40_960, STAGES, 2e-3, (1024, 2048, 4096, 8192, 16384, 32768), 64, 16, 120),
    "long": Size(
        Shape(hidden=256, layers=5, heads=8, kv_heads=2, head_dim=128, inner=512, theta=5e6),
        131_072,
        LONG_STAGES,
        2e-3,
        (4096, 16384, 32768, 65536, 131_072),
        16,
        4,
        170,
    ),
    "smoke": Size(Shape(hidden=64, inner=128, layers=2), 40_960, SMOKE_STAGES, 2e-3, (1024,), 4, 1, 60),
}
"""The sizes by name; ``smoke`` only shows that everything works."""


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
        long: Whether single keys are asked as a person would ask, in 20 to 60 tokens.
    """

    alone: int
    silent: int
    groups: int
    values: int
    lists: int
    listed: int
    early: float
    long: bool = False

    @property
    def keys(self) -> int:
        """All keys of a row."""
        return self.alone + self.silent + self.groups + self.lists * self.listed


# Tokens of a needle, and of a question with its answer and needles, at most.
_NEEDLE, _ALONE, _LONG = 20, 50, 100


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
    # A long row costs the same whatever it asks: let it ask more.
    room = min(room, int(max(4000, length / 8) * 2 ** -rng.uniform(0, 3)))
    shares = [rng.random() + 0.5, rng.random(), rng.random()]
    unit = room / sum(shares)
    groups = int(unit * shares[1] / _group_cost(values))
    lists = int(unit * shares[2] / _group_cost(listed))
    room -= groups * _group_cost(values) + lists * _group_cost(listed)
    silent = int(rng.uniform(0, 0.4) * room / _NEEDLE)
    long = rng.random() < 0.4
    alone = max(0 if groups + lists else 1, (room - silent * _NEEDLE) // (_LONG if long else _ALONE))
    early = 0.0 if rng.random() < 0.35 else rng.uniform(0.2, 0.9)
    return Mix(alone, silent, groups, values, lists, listed, early, long)


def _draw_as_task(rng: random.Random, room: int, values: int, listed: int) -> Mix:
    kind, long = rng.randrange(4), rng.random() < 0.4
    if kind == 0:
        return Mix(1, 0, 0, 2, 0, 2, 0.0, long)
    room -= (_LONG, _group_cost(values), _group_cost(listed))[kind - 1]
    silent = max(0, min(room // _NEEDLE, rng.choice((0, 4, 15, 32, 64))))
    return Mix(int(kind == 1), silent, int(kind == 2), values, int(kind == 3), listed, 0.0, long)
