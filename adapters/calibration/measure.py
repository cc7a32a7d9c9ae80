"""Calibration: times dense attention, the sparse executor and the methods on the device at hand.

Nothing here knows a method: a caller brings pipelines, and gets the figures of a `BreakEven`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from attrs import Factory, asdict, evolve, field, frozen
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from sparseprefill import __version__
from sparseprefill.breakeven.points import HeadShape, MethodTime, Point, pairs
from sparseprefill.breakeven.table import BreakEven, device_kind
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError, SparsePrefillError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.dense import attend
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.profiles.table import Progress
from sparseprefill.stages import SparseExecutor
from sparseprefill.testing.heads import head_tensors
from sparseprefill.validate import whole

from .layers import layers_of

LAYERS = 24
"""Layers of a step on a GPU: as many as the smaller models have that are served (0.5B to 3B have 24 to 36), whose first
layer, which is asked, weighs most."""
SHARES = (0.05, 0.25, 0.5)
"""Shares of random tiles that the executor is timed on, besides the diagonal."""
TILE = 128
"""Tokens of such a tile."""
Run = Callable[[], Any]
Step = Callable[[int], Any]
"""Runs so many layers, one after the other."""


@frozen(kw_only=True)
class HeadSizes:
    """Llama-3-8B's unless others are given. dtype: PyTorch's name. Raises ParameterError for what cannot be."""

    heads: int = field(default=32, validator=whole())
    kv_heads: int = field(default=8, validator=whole())
    head_dim: int = field(default=128, validator=whole())
    dtype: str = "bfloat16"

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ParameterError(f"heads is {self.heads}: pass a multiple of the {self.kv_heads} KV heads")

    def __str__(self) -> str:
        return f"{self.heads} / {self.kv_heads} heads, d {self.head_dim}, {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def bytes_per_token(self) -> int:
        """Bytes of q, k, v and the output."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim * self.torch_dtype.itemsize

    def made_up(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[1, Hq, N, D]``, k and v ``[1, Hkv, N, D]`` of heads with the characters that a trained layer's have."""
        return head_tensors(
            q_len=tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            device=device,
            dtype=self.torch_dtype,
        )


@frozen
class Clock:
    """Times a piece of work by the device's own clock, each time from a device at rest.

    rounds: at most. budget: seconds that one piece of work may take in all; it runs twice in any case. layers: of a
    step, by default `LAYERS` on a GPU, where the layers behind the first repeat it, and what a host spends on one is
    hidden behind the device's work on those before; elsewhere each is asked, and nothing is hidden, so 1.
    """

    device: torch.device
    rounds: int = 10
    budget: float = 2.0
    layers: int = field(
        default=Factory(lambda clock: LAYERS if clock.device.type == "cuda" else 1, takes_self=True), kw_only=True
    )

    @property
    def told(self) -> dict[str, int]:
        """Facts of it for a table, which people read."""
        return {"repeats": self.rounds, **({"layers": self.layers} if self.layers > 1 else {})}

    def fastest(self, run: Run) -> float:
        """Least seconds of `run`, launches included: whatever else goes on only adds to a time.

        The first run does not count: it compiles kernels and fills caches. At least two do.
        """
        run()
        return self._least(run)

    def layer(self, step: Step) -> float:
        """Least seconds of a layer in a step of `layers`, or of fewer where the budget does not hold two such steps."""
        if self.layers == 1:
            return self.fastest(partial(step, 1))
        step(2)  # compiles, and repeats once
        alone = self.once(partial(step, 1))
        count = max(1, min(self.layers, int(self.budget / 2 / max(alone, 1e-6))))
        return self._least(partial(step, count)) / count

    def _least(self, run: Run) -> float:
        once = self.once(run)
        more = max(1, min(self.rounds, int(self.budget / max(once, 1e-6))) - 1)
        return min(once, *(self.once(run) for _ in range(more)))

    def once(self, run: Run, count: int = 1) -> float:
        """Seconds of one run from a device at rest, the mean of `count` in a row."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - begin) / count
        with torch.cuda.device(self.device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            first.record()
            for _ in range(count):
                run()
            last.record()
            torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000 / count


@frozen(eq=False)
class Calibration:
    """One shape's figures, and the methods that could not be measured, with the first reason of each."""

    shape: HeadShape
    failed: Mapping[str, str] = field(factory=dict)


def versions(*names: str) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def sizes(lengths: Iterable[int], chunks: Iterable[int] = ()) -> list[tuple[int, int]]:
    """(queries, keys): whole prompts of these lengths, and chunks of so many rows at the end of the longer ones."""
    rows = sorted(set(chunks))
    whole = sorted(set(lengths))
    if not whole or whole[0] < 1:
        raise ParameterError(f"lengths is {whole}: pass one length in tokens or more")
    if rows and rows[0] < 1:
        raise ParameterError(f"chunks is {rows}: pass numbers of rows, or none")
    return sorted([*((n, n) for n in whole), *((chunk, keys) for chunk in rows for keys in whole if keys >= 2 * chunk)])


def joined(before: HeadShape, now: HeadShape) -> HeadShape:
    """A shape's earlier figures with those measured now: all sizes of both, and all methods.

    A method that was not timed now keeps its speed-up over dense attention: its seconds are scaled by dense attention's
    change, since a gate compares the two.
    """
    points = {(one.queries, one.keys): one for one in before.points}
    for one in now.points:
        old = points.get((one.queries, one.keys), one)
        scale = one.dense / old.dense
        kept = {
            name: evolve(time, seconds=time.seconds * scale, estimate=time.estimate * scale)
            for name, time in old.methods.items()
        }
        points[one.queries, one.keys] = evolve(one, methods={**kept, **one.methods})
    return evolve(now, points=tuple(points[size] for size in sorted(points)))


def table_of(
    shapes: Iterable[HeadShape], device: torch.device, measured: Mapping[str, Any], before: BreakEven | None = None
) -> BreakEven:
    """The table of what was measured on a device, and how. before: an earlier one, whose figures it keeps."""
    kind = device_kind(device)
    known = {} if before is None else {_sizes(one): one for one in before.shapes}
    for one in shapes:
        old = known.pop(_sizes(one), None)
        known[_sizes(one)] = one if old is None else joined(old, one)
    return BreakEven(
        device=kind if kind.name else evolve(kind, name=platform.machine()),
        shapes=tuple(known.values()),
        versions={"sparseprefill": __version__, "python": platform.python_version(), "torch": torch.__version__}
        | ({"cudnn": str(torch.backends.cudnn.version()), **versions("triton")} if device.type == "cuda" else {}),
        measured=measured,
    )


def _sizes(shape: HeadShape) -> tuple[object, ...]:
    return shape.heads, shape.kv_heads, shape.head_dim, shape.dtype


def calibrate(
    heads: HeadSizes,
    at: Sequence[tuple[int, int]],
    methods: Mapping[str, Pipeline],
    clock: Clock,
    progress: Progress = lambda what, done, of: None,
) -> Calibration:
    """Measure one shape of heads at each (queries, keys) of `at`.

    A method that fails at a size, or finds no memory there, is left out at that size.
    """
    points: list[Point] = []
    failed: dict[str, str] = {}
    with torch.no_grad():
        for keys in sorted({keys for _, keys in at}):
            q, k, v = heads.made_up(keys, clock.device)
            for rows in [rows for rows, of in at if of == keys]:
                call = AttentionCall(q[:, :, keys - rows :].contiguous(), k, v)
                points.append(_point(call, methods, clock, failed, lambda what: progress(what, len(points), len(at))))
    progress("done", len(at), len(at))
    ordered = tuple(sorted(points, key=lambda point: (point.queries, point.keys)))
    if clock.device.type == "cuda":
        ordered = tuple(at_the_rate_of_prompts(ordered))
    return Calibration(HeadShape(**asdict(heads), points=ordered), failed)


def at_the_rate_of_prompts(points: Sequence[Point]) -> list[Point]:
    """The points, with dense attention of chunks no slower by the pair than that of the whole prompt of their length.

    Behind a context torch has its slowest kernel alone, where servers bring a fast one, which took 0.91 to 1.04 of what
    this says, and torch's twice as long (docs/breakeven.md).
    """
    rates = {one.keys: one.dense / pairs(one.keys, one.keys) for one in points if one.queries == one.keys}
    return [
        evolve(one, dense=min(one.dense, rates[one.keys] * pairs(one.queries, one.keys))) if one.keys in rates else one
        for one in points
    ]


def _point(
    call: AttentionCall,
    methods: Mapping[str, Pipeline],
    clock: Clock,
    failed: dict[str, str],
    progress: Callable[[str], None],
) -> Point:
    rows, keys = call.q.shape[2], call.kv_len
    progress("dense")
    dense, times = dense_time(call, clock), dict[str, MethodTime]()
    for name, pipeline in methods.items():
        progress(name)
        try:
            times[name] = method_time(call, pipeline, clock)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            failed.setdefault(name, f"{rows:,} x {keys:,}: {str(error).splitlines()[0]}")
    progress("executor")
    executor = next((one.executor for one in methods.values()), AutoExecutor())
    return Point(queries=rows, keys=keys, dense=dense, executor=executor_times(call, executor, clock), methods=times)


def dense_time(call: AttentionCall, clock: Clock) -> float:
    """Seconds of the faster of torch's own choice (`scaled_dot_product_attention`) and our pick of its kernels."""
    rows, keys = call.q.shape[2], call.kv_len
    group: Any = {"enable_gqa": True} if call.group > 1 else {}
    how: Any = {"is_causal": True} if rows == keys else {"attn_mask": causal_lower_right(rows, keys)}

    def torchs() -> Tensor:
        return functional.scaled_dot_product_attention(call.q, call.k, call.v, **how, **group)

    ran = [clock.layer(in_a_row(torchs))]
    if attend(call) is not None:
        ran.append(clock.layer(in_a_row(lambda: attend(call))))
    return min(ran)


def in_a_row(run: Run) -> Step:
    """Layers that all run the same."""

    def step(count: int) -> None:
        for _ in range(count):
            run()

    return step


def method_time(call: AttentionCall, pipeline: Pipeline, clock: Clock) -> MethodTime:
    """Seconds of a method's layer, and of its plan alone, and its density.

    A layer of a step is run as hosts run it, a layer alone in a request that is under way.
    """
    memory = Memory()
    density = pipeline.run(call, memory).density
    alone = in_a_row(lambda: pipeline.run(call, memory))
    seconds = clock.layer(layers_of(call, pipeline) if clock.layers > 1 else alone)
    estimate = clock.fastest(lambda: pipeline.plan(call, memory))
    return MethodTime(seconds=seconds, estimate=estimate, density=min(1.0, density))


def executor_times(call: AttentionCall, executor: SparseExecutor, clock: Clock) -> tuple[tuple[float, float], ...]:
    """(density, seconds) of the executor on random tiles of 128 x 128, ascending."""
    geometry, made = call.geometry, list[tuple[float, float]]()
    source = torch.Generator(device=call.q.device).manual_seed(0)
    rows, columns = geometry.tile_rows(TILE), geometry.tile_columns(TILE)
    noise = torch.rand(1, geometry.heads, rows, columns, generator=source, dtype=torch.float32, device=call.q.device)
    for share in SHARES:
        plan = Plan(SparseMask.from_tiles(call, noise < share, TILE))
        density = plan.mask.density
        if not made or density > made[-1][0]:
            made.append((density, clock.layer(in_a_row(partial(executor.execute, call, plan)))))
    return tuple(made)
