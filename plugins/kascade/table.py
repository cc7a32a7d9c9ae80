"""AnchorTable: which layers of a model choose keys, and whose choice the others take; as a checked JSON file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from attrs import field, frozen

from sparseprefill import structure
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.table import ModelTable
from sparseprefill.validate import maybe, whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

Indices = tuple[Annotated[int, whole(0, (1 << 31) - 1)], ...]
"""Indices of layers, or of heads."""


@frozen(kw_only=True)
class AnchorTable(ModelTable):
    """Anchor layers, ascending, and for the layers between them which KV head of the anchor each of theirs follows.

    maps: by layer; a layer without an entry follows head by head. model: whose layers they are; None for a table
    written by hand. made: how the table was made, for people.

    Raises ParameterError, naming the field, for what does not fit together.
    """

    SCHEMA: ClassVar[structure.Schema] = structure.Schema(
        "sparseprefill.anchors", 1, "make one with sparseprefill anchors", short=True
    )

    anchors: Indices
    maps: Mapping[int, Indices] = field(factory=dict, hash=False)
    model: ModelIdentity | None = None
    made: Mapping[str, Any] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        if not self.anchors:
            raise ParameterError("anchors is empty: pass the index of at least one layer")
        if list(self.anchors) != sorted(set(self.anchors)) or self.anchors[0] < 0:
            raise ParameterError(f"anchors is {printed(list(self.anchors))}: pass ascending indices of layers, from 0")
        for layer, heads in self.maps.items():
            at = f"maps[{layer}]"
            if layer in self.anchors or layer < self.anchors[0]:
                raise ParameterError(f"{at} is of a layer that follows no anchor: leave it out")
            if not heads or min(heads) < 0 or max(heads) >= len(heads):
                raise ParameterError(
                    f"{at} is {printed(list(heads))}: pass a KV head of the anchor for each of its own, counted from 0"
                )
        model = self.model
        if model is None:
            return
        beyond = [layer for layer in (*self.anchors, *self.maps) if layer >= model.layers]
        if beyond:
            name = "anchors" if beyond[0] in self.anchors else "maps"
            raise ParameterError(
                f"{name}: layer {beyond[0]} does not exist in a model of {model.layers} layers: remove it"
            )
        for layer, heads in self.maps.items():
            if len(heads) != model.kv_heads or max(heads) >= model.kv_heads:
                words = f"pass {model.kv_heads} numbers from 0 to {model.kv_heads - 1}, one for each KV head"
                raise ParameterError(f"maps[{layer}] is {printed(list(heads))}: {words}")

    def anchor_of(self, layer: int) -> int:
        """The layer whose keys it takes: itself for anchors, and for layers before the first one."""
        before = bisect_right(self.anchors, layer)
        return self.anchors[before - 1] if before else layer

    def followed(self, layer: int) -> bool:
        """True if the next layer takes the keys of this one, which is an anchor."""
        last = self.model is not None and layer + 1 >= self.model.layers
        return layer in self.anchors and layer + 1 not in self.anchors and not last

    def heads(self, layer: int, first: int, count: int) -> tuple[int, ...]:
        """For `count` KV heads of a layer from `first` on: the KV head of the anchor that each follows."""
        known = self.maps.get(layer)
        return tuple(range(first, first + count)) if known is None else known[first : first + count]

    def objection(self, call: AttentionCall) -> str | None:
        """Reason for which the table does not fit a call, or None."""
        if self.model is not None:
            return super().objection(call)
        known, first = self.maps.get(call.layer), call.first_head // call.group
        if known is None or (len(known) >= first + call.kv_heads and len(known) % call.kv_heads == 0):
            return None  # a call may be one device's share of the heads
        heads = f"KV heads {first} to {first + call.kv_heads - 1}" if first else f"{call.kv_heads} KV heads"
        return f"maps[{call.layer}] is {printed(list(known))}, the call has {heads}: pass one number for each KV head"


def parse(facts: object) -> object:
    """The indices of the anchor layers, whose followers go head by head, as a table; other data as it is."""
    if isinstance(facts, list | tuple):
        return AnchorTable(anchors=structure.structure(Indices, facts, "anchors"))
    if not isinstance(facts, Mapping):
        raise ParameterError(f"anchors is {printed(facts)}: pass a path, a table, or the indices of the anchor layers")
    return facts


@frozen(kw_only=True)
class Settings:
    """Choice of the anchor layers.

    count: anchor layers; by default one in seven, such as 5 of 32. tile: tokens of a query tile. columns: keys before a
    tile by which layers are compared.

    `columns` is by default the fewest that the method ever keeps, where a choice is hardest.
    """

    count: int | None = field(default=None, validator=maybe(whole()))
    tile: int = field(default=128, validator=whole(16))
    columns: int = field(default=128, validator=whole())

    def check(self, tokens: int) -> None:
        """ParameterError where samples of so many tokens are too short."""
        least = self.columns + self.tile
        if tokens <= least:
            raise ParameterError(
                f"the shortest prompt has {tokens} tokens: pass longer ones than {least}, or no tile has more keys "
                "before it than it keeps"
            )
