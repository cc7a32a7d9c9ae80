"""Star Attention: anchored context blocks, then global attention for the query (Acharya et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from sparseprefill.method import Later, Method, a_method, hookimpl, method_table
from sparseprefill.validate import WIDEST, fitting, is_whole, maybe, tokens, whole

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.stages import PatternEstimator


_context = fitting(
    "StarConfig",
    lambda value: value is None or is_whole(value, 1 - WIDEST),
    "a number of tokens, negative from the end, or None",
)


@frozen(kw_only=True)
class StarConfig:
    """Settings of `star-attention`, in tokens; all but `tile` are rounded to whole tiles.

    block_size: tokens per context block; None: a quarter of the context, 32768 where that is longer than 131072.
    anchor_length: first tokens that every block sees; None: one block. context_length: tokens of the prompt that are
    context (phase 1), the rest attends to everything (phase 2); None: all of them; negative: all but the last of each
    row of the call. inner: a method that runs inside each block, by name, as a table of `from_config`, or from Python
    as a pipeline or an estimator. tile: tile size; a power of two from 16 on CUDA devices.
    """

    block_size: int | None = field(default=None, validator=maybe(whole()))
    anchor_length: int | None = field(default=None, validator=maybe(whole(0)))
    context_length: int | None = field(default=None, validator=_context)
    inner: str | Mapping[str, Any] | Pipeline | PatternEstimator | None = field(
        default=None, converter=method_table, validator=a_method
    )
    tile: int = field(default=128, validator=tokens())


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="star-attention",
            summary="context blocks that see the first block and themselves; the query sees everything",
            paper="Star Attention: Efficient LLM Inference over Long Sequences (Acharya et al., 2024)",
            config=StarConfig,
            build=Later(f"{__name__}.stages"),
            full={"block_size": 1 << 30},
            small={"block_size": 32, "anchor_length": 16, "tile": 16},
        )
    ]
