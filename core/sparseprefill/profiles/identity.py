"""ModelIdentity: which model a tuned file was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, fields, frozen

from sparseprefill.errors import ParameterError, printed

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

MOST = 1 << 31
"""No size of a model reaches it."""


@frozen(kw_only=True)
class ModelIdentity:
    """Architecture and sizes of a model; its weights play no part.

    name: for people, never compared. architecture: class of the model. layers, heads, kv_heads, head_dim: of its
    attention. digest: hash over the sizes of its configuration, so that two models of one architecture differ by it.
    """

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    digest: str

    def differs(self, other: ModelIdentity) -> str | None:
        """What tells the models apart, such as ``model.layers is 6, here it is 32``; None for one and the same."""
        for field in fields(type(self)):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name != "name" and mine != theirs:
                return (
                    f"model.{field.name} is {printed(mine)} ({self.name}), here it is {printed(theirs)} ({other.name})"
                )
        return None

    def check_same(self, other: ModelIdentity, what: str, remedy: str) -> None:
        """ParameterError, naming the field, where `what` was made for this model and is to serve another."""
        found = self.differs(other)
        if found:
            raise ParameterError(f"{what} was made for another model: {found}; {remedy}")

    def objection(self, call: AttentionCall) -> str | None:
        """Which size the call does not have, or None."""
        found = {"heads": call.q.shape[1], "kv_heads": call.kv_heads, "head_dim": call.q.shape[3]}
        for name, value in found.items():
            if getattr(self, name) != value:
                return f"model.{name} is {getattr(self, name)} ({self.name}), the call has {value}"
        if not 0 <= call.layer < self.layers:
            return f"model.layers is {self.layers} ({self.name}), the call is of layer {call.layer}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """As `of` reads it."""
        return asdict(self)

    @classmethod
    def of(cls, facts: object) -> ModelIdentity:
        """From plain data; ParameterError names the field that does not fit."""
        names = [field.name for field in fields(cls)]
        if not isinstance(facts, Mapping) or set(facts) != set(names):
            raise ParameterError(f"model is {printed(facts)}: pass an object with {', '.join(names)}")
        for name, value in facts.items():
            if name in ("name", "architecture", "digest"):
                if not isinstance(value, str):
                    raise ParameterError(f"model.{name} is {printed(value)}: pass a string")
            elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < MOST:
                raise ParameterError(f"model.{name} is {printed(value)}: pass a positive integer below 2^31")
        return cls(**facts)
