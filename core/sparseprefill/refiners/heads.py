"""One mask for the query heads that share a KV head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, frozen

from sparseprefill.mask.lists import IndexLists
from sparseprefill.stages import HeadScope

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan


@frozen
class GqaUnion:
    """Gives every query head what any head of its GQA group selects, the carry's region included.

    Tiles and stripes are united through bool maps, ``[B, Hq, R, C]`` and ``[B, Hq, G, Nkv]``. Where the carry's region
    differs between heads (`IndexLists.same_heads` does not say otherwise), a head gets the regions of the others too.
    """

    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "group"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Unites the masks of each group."""
        if call.group == 1:
            return plan
        mask = over_group(plan.mask, call.group)
        if plan.carry is not None:
            region = plan.carry.region
            if any(lists is not None and not lists.same_heads for lists in (region.tiles, region.stripes)):
                mask = (mask | over_group(region, call.group)) - region
        return evolve(plan, mask=mask)


def over_group(mask: SparseMask, group: int) -> SparseMask:
    """The union over each `group` consecutive heads, given to all of them."""
    tiles = mask.as_map().united(group) if mask.has_tiles else None
    stripes = mask.stripes
    if stripes is not None and not stripes.same_heads:
        columns = mask.stripe_map(mask.stripe_width).unflatten(1, (-1, group)).any(2)
        stripes = IndexLists.from_map(columns).for_group(group)
    return evolve(mask, tiles=tiles, stripes=stripes, disjoint=False)
