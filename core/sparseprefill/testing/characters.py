"""Characters of attention heads: where the mass of a row lies, and the logits that put it there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import ParameterError, nearest
from sparseprefill.testing.rotary import FLOATS, HOST
from sparseprefill.validate import number

NEAR = 256
"""Keys before the diagonal, the query's own among them, that count as local."""
AROUND = 4
"""Keys on either side of a slash that count as its own."""
SAMPLE, ROUNDS, LARGEST = 4096, 6, 60.0
"""Constants of `solve`: distances that stand for all of them, rounds, and the largest logit."""
QUIET = 0.4
"""Share of the others' spread that columns of stripes and spans have, so that no single one outweighs the sink."""
SHARE = number(0.0, 1.0)


@frozen(kw_only=True)
class Character:
    """Shares of the attention mass of a row in the middle of the prompt; what is left over is spread over all keys.

    sink: of the first key. local: of the nearest 256 keys. slash: of two fixed relative distances. stripes: of single
    columns, spans: of runs of 32 to 256 columns, both of which matter to queries of some passages and not of others.
    spread: standard deviation of the columns' logits in what is left over, so that 2.2 puts 71 % of it on 5 % of them.
    """

    sink: float = field(default=0.0, validator=SHARE)
    local: float = field(default=0.0, validator=SHARE)
    slash: float = field(default=0.0, validator=SHARE)
    stripes: float = field(default=0.0, validator=SHARE)
    spans: float = field(default=0.0, validator=SHARE)
    spread: float = field(default=2.2, validator=number(0.0, 4.0))

    def __attrs_post_init__(self) -> None:
        if self.rest <= 0.0:
            raise ParameterError(f"the shares of a character add up to {1 - self.rest:g}: leave a rest, such as 0.05")

    @property
    def rest(self) -> float:
        """The mass that is spread over all keys."""
        return 1.0 - self.sink - self.local - self.slash - self.stripes - self.spans


CHARACTERS: Mapping[str, Character] = MappingProxyType(
    {
        "local": Character(sink=0.48, local=0.46),
        "sink": Character(sink=0.82, local=0.12),
        "stripes": Character(sink=0.50, local=0.15, stripes=0.28),
        "slash": Character(sink=0.45, local=0.12, slash=0.37),
        "spans": Character(sink=0.45, local=0.12, spans=0.36),
        "mixed": Character(sink=0.45, local=0.12, slash=0.15, stripes=0.20, spread=2.5),
        "diffuse": Character(sink=0.05, local=0.10, spread=0.8),
    }
)
"""The characters by name."""

_EIGHT = ("sink", "local", "stripes", "slash", "sink", "local", "stripes", "mixed")
LAYER: tuple[str, ...] = (
    *_EIGHT,
    *("sink", "local", "spans", "diffuse", "sink", "local", "stripes", "slash"),
    *_EIGHT,
    *("sink", "local", "spans", "diffuse", "sink", "stripes", "slash", "mixed"),
)
"""The characters of a layer's 32 query heads: 8 sink, 7 local, 6 stripes, 4 slash, 3 mixed, 2 spans, 2 diffuse."""


def named(names: Sequence[str] | None, heads: int) -> list[Character]:
    """The character of each query head: `names` in turn, by default those of `LAYER`."""
    names = LAYER if names is None else names
    if isinstance(names, str) or not names:
        raise ParameterError(f"characters is {names!r}: pass a list of at least one name")
    for name in names:
        if name not in CHARACTERS:
            raise ParameterError(f"characters names {name!r}{nearest(str(name), CHARACTERS)}")
    return [CHARACTERS[names[head % len(names)]] for head in range(heads)]


@frozen
class Logits:
    """A head's additions to its logits. local, slash: at their peaks. sink, stripes, spans: at their keys."""

    local: float
    slash: float
    sink: float
    stripes: float
    spans: float


def solve(one: Character, speeds: Tensor, distances: Sequence[int], tokens: int, shares: tuple[float, float]) -> Logits:
    """The logits that give a row in the middle of `tokens` keys the shares of its character.

    speeds: radians per token of the rotary pairs that tell positions apart. distances: of the slashes.
    shares: of the columns that are stripes, and that are in spans, to one query.
    """
    half = max(2, tokens // 2)
    near = _mass(torch.arange(min(NEAR, half), device=HOST), distances, speeds)
    beside = [torch.arange(d - AROUND, d + AROUND + 1, device=HOST) for d in distances]
    around = _mass(torch.cat(beside), distances, speeds)
    spread = torch.linspace(min(NEAR, half - 1), half - 1, SAMPLE, **FLOATS).round()
    apart = torch.stack([(spread - centre).abs() > AROUND for centre in distances]).all(0)
    far = _mass(spread[apart] if bool(apart.any()) else spread, distances, speeds)
    weight = max(1, half - NEAR) / SAMPLE
    local = slash = 0.0
    for _ in range(ROUNDS):
        rest = far(local, slash) * weight
        local = _root(partial(near, slash=slash), one.local / one.rest * rest)
        rest = far(local, slash) * weight
        slash = _root(partial(around, local), one.slash / one.rest * rest) if one.slash else 0.0
    rest = far(local, slash) * weight * math.exp(one.spread**2 / 2)
    sink = math.log(one.sink / one.rest * rest) if one.sink else 0.0
    above = [_above(one, share / one.rest, of) for share, of in ((one.stripes, shares[0]), (one.spans, shares[1]))]
    return Logits(local, slash, sink, *above)


def _mass(at: Tensor, distances: Sequence[int], speeds: Tensor) -> Callable[..., float]:
    """The mass of keys at some distances, by the peaks of what is local and of the slashes."""
    of_local, *slashes = [torch.cos((at - centre)[:, None] * speeds).mean(-1) for centre in (0, *distances)]
    of_slash = sum(slashes, torch.zeros_like(of_local))

    def mass(local: float, slash: float) -> float:
        return float(torch.exp(local * of_local + slash * of_slash).sum())

    return mass


def _root(mass: Callable[[float], float], wanted: float) -> float:
    """The point where a growing function reaches `wanted`; 0 where it lies above from the start."""
    low, high = 0.0, LARGEST
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < wanted else (low, middle)
    return high if low else 0.0


def _above(one: Character, ratio: float, share: float) -> float:
    """Height of columns above the others, so that a `share` of them has `ratio` times the others' mass."""
    if not (ratio and share):
        return 0.0
    return max(0.0, math.log(ratio / share) + (1 - QUIET**2) * one.spread**2 / 2)
