"""AnchorTable: which layers of a model choose keys, and whose choice the others take; as a checked JSON file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from attrs import field, frozen

from sparseprefill import structure
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.validate import whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

Indices = tuple[Annotated[int, whole(0, (1 << 31) - 1)], ...]
"""Of layers, or of heads."""


@frozen(kw_only=True)
class AnchorTable:
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
            if not heads or min(heads) < 0:
                raise ParameterError(
                    f"{at} is {printed(list(heads))}: pass a KV head of the anchor for each of its own"
                )
        if self.model is not None:
            self._check_sizes(self.model)

    def _check_sizes(self, model: ModelIdentity) -> None:
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
        """Whether the next layer takes the keys of this one, which is an anchor."""
        last = self.model is not None and layer + 1 >= self.model.layers
        return layer in self.anchors and layer + 1 not in self.anchors and not last

    def heads(self, layer: int, first: int, count: int) -> tuple[int, ...]:
        """For `count` KV heads of a layer from `first` on: the KV head of the anchor that each follows."""
        known = self.maps.get(layer)
        return tuple(range(first, first + count)) if known is None else known[first : first + count]

    def objection(self, call: AttentionCall) -> str | None:
        """Why the table does not fit a call, or None."""
        if self.model is not None:
            return self.model.objection(call)
        known, first = self.maps.get(call.layer), call.first_head // call.group
        if known is None or (len(known) >= first + call.kv_heads and len(known) % call.kv_heads == 0):
            return None  # a call may be one device's share of the heads
        heads = f"KV heads {first} to {first + call.kv_heads - 1}" if first else f"{call.kv_heads} KV heads"
        return f"maps[{call.layer}] is {printed(list(known))}, the call has {heads}: pass one number for each KV head"

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError, naming the field, where the table was made for another model."""
        if self.model is not None:
            self.model.check_same(model, "the table of anchors", "make one with sparseprefill anchors")

    def to_json(self) -> str:
        """The text of a file that `load` reads."""
        return structure.by_lines(self)


def load(path: str | Path) -> AnchorTable:
    """From a JSON file; ParameterError names the file and the field that does not fit."""
    return structure.load(path, "anchors", "pass the JSON file of a table", parse)


def parse(facts: object) -> AnchorTable:
    """From the content of such a file, or from the indices of the anchor layers, whose followers go head by head."""
    if isinstance(facts, AnchorTable):
        return facts
    if isinstance(facts, list | tuple):
        return AnchorTable(anchors=structure.structure(Indices, facts, "anchors"))
    if not isinstance(facts, Mapping):
        raise ParameterError(f"anchors is {printed(facts)}: pass a path, a table, or the indices of the anchor layers")
    made: AnchorTable = structure.structure(AnchorTable, facts)
    return made
