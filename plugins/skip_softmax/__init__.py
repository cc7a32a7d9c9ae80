"""Skip-softmax (BLASST): every key tile is looked at, and those whose logits cannot matter are not finished."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import LONGEST, number, tokens


@frozen(kw_only=True)
class SkipSoftmaxConfig:
    """Settings of `skip-softmax`.

    skip_below: c, in tokens: a tile is skipped where exp(its largest logit - the running maximum) < c / length. 0 skips
    nothing, and so does a prompt of c tokens or fewer. block: tile size in tokens.
    """

    skip_below: float = field(default=587.0, validator=number(0.0, LONGEST))
    block: int = field(default=128, validator=tokens())


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="skip-softmax",
            summary="looks at every key tile, and skips those whose logits cannot matter while attention runs",
            paper="BLASST (arXiv 2512.12087)",
            config=SkipSoftmaxConfig,
            build=Later(f"{__name__}.stages"),
            full={"skip_below": 0.0},
            small={"skip_below": 60.0, "block": 16},
            search={"skip_below": (20.0, 100.0, 300.0, 600.0, 1200.0, 2500.0, 5000.0, 10000.0)},
        )
    ]
