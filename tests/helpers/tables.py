"""Break-even tables with made-up figures, and files of tables that are wrong in one place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparseprefill.breakeven.points import DeviceKind, HeadShape, MethodTime, Point
from sparseprefill.breakeven.table import BreakEven

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}


def point(queries: int, keys: int, dense: float = 1.0, density: float = 0.2, **ratios: float) -> Point:
    """One size: ratio of each method (with _ for -) to `dense`, a third of it estimating; the executor is linear."""
    methods = {
        name.replace("_", "-"): MethodTime(seconds=dense * ratio, estimate=dense * ratio / 3, density=density)
        for name, ratio in ratios.items()
    }
    executor = tuple((share, dense * share) for share in (0.1, 0.5, 1.0))
    return Point(queries=queries, keys=keys, dense=dense, executor=executor, methods=methods)


def shape_of(*points: Point, **changes: Any) -> HeadShape:
    return HeadShape(**{**SHAPE, **changes}, points=points)


def whole(ratios: Mapping[int, float], method: str = "streaming", **changes: Any) -> HeadShape:
    """Whole prompts: ratio by length of one method; dense grows with the square."""
    made = [point(n, n, n * n * 1e-9, **{method.replace("-", "_"): ratio}) for n, ratio in sorted(ratios.items())]
    return shape_of(*made, **changes)


def table(*shapes: HeadShape, kind: str = "cpu", capability: tuple[int, int] | None = None) -> BreakEven:
    return BreakEven(device=DeviceKind(type=kind, capability=capability, name="test"), shapes=shapes)


def from_length(least: int, method: str = "streaming", **changes: Any) -> BreakEven:
    """A table by which the method pays from about `least` tokens on."""
    return table(whole({least // 2: 4.0, least: 0.9, 4 * least: 0.2}, method, **changes))


def altered(text: str, at: Sequence[Any], value: Any) -> Any:
    """The content of a JSON text with another value at one place."""
    facts = inner = json.loads(text)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return facts
