"""The figures of a break-even table: measured times of one layer's attention, by shape and by size of the call."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from attrs import field, frozen

from sparseprefill.errors import ParameterError


@frozen(kw_only=True)
class DeviceKind:
    """What a table was measured on. Calls on a device of this type and capability are judged by it.

    type: PyTorch's name of it, such as "cuda" or "cpu". capability: CUDA's compute capability, None elsewhere.
    name: for people.
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str = ""

    def __str__(self) -> str:
        kind = self.type if self.capability is None else f"{self.type} {self.capability[0]}.{self.capability[1]}"
        return f"{self.name} ({kind})" if self.name else kind


@frozen(kw_only=True)
class MethodTime:
    """One method at one size: seconds of the whole call, of the estimator within, and the density that it chose."""

    seconds: float
    estimate: float
    density: float


@frozen(kw_only=True)
class Point:
    """One size of call, batch 1, the queries being the last of the keys.

    queries, keys: rows and tokens. dense: seconds of dense attention. executor: (density, seconds) of the sparse
    executor on random tiles, ascending. methods: by name.
    """

    queries: int
    keys: int
    dense: float
    executor: tuple[tuple[float, float], ...] = ()
    methods: Mapping[str, MethodTime] = field(factory=dict, hash=False)

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

    Raises ParameterError where points repeat, do not ascend, or hold no whole prompt.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    points: tuple[Point, ...]

    def __attrs_post_init__(self) -> None:
        for before, one in pairwise(self.points):
            if (before.queries, before.keys) >= (one.queries, one.keys):
                was, given = f"{before.queries} x {before.keys}", f"{one.queries} x {one.keys}"
                raise ParameterError(f"points has {given} after {was}: sizes must ascend by queries, then keys")
        if not any(point.whole for point in self.points):
            raise ParameterError("points has no size with as many queries as keys: add whole prompts")

    def __str__(self) -> str:
        return f"{self.heads} / {self.kv_heads} heads, d {self.head_dim}, {self.dtype}"
