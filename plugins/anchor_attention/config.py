"""Parameters of AnchorAttention, as the paper names them."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.validate import flag, number, whole


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
    block: int = field(default=128, validator=whole())
    init_tokens: int = field(default=128, validator=whole())
    use_anchor: bool = field(default=True, validator=flag())
