"""Profile: which method, with which parameters, serves prompts of which length; as a checked JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from sparseprefill import json_text
from sparseprefill.breakeven.table import BreakEven
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.validate import WIDEST

SCHEMA = "sparseprefill.profile"
VERSION = 2
REMEDY = "pass a file of sparseprefill fit or tune"
_RANGE = ("from", "tokens", "method", "parameters", "dense_layers", "measured")
_FIELDS = ("schema", "version", "methods", "model", "break_even", "versions", "tuned", "ranges")
_FIRST = ("schema", "version", "method", "model", "versions", "tuned", "ranges")
"""Fields of version 1, which had one method, and no layers apart."""


@frozen(kw_only=True)
class LengthRange:
    """What serves calls of `least` keys and more, up to the next range.

    tokens: the length that it was tuned at. method, parameters: None, both, where no setting was good enough, so that
    calls of this length run dense. dense_layers: indices of the layers that run dense whatever the method, ascending.
    measured: figures of the tuning, for people.
    """

    least: int
    tokens: int
    method: str | None
    parameters: Mapping[str, Any] | None = field(hash=False)
    dense_layers: tuple[int, ...] = ()
    measured: Mapping[str, Any] = field(factory=dict, hash=False)


@frozen(kw_only=True)
class Profile:
    """What `sparseprefill fit` and `sparseprefill tune` write.

    methods: names of the methods that were searched; a range has one of them. model: the model that was tuned on.
    ranges: ascending, the first from 0. break_even: times of these settings by length, where they were measured, for
    ``gate="auto"``. versions, tuned: software, and how the tuning was done, for people.

    Raises ParameterError, naming the field, where the ranges do not fit together.
    """

    methods: tuple[str, ...]
    model: ModelIdentity
    ranges: tuple[LengthRange, ...]
    break_even: BreakEven | None = None
    versions: Mapping[str, Any] = field(factory=dict, hash=False)
    tuned: Mapping[str, Any] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        if not self.methods:
            raise ParameterError("methods is empty: pass the names of the methods that were searched")
        if not self.ranges:
            raise ParameterError("ranges is empty: pass at least one range")
        below = -1
        for i, one in enumerate(self.ranges):
            if i == 0 and one.least != 0:
                raise ParameterError(f"ranges[0].from is {one.least}: the first range starts at 0")
            if one.least <= below:
                raise ParameterError(f"ranges[{i}].from is {one.least}: ranges must ascend, and {below} comes before")
            below = one.least
            _check_range(f"ranges[{i}]", one, self)

    @property
    def name(self) -> str:
        """For messages and reports: the method, or how many there were to choose from."""
        return self.methods[0] if len(self.methods) == 1 else f"the best of {len(self.methods)} methods"

    def index(self, kv_len: int) -> int:
        """Which range a call with `kv_len` keys falls in."""
        return max(i for i, one in enumerate(self.ranges) if one.least <= kv_len)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError, naming the field, where the profile was made for another model."""
        self.model.check_same(model, f"the profile of {self.name}", "tune this one")

    def to_json(self) -> str:
        """The text of a file that `load` reads."""
        ranges = [
            {
                "from": one.least,
                "tokens": one.tokens,
                "method": one.method,
                "parameters": None if one.parameters is None else dict(one.parameters),
                "dense_layers": list(one.dense_layers),
                "measured": dict(one.measured),
            }
            for one in self.ranges
        ]
        facts = {
            "schema": SCHEMA,
            "version": VERSION,
            "methods": list(self.methods),
            "model": self.model.to_dict(),
            "break_even": None if self.break_even is None else self.break_even.to_dict(),
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
        return json_text.load(source, "profile", REMEDY, cls.of)

    @classmethod
    def of(cls, facts: object) -> Profile:
        """From the content of such a file, of this version or of version 1."""
        facts = _object("the file", facts)
        version = facts.get("version")
        if facts.get("schema") != SCHEMA:
            raise ParameterError(
                f"schema is {printed(facts.get('schema'))}: this library reads {printed(SCHEMA)}; {REMEDY}"
            )
        if isinstance(version, bool) or version not in (1, VERSION):
            raise ParameterError(f"version is {printed(version)}: this library reads 1 to {VERSION}; {REMEDY}")
        _finite("", facts)
        _exactly("", facts, _FIRST if version == 1 else _FIELDS)
        if version == 1:
            facts = _of_first(facts)
        given = _list("ranges", facts["ranges"])
        table = facts["break_even"]
        return cls(
            methods=tuple(_text(f"methods[{i}]", one) for i, one in enumerate(_list("methods", facts["methods"]))),
            model=ModelIdentity.of(facts["model"]),
            ranges=tuple(_range(f"ranges[{i}]", one) for i, one in enumerate(given)),
            break_even=None if table is None else _break_even(table),
            versions=_object("versions", facts["versions"]),
            tuned=_object("tuned", facts["tuned"]),
        )


def _of_first(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a file of version 1, as this version has it."""
    method = _text("method", facts["method"])
    made = []
    for i, one in enumerate(_list("ranges", facts["ranges"])):
        at = f"ranges[{i}]"
        _exactly(f"{at}.", _object(at, one), ("from", "tokens", "parameters", "measured"))
        made.append({**one, "method": None if one["parameters"] is None else method, "dense_layers": []})
    return {**facts, "methods": [method], "break_even": None, "ranges": made}


def _break_even(facts: object) -> BreakEven:
    try:
        return BreakEven.of(facts)
    except ParameterError as error:
        raise ParameterError(f"break_even: {error}") from error


def _check_range(at: str, one: LengthRange, profile: Profile) -> None:
    if (one.method is None) != (one.parameters is None):
        raise ParameterError(
            f"{at}.method is {printed(one.method)} and {at}.parameters is {printed(one.parameters)}: "
            "pass both, or None for both to run calls dense"
        )
    if one.method is not None and one.method not in profile.methods:
        known = ", ".join(profile.methods)
        raise ParameterError(f"{at}.method is {printed(one.method)}: pass one of methods, {known}, or None")
    layers = one.dense_layers
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < profile.model.layers for layer in layers):
        raise ParameterError(
            f"{at}.dense_layers is {printed(list(layers))}: pass ascending indices of the model's "
            f"{profile.model.layers} layers, from 0"
        )


def _range(at: str, facts: object) -> LengthRange:
    facts = _object(at, facts)
    _exactly(f"{at}.", facts, _RANGE)
    for name, least in (("from", 0), ("tokens", 1)):
        value = facts[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < WIDEST:
            raise ParameterError(f"{at}.{name} is {printed(value)}: pass an integer >= {least}")
    method, parameters = facts["method"], facts["parameters"]
    layers = _list(f"{at}.dense_layers", facts["dense_layers"])
    if any(not isinstance(layer, int) or isinstance(layer, bool) for layer in layers):
        raise ParameterError(f"{at}.dense_layers is {printed(layers)}: pass indices of layers")
    return LengthRange(
        least=facts["from"],
        tokens=facts["tokens"],
        method=None if method is None else _text(f"{at}.method", method),
        parameters=None if parameters is None else _object(f"{at}.parameters", parameters),
        dense_layers=tuple(layers),
        measured=_object(f"{at}.measured", facts["measured"]),
    )


def _text(at: str, value: object) -> str:
    if not isinstance(value, str):
        raise ParameterError(f"{at} is {printed(value)}: pass a name")
    return value


def _list(at: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ParameterError(f"{at} is {printed(value)}: pass a list")
    return value


def _object(at: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"{at} is {printed(value)}: pass an object")
    return value


def _exactly(at: str, facts: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in facts:
        if name not in names:
            raise ParameterError(f"{at}{name} is not a field of a profile")
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
