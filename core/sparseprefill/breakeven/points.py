"""The figures of a break-even table: measured times of one layer's attention, by shape and by size of the call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from attrs import Attribute, field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.validate import Check, one_of, whole

MOST = 1 << 40
"""No size reaches it; products of sizes up to it are floats still."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


def _within(least: float, most: float, what: str) -> Check:
    """A number from `least` to `most`. what: the remedy, in words."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ParameterError(f"{attribute.name} is {printed(value)}: pass {what}")

    return check


SIZE = whole(1, MOST)
SECONDS = _within(1e-12, 1e12, "seconds, a finite number above 0 (1e-12 to 1e12)")
DENSITY = _within(5e-324, 1, "a share of the causal pairs, above 0 and up to 1")


def _capability(_: object, attribute: Attribute[Any], value: Any) -> None:
    good = isinstance(value, list | tuple) and len(value) == 2
    if value is not None and not (good and all(type(one) is int and 0 <= one <= MOST for one in value)):
        raise ParameterError(f"{attribute.name} is {printed(value)}: pass two integers, such as [9, 0], or null")


@frozen(kw_only=True)
class DeviceKind:
    """What a table was measured on. Calls on a device of this type and capability are judged by it.

    type: PyTorch's name of it, such as "cuda" or "cpu". capability: CUDA's compute capability, None elsewhere.
    name: for people.
    """

    type: str
    capability: tuple[int, int] | None = field(default=None, validator=_capability)
    name: str = ""

    def __str__(self) -> str:
        kind = self.type if self.capability is None else f"{self.type} {self.capability[0]}.{self.capability[1]}"
        return f"{self.name} ({kind})" if self.name else kind


@frozen(kw_only=True)
class MethodTime:
    """One method at one size: seconds of the whole call, of the estimator within, and the density that it chose."""

    seconds: float = field(validator=SECONDS)
    estimate: float = field(validator=SECONDS)
    density: float = field(validator=DENSITY)


class Ran(NamedTuple):
    """What the executor took at a density."""

    density: Annotated[float, DENSITY]
    seconds: Annotated[float, SECONDS]


def _ran(given: Iterable[tuple[float, float]]) -> tuple[Ran, ...]:
    return tuple(Ran(*one) for one in given)


@frozen(kw_only=True)
class Point:
    """One size of call, batch 1, the queries being the last of the keys.

    queries, keys: rows and tokens. dense: seconds of dense attention. executor: (density, seconds) of the sparse
    executor on random tiles, ascending. methods: by name.

    Raises ParameterError where a figure is out of bounds, or densities do not ascend.
    """

    queries: int = field(validator=SIZE)
    keys: int = field(validator=SIZE)
    dense: float = field(validator=SECONDS)
    executor: tuple[Ran, ...] = field(default=(), converter=_ran)
    methods: Mapping[str, MethodTime] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        if self.queries > self.keys:
            remedy = "there cannot be more queries than keys; pass at most the keys"
            raise ParameterError(f"queries is {self.queries}: {remedy}")
        for i, (before, one) in enumerate(pairwise(self.executor), 1):
            if one.density <= before.density:
                words = f"densities must ascend, and {before.density} comes before"
                raise ParameterError(f"executor[{i}].density is {one.density}: {words}")

    @property
    def whole(self) -> bool:
        """Whether the call is a whole prompt; else it is a chunk behind others."""
        return self.queries == self.keys

    def executor_at(self, density: float) -> float | None:
        """Seconds of the executor at a density: linear between those measured, the nearest beyond; None without any."""
        if not self.executor:
            return None
        (least, low), (most, high) = self.executor[0], self.executor[-1]
        if density <= least:
            return low
        for (a, x), (b, y) in pairwise(self.executor):
            if density <= b:
                return x + (y - x) * (density - a) / (b - a)
        return high if density >= most else low


@frozen(kw_only=True)
class HeadShape:
    """Points of one shape of heads, by ascending (queries, keys). dtype: PyTorch's name, such as "bfloat16".

    Raises ParameterError where the sizes do not fit, or points repeat, do not ascend, or hold no whole prompt.
    """

    heads: int = field(validator=SIZE)
    kv_heads: int = field(validator=SIZE)
    head_dim: int = field(validator=SIZE)
    dtype: str = field(validator=one_of(*DTYPES))
    points: tuple[Point, ...]

    def __attrs_post_init__(self) -> None:
        if not self.points:
            raise ParameterError("points is []: pass a list with at least one entry")
        if self.heads % self.kv_heads:
            raise ParameterError(f"heads is {self.heads}: pass a multiple of the {self.kv_heads} kv_heads")
        for before, one in pairwise(self.points):
            if (before.queries, before.keys) >= (one.queries, one.keys):
                was, given = f"{before.queries} x {before.keys}", f"{one.queries} x {one.keys}"
                raise ParameterError(f"points has {given} after {was}: sizes must ascend by queries, then keys")
        if not any(point.whole for point in self.points):
            raise ParameterError("points has no size with as many queries as keys: add whole prompts")

    def __str__(self) -> str:
        return f"{self.heads} / {self.kv_heads} heads, d {self.head_dim}, {self.dtype}"
