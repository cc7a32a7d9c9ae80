"""ModelIdentity: which model a tuned file was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, fields, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.validate import whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

_SIZE = whole(1, (1 << 31) - 1)


@frozen(kw_only=True)
class ModelIdentity:
    """Architecture and sizes of a model; its weights play no part.

    name: for people, never compared. architecture: class of the model. layers, heads, kv_heads, head_dim: of its
    attention. digest: hash over the sizes of its configuration, so that two models of one architecture differ by it.
    """

    name: str
    architecture: str
    layers: int = field(validator=_SIZE)
    heads: int = field(validator=_SIZE)
    kv_heads: int = field(validator=_SIZE)
    head_dim: int = field(validator=_SIZE)
    digest: str

    def differs(self, other: ModelIdentity) -> str | None:
        """The difference of the models, such as ``model.layers is 6, here it is 32``; None for one and the same."""
        for one in fields(type(self)):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name != "name" and mine != theirs:
                return f"model.{one.name} is {printed(mine)} ({self.name}), here it is {printed(theirs)} ({other.name})"
        return None

    def check_same(self, other: ModelIdentity, what: str, remedy: str) -> None:
        """ParameterError, naming the field, where `what` was made for this model and is to serve another."""
        found = self.differs(other)
        if found:
            raise ParameterError(f"{what} was made for another model: {found}; {remedy}")

    def objection(self, call: AttentionCall) -> str | None:
        """The size that the call does not have, or None."""
        found = {"heads": call.q.shape[1], "kv_heads": call.kv_heads, "head_dim": call.q.shape[3]}
        for name, value in found.items():
            if getattr(self, name) != value:
                return f"model.{name} is {getattr(self, name)} ({self.name}), the call has {value}"
        if not 0 <= call.layer < self.layers:
            return f"model.layers is {self.layers} ({self.name}), the call is of layer {call.layer}"
        return None
