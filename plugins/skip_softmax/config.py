"""Parameters of skip-softmax."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.validate import LONGEST, number, whole


@frozen(kw_only=True)
class SkipSoftmaxConfig:
    """Settings of `skip-softmax`.

    skip_below: c, in tokens: a tile is skipped where exp(its largest logit - the running maximum) < c / length. 0 skips
    nothing, and so does a prompt of c tokens or fewer. block: tile size in tokens.
    """

    skip_below: float = field(default=587.0, validator=number(0.0, LONGEST))
    block: int = field(default=128, validator=whole())
