"""Parameters of Kascade."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import Attribute, field, frozen

from sparseprefill.profiles.anchors import load, parse
from sparseprefill.validate import FILE, flag, maybe, number, whole


def _table(value: Any) -> Any:
    if value is None:
        return None
    return load(value) if isinstance(value, str | Path) else parse(value)


def _is_table(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """path, table, layers, or none"""


@frozen(kw_only=True)
class KascadeConfig:
    """Settings of `kascade`.

    anchors: the table of anchor layers and maps of heads, as the path of a JSON file or its content; or the indices of
    the anchor layers, whose followers then go head by head. Without one the method refuses to run. topk: share of the
    keys that a tile keeps. least: a tile keeps at least so many, and a multiple of it. tile: queries that keep the same
    keys, in tokens. sampled: rows of each tile whose attention is summed in anchor layers, evenly spread; None: all.
    rolling: the share is of the keys before the tile; False: of the whole prompt. dense_layers: so many first layers
    keep every key; those of them that are anchors choose for the layers behind all the same.
    """

    anchors: Any = field(default=None, converter=_table, validator=_is_table, metadata={FILE: ()})
    topk: float = field(default=0.1, validator=number(0.0, 1.0))
    least: int = field(default=128, validator=whole())
    tile: int = field(default=128, validator=whole())
    sampled: int | None = field(default=64, validator=maybe(whole()))
    rolling: bool = field(default=True, validator=flag())
    dense_layers: int = field(default=1, validator=whole(0))
