"""The rule for devices that no break-even table speaks of: cautious, so that a short prompt is not made slower.

Where the figures come from stands in docs/breakeven.md, with the commands that measured them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from sparseprefill.breakeven.rule import pairs
from sparseprefill.breakeven.table import Verdict

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

HOW = "measure a table with sparseprefill calibrate, or pass gate=None to run every call sparse"


@frozen(kw_only=True)
class Unmeasured:
    """Judges calls by how long they are and how much dense attention would have to do.

    keys: tokens from which a call may run sparse. work: multiplications (pairs of tokens, times query heads, times head
    dimension, times batch rows) from which it may; None where nothing is known, and no call runs sparse.
    """

    keys: int
    work: float | None

    def judge(self, call: AttentionCall, why: str) -> Verdict:
        """The verdict. why: what is missing, which its reason begins with. By sizes alone."""
        if call.window is not None:
            return Verdict(True)
        batch, heads, rows, width = call.q.shape
        keys = call.kv_len if call.q_offset is None else call.q_offset + rows
        if self.work is not None and keys >= self.keys and batch * heads * width * pairs(rows, keys) >= self.work:
            return Verdict(True, None, f"{why}: judged by {self}")
        return Verdict(False, None, f"{why}: dense by {self}; {HOW}")

    def __str__(self) -> str:
        if self.work is None:
            return "the built-in rule (nothing is known about such devices, so every call is dense)"
        return f"the built-in rule (sparse from {self.keys:,} keys and {self.work / 1e9:,.0f} billion multiplications)"


def _work(queries: int, keys: int, heads: int, width: int) -> float:
    return heads * width * pairs(queries, keys)


RULES = {
    "cpu": Unmeasured(keys=32768, work=_work(32768, 32768, 4, 64)),
    "cuda": Unmeasured(keys=32768, work=_work(2048, 65536, 32, 128)),
}
"""By the type of the device."""
NOTHING_KNOWN = Unmeasured(keys=0, work=None)


def rule_for(device: str) -> Unmeasured:
    """The rule for a type of device, as PyTorch names it."""
    return RULES.get(device, NOTHING_KNOWN)
