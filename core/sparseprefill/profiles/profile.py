"""Profile: a method's tuned parameters by length of the prompt, as a checked JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from sparseprefill import json_text
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.validate import WIDEST

SCHEMA = "sparseprefill.profile"
VERSION = 1
_RANGE = ("from", "tokens", "parameters", "measured")


@frozen(kw_only=True)
class LengthRange:
    """Parameters for calls of `least` keys and more, up to the next range.

    tokens: the length that they were tuned at. parameters: None where no setting was accurate enough, so that calls of
    this length are refused and an adapter runs them dense. measured: figures of the tuning, for people.
    """

    least: int
    tokens: int
    parameters: Mapping[str, Any] | None = field(hash=False)
    measured: Mapping[str, Any] = field(factory=dict, hash=False)


@frozen(kw_only=True)
class Profile:
    """What `sparseprefill tune` writes.

    method: name of the method. model: the model that was tuned on. ranges: ascending, the first from 0. versions,
    tuned: software, and how the tuning was done, for people.

    Raises ParameterError, naming the field, where the ranges do not fit together.
    """

    method: str
    model: ModelIdentity
    ranges: tuple[LengthRange, ...]
    versions: Mapping[str, Any] = field(factory=dict, hash=False)
    tuned: Mapping[str, Any] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        if not self.ranges:
            raise ParameterError("ranges is empty: pass one range or more")
        below = -1
        for i, one in enumerate(self.ranges):
            if i == 0 and one.least != 0:
                raise ParameterError(f"ranges[0].from is {one.least}: the first range starts at 0")
            if one.least <= below:
                raise ParameterError(f"ranges[{i}].from is {one.least}: ranges must ascend, and {below} comes before")
            below = one.least

    def index(self, kv_len: int) -> int:
        """Which range a call with `kv_len` keys falls in."""
        return max(i for i, one in enumerate(self.ranges) if one.least <= kv_len)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError, naming the field, where the profile was made for another model."""
        found = self.model.differs(model)
        if found:
            raise ParameterError(f"the profile of {self.method} was made for another model: {found}; tune this one")

    def to_json(self) -> str:
        """The text of a file that `load` reads."""
        ranges = [
            {
                "from": one.least,
                "tokens": one.tokens,
                "parameters": None if one.parameters is None else dict(one.parameters),
                "measured": dict(one.measured),
            }
            for one in self.ranges
        ]
        facts = {
            "schema": SCHEMA,
            "version": VERSION,
            "method": self.method,
            "model": self.model.to_dict(),
            "versions": dict(self.versions),
            "tuned": dict(self.tuned),
            "ranges": ranges,
        }
        return json.dumps(facts, indent=2, allow_nan=False) + "\n"

    @classmethod
    def load(cls, source: str | Path | Profile) -> Profile:
        """From a JSON file, or a Profile as it is; ParameterError names the file and the field that does not fit."""
        if isinstance(source, cls):
            return source
        if not isinstance(source, str | Path):
            raise ParameterError(f"profile is {printed(source)}: pass the path of a profile")
        try:
            text = json_text.read(source)
        except ParameterError as error:
            raise ParameterError(
                f"profile is {printed(str(source))}: {error}; pass a file of sparseprefill tune"
            ) from error
        try:
            with json_text.bounded():
                return cls.of(json_text.parsed(text))
        except ParameterError as error:
            raise ParameterError(f"{source}: {error}") from error

    @classmethod
    def of(cls, facts: object) -> Profile:
        """From the content of such a file."""
        facts = _object("the file", facts)
        for name, wanted in (("schema", SCHEMA), ("version", VERSION)):
            if facts.get(name) != wanted or isinstance(facts.get(name), bool):
                raise ParameterError(f"{name} is {printed(facts.get(name))}: this library reads {printed(wanted)}")
        _finite("", facts)
        _exactly("", facts, ("schema", "version", "method", "model", "versions", "tuned", "ranges"))
        if not isinstance(facts["method"], str):
            raise ParameterError(f"method is {printed(facts['method'])}: pass a name")
        if not isinstance(facts["ranges"], list):
            raise ParameterError(f"ranges is {printed(facts['ranges'])}: pass a list")
        return cls(
            method=facts["method"],
            model=ModelIdentity.of(facts["model"]),
            ranges=tuple(_range(f"ranges[{i}]", one) for i, one in enumerate(facts["ranges"])),
            versions=_object("versions", facts["versions"]),
            tuned=_object("tuned", facts["tuned"]),
        )


def _range(at: str, facts: object) -> LengthRange:
    facts = _object(at, facts)
    _exactly(f"{at}.", facts, _RANGE)
    for name, least in (("from", 0), ("tokens", 1)):
        value = facts[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < WIDEST:
            raise ParameterError(f"{at}.{name} is {printed(value)}: pass an integer >= {least}")
    parameters = facts["parameters"]
    return LengthRange(
        least=facts["from"],
        tokens=facts["tokens"],
        parameters=None if parameters is None else _object(f"{at}.parameters", parameters),
        measured=_object(f"{at}.measured", facts["measured"]),
    )


def _object(at: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"{at} is {printed(value)}: pass an object")
    return value


def _exactly(at: str, facts: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in facts:
        if name not in names:
            raise ParameterError(f"{at}{name} is no field of a profile")
    for name in names:
        if name not in facts:
            raise ParameterError(f"{at}{name} is missing")


def _finite(at: str, value: object) -> None:
    """Python reads NaN and Infinity from JSON; a profile holds neither."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{at} is {value}: pass a finite number")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _finite(f"{at}.{name}" if at else str(name), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _finite(f"{at}[{i}]", inner)
