"""The estimator of Kascade, which chooses keys or takes an earlier layer's, and the observer, which keeps a choice."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar
from uuid import uuid4

from attrs import asdict, field, frozen

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import ranges_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.stages import HeadScope

from . import KascadeConfig
from .budget import Budget, Layout, mask_of
from .records import Chosen, Kept, renewed
from .sums import SLAB, SumsPriority, choose

MISSING = (
    "no table of anchor layers; make one with `sparseprefill anchors --model PATH` and pass anchors=TABLE, or name the "
    "layers, such as anchors=[0, 2, 8, 13, 14]"
)


@frozen(kw_only=True, eq=False)
class Kascade(KascadeConfig):
    """In an anchor layer: the columns of most attention for each KV head and tile, and the tile's own keys. In the
    layers behind it: the same columns, by the table's map of heads. All parameters are those of `KascadeConfig`.

    It needs the observer that keeps the choice: `Kascade.pipeline`. A layer that finds none, since its anchor did not
    run in this pass, chooses for itself; `Plan.notes` says so (`Chosen.note`).
    key: of its own, for its evidence and what is remembered.
    """

    key: str = field(init=False, repr=False, factory=lambda: f"kascade {uuid4().hex}")
    head_scope: ClassVar[HeadScope] = "group"

    @cached_property
    def budget(self) -> Budget:
        """Number of keys that its tiles keep."""
        return Budget(self.topk, self.least, self.tile)

    @property
    def grain(self) -> int:
        """Tiles lie on absolute positions, and look at nothing behind them."""
        return self.tile

    @property
    def pipeline(self) -> Pipeline:
        """A pipeline of this stage and its observer."""
        return Pipeline(self, observers=(ChoiceObserver(self),), name="kascade")

    @property
    def rows(self) -> int:
        """Rows of a tile that are summed."""
        return self.tile if self.sampled is None else min(self.sampled, self.tile)

    def workspace(self, call: AttentionCall) -> int:
        """A slab of sums with the LSE of its rows, and the lists, twice: where parts are joined."""
        geometry, budget = call.geometry, self.budget
        lists = 8 * geometry.batch * call.kv_heads * Layout.of(call, budget).size
        sums = geometry.batch * call.kv_heads * geometry.kv_len * 4
        few = max(SLAB, sums)
        tiles = min(geometry.tile_rows(self.tile), few // sums)
        lse = geometry.batch * geometry.heads * tiles * self.rows * (geometry.tile_columns(512) + 4) * 8
        rows = geometry.batch * geometry.tile_rows(self.tile) * (self.rows * 40 + geometry.heads * 32)
        return lists + few + lse + rows + ranges_workspace(call, budget.tile_q, 0)

    def unsupported(self, call: AttentionCall) -> tuple[str, ...]:
        """A missing table, or one for another model; a window."""
        if self.anchors is None:
            return (MISSING,)
        reasons = []
        if call.window is not None:
            reasons.append(f"a sliding window ({call.window} keys) leaves no room for columns")
        objection = self.anchors.objection(call)
        if objection is not None:
            reasons.append(f"the table of anchors is for another model: {objection}")
        return tuple(reasons)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where the table was made for another model."""
        if self.anchors is not None:
            self.anchors.check_model(model)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The columns as stripes; the layer's own attention is left as priority, `Chosen` as a note."""
        layer, table = call.layer, self.anchors
        anchor, followed = table.anchor_of(layer), table.followed(layer)
        priority = SumsPriority(self.tile, self.rows)
        if layer < self.dense_layers:
            lists = choose(call, self.budget, self.rows) if followed else None
            mask = SparseMask.full(call, self.budget.tile_q)
            return Plan(mask, priority=priority, notes={self.key: Chosen(None, lists)})
        found, note = (None, "") if anchor == layer else self._earlier(call, memory, anchor)
        if found is None:
            found = choose(call, self.budget, self.rows)
            chosen = Chosen(layer, found if followed else None, note)
        else:
            chosen = Chosen(anchor, None, note)
        mask = mask_of(call, self.budget, found.for_group(call.group))
        return Plan(mask, priority=priority, notes={self.key: chosen})

    def kept(self, memory: Memory) -> Kept | None:
        """The choice of the request's last anchor layer, if there was one."""
        found: Kept | None = memory.get(self.key, None)
        return found

    def _earlier(self, call: AttentionCall, memory: Memory, anchor: int) -> tuple[IndexLists | None, str]:
        """The anchor's lists for this layer's heads, or None; and what is to be said about it."""
        kept = self.kept(memory)
        selection = None if kept is None else kept.selection(call, anchor)
        if selection is None:
            return None, f"layer {anchor}, its anchor, has chosen nothing in this pass"
        first = call.first_head // call.group
        lists, missing = selection.of_heads(self.anchors.heads(call.layer, first, call.kv_heads), first)
        words = (
            f"KV heads {sorted(set(missing))} of layer {anchor} are not on this device: heads that follow them use the "
            "local head with their own number"
        )
        return lists, words if missing else ""


@frozen(eq=False)
class ChoiceObserver:
    """Keeps the choice of an anchor layer until the next anchor."""

    stage: Kascade
    head_scope: ClassVar[HeadScope] = "group"

    @property
    def grain(self) -> int:
        """Each chunk has a choice of its own, in its own tiles."""
        return self.stage.grain

    def workspace(self, call: AttentionCall) -> int:
        """Nothing beyond the lists, which are the estimator's."""
        return 0

    @uncast
    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Nothing where the estimator is another one."""
        chosen = plan.notes.get(self.stage.key)
        if not isinstance(chosen, Chosen):
            return
        new = renewed(call, self.stage.kept(memory), chosen)
        if new is not None:
            memory.put(self.stage.key, new)


def pipeline(config: KascadeConfig) -> Pipeline:
    """Build `kascade`."""
    return Kascade(**asdict(config, recurse=False)).pipeline
