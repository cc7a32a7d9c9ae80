"""Parameters of SampleAttention, as the paper names them."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.validate import number, whole

EXTEND = ("chunk", "union")


def _extend(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """chunk or union"""
    if value not in EXTEND:
        raise ParameterError(f"{attribute.name} is {printed(value)}: pass {' or '.join(map(repr, EXTEND))}")


@frozen(kw_only=True)
class SampleConfig:
    """Settings of `sample-attention`.

    alpha_c: share of the sampled mass that key columns must reach; 1 keeps all. alpha_s: share of the sampled mass that
    slashes must reach; 1 keeps all. chunk_n: parts that the queries are cut into, each sampled at its end; with more
    parts than query blocks, each block is one. block: rows sampled per part, and keys per bin of columns and of
    diagonals, in tokens. extend: "chunk", columns and diagonals govern the rows of the part that they were found in;
    "union", those of every part govern all rows.
    """

    alpha_c: float = field(default=0.95, validator=number(0.0, 1.0))
    alpha_s: float = field(default=0.95, validator=number(0.0, 1.0))
    chunk_n: int = field(default=2, validator=whole())
    block: int = field(default=128, validator=whole())
    extend: str = field(default="chunk", validator=_extend)
