"""Parameters of XAttention, as the paper names them."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.validate import flag, number, whole


def _block(config: XConfig, attribute: Attribute[Any], value: Any) -> None:
    """a multiple of stride."""
    whole()(config, attribute, value)
    if value % config.stride:
        raise ParameterError(f"{attribute.name} is {printed(value)}: pass a multiple of stride, {config.stride}")


@frozen(kw_only=True)
class XConfig:
    """Settings of `xattention`.

    stride: distance of the antidiagonals, and tokens per group, 8 or 16 in the paper. threshold: share of a query
    tile's scores that its key tiles must reach. block: tile size in tokens. sink: keep the first key tile of every row.
    """

    stride: int = field(default=16, validator=whole())
    threshold: float = field(default=0.9, validator=number(0.0, 1.0))
    block: int = field(default=128, validator=_block)
    sink: bool = field(default=True, validator=flag())
