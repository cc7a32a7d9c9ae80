"""Skip-softmax: key tiles whose logits cannot matter are left out while the executor runs, under any mask."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Remark
from sparseprefill.stages import HeadScope
from sparseprefill.validate import LONGEST, maybe, number, whole


@frozen
class SkipSoftmax:
    """The executor leaves out what is not worth finishing: tiles with ``exp(tile max - running max) < below / length``.

    The rule is BLASST's (arXiv 2512.12087). A row votes for leaving out a tile if its largest logit there, scaled,
    capped and masked, lies so far below the running maximum of the tiles before; one row of the voting group that does
    not, and the tile is computed for all of them. What is left out costs its logits and nothing more: no exponentials,
    no product with the values. Output and LSE are those of what was computed, `Result.skipped` counts the rest.

    below: c, in tokens; the threshold is c over the prompt's length, for all chunks of the prompt where the call knows
    it (`AttentionCall.prompt_lengths`), else over what there is of it so far. 0 leaves the plan as it is, bit by bit. A
    threshold of 1 or more would leave out nearly everything: of prompts that are no longer than c nothing is skipped,
    and a `Remark` in the plan's notes says so where the host knows the length.
    grain: tokens at whose multiples a prompt may be cut, a multiple of the plan's query tile: rows of a tile vote
    together. None: no grain.

    The order is part of the rule, since a tile is held against those before it. Of a query block: first the steps of
    tiles that hold a key behind its first row, from the last key back, the diagonal among them; then the first tile of
    its list, the sinks; then the tiles before the diagonal, back to the second. Stripes come last, in the order of
    their list, as many keys at a time as a step has. The running maximum begins with the plan's carry, where there is
    one; what has no maximum yet is never left out. A NaN among the logits has no say.

    The voting group is the query rows of one product: `Result.skipped` says how many rows and keys, and
    docs/methods/skip-softmax.md which executor has which.
    """

    below: float = field(default=587.0, validator=number(0.0, LONGEST))
    grain: int | None = field(default=128, kw_only=True, validator=maybe(whole()))
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[str] = "prompt"

    def workspace(self, call: AttentionCall) -> int:
        """A number a batch row."""
        return 64 * call.geometry.batch

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """The plan with its thresholds; ParameterError for a `grain` that its query tiles do not divide."""
        tile = plan.mask.tile_q
        if self.grain is not None and self.grain % tile:
            remedy = f"pass a multiple of {tile}, the tokens of the plan's query tiles"
            raise ParameterError(f"SkipSoftmax.grain is {self.grain}: {remedy}")
        if self.below == 0:
            return plan
        length = prompt_length(call)
        if isinstance(length, Tensor):
            threshold = self.below / length.to(torch.float64)
            return evolve(plan, skip_below=torch.where(threshold < 1, threshold, 0.0).to(torch.float32))
        if self.below >= length:
            why = f"below is {self.below:g} and the prompt is not longer, so nothing is skipped"
            return evolve(plan, notes={**plan.notes, "skip-softmax": Remark(f"SkipSoftmax: {why}")})
        options: dict[str, Any] = {"dtype": torch.float32, "device": call.q.device}
        return evolve(plan, skip_below=torch.full((call.q.shape[0],), self.below / length, **options))


def prompt_length(call: AttentionCall) -> Tensor | int:
    """Tokens of each batch row's prompt ``[B]``, on the device, or a number where sizes alone tell it.

    Of a call that does not know: the real tokens up to its last query row.
    """
    geometry, prompt = call.geometry, call.prompt_lengths
    if prompt is not None:
        return prompt
    if geometry.starts is None and geometry.lengths is None:
        return geometry.q_offset + geometry.q_len
    *_, behind = geometry.token_range()  # negative where all of a row's queries are padding
    return behind.clamp(min=0)
