"""Profile: which method, with which parameters, serves prompts of which length; as a checked JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import field, frozen

from sparseprefill import structure
from sparseprefill.breakeven.table import BreakEven
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.structure import KEY, Schema
from sparseprefill.validate import whole

REMEDY = "pass a file of sparseprefill fit"


@frozen(kw_only=True)
class LengthRange:
    """The pipeline for calls of `least` keys and more, up to the next range.

    tokens: the length that it was tuned at. method, parameters: None, both, where no setting was good enough, so that
    calls of this length run dense. dense_layers: indices of the layers that run dense whatever the method, ascending.
    measured: figures of the tuning, for people.
    """

    least: int = field(validator=whole(0), metadata={KEY: "from"})
    tokens: int = field(validator=whole())
    method: str | None
    parameters: Mapping[str, Any] | None = field(hash=False)
    dense_layers: tuple[int, ...] = ()
    measured: Mapping[str, Any] = field(factory=dict, hash=False)


@frozen(kw_only=True)
class Profile:
    """A profile, as `sparseprefill fit` writes it.

    methods: names of the methods that were searched; a range has one of them. model: the model that was tuned on.
    ranges: ascending, the first from 0. break_even: times of these settings by length, where they were measured, for
    ``gate="auto"``. versions, tuned: software, and how the tuning was done, for people.

    Raises ParameterError, naming the field, where the ranges do not fit together.
    """

    SCHEMA: ClassVar[Schema] = Schema("sparseprefill.profile", 2, REMEDY)

    methods: tuple[str, ...]
    model: ModelIdentity
    break_even: BreakEven | None = None
    versions: Mapping[str, Any] = field(factory=dict, hash=False)
    tuned: Mapping[str, Any] = field(factory=dict, hash=False)
    ranges: tuple[LengthRange, ...]

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
        """Name in messages and reports: the method, or how many there were to choose from."""
        return self.methods[0] if len(self.methods) == 1 else f"the best of {len(self.methods)} methods"

    def index(self, kv_len: int) -> int:
        """The index of the range that a call with `kv_len` keys falls in."""
        return max(i for i, one in enumerate(self.ranges) if one.least <= kv_len)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError, naming the field, where the profile was made for another model."""
        self.model.check_same(model, f"the profile of {self.name}", "fit this one")

    def to_json(self) -> str:
        """The text of a file that `load` reads."""
        return json.dumps(structure.unstructure(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def load(cls, source: str | Path | Profile) -> Profile:
        """Read a profile from a JSON file, or take a Profile as it is; ParameterError names the file and the field."""
        if isinstance(source, cls):
            return source
        if not isinstance(source, str | Path):
            raise ParameterError(f"profile is {printed(source)}: pass the path of a profile")
        return structure.load(source, "profile", REMEDY, cls.of)

    @classmethod
    def of(cls, facts: object) -> Profile:
        """Make a profile from the content of such a file."""
        made: Profile = structure.structure(cls, facts)
        return made


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
