"""AnchorAttention: difference-aware stripe sparsity (Zhang et al., 2025)."""

from __future__ import annotations

import math

from attrs import field, frozen

from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import flag, number, tokens, whole


@frozen(kw_only=True)
class AnchorConfig:
    """Settings of `anchor-attention`.

    theta: a key is kept where its pooled logit lies at most this far below the anchor (natural-log units); +inf keeps
    all. step: query blocks per group; the group shares its stripes. block: query rows per block, in tokens.
    init_tokens: first keys that belong to the anchor region. use_anchor: False sets the anchor to 0 (Table 4,
    "without anchor").
    """

    theta: float = field(default=12.0, validator=number())
    step: int = field(default=16, validator=whole())
    block: int = field(default=128, validator=tokens())
    init_tokens: int = field(default=128, validator=whole())
    use_anchor: bool = field(default=True, validator=flag())


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="anchor-attention",
            summary="single key columns whose pooled logit comes near the row's anchor",
            paper="AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity (Zhang et al., 2025)",
            config=AnchorConfig,
            build=Later(f"{__name__}.stages"),
            full={"theta": math.inf},
            small={"theta": 1.0, "step": 2, "block": 16, "init_tokens": 16},
            search={"theta": (7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 15.0)},
        )
    ]
