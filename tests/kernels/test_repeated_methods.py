"""What a recording of a method's calls does for other tensors is what the method does there itself, bit for bit.

By the kernels: in Triton's interpreter, or on a GPU, where a CUDA graph of either is held to the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.anchor_attention.stages import AnchorEstimator
from torch import Tensor

from helpers.examples import few_of
from kernels.device import CUDA, DEVICE, DTYPES
from sparseprefill import AttentionCall, Memory, Pipeline, Result, default_registry, kernels
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels import groups as group_keys
from sparseprefill.kernels.recording import record
from sparseprefill.kernels.repeat import Step
from sparseprefill.pages import Pages

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAMES = (
    "rowmax",
    "dense",
    "streaming",
    "bfla",
    "xattention",
    "vertical-slash",
    "flexprefill",
    "skip-softmax",
    "star-attention",
    "sample-attention",
    "anchor-attention",
)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    **{f"{name}, tail": (name, {}, 20) for name in NAMES},
    **{f"{name}, floor": (name, {"recall": 0.8}, 0) for name in NAMES},
    "rowmax, tiles of a group": ("rowmax", {"union": "group", "width": None}, 0),
}
EVERY_RUN = (
    "rowmax, tail",
    "streaming, tail",
    "streaming, floor",
    "bfla, tail",
    "vertical-slash, tail",
    "anchor-attention, tail",
)
ROOM = 8 << 30


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    """Kernels do the work on a CPU too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("serve", "serve_device"):
            patch.setattr(kernels, name, lambda _: True)
        patch.setattr(group_keys, "COPY", 0)
        yield


def pipeline(case: str, small: bool = True) -> Pipeline:
    name, parameters, tail = CASES[case]
    method = default_registry().get(name)
    made = method.pipeline(**{**(method.small if small else {}), **parameters}).with_tail(tail)
    if CUDA:
        return made
    estimator = made.estimator
    if isinstance(estimator, AnchorEstimator):
        estimator = evolve(estimator, executor=TritonExecutor())
    return evolve(made, estimator=estimator, executor=TritonExecutor())


@frozen
class Sizes:
    """Of a step: rows and keys before and behind them of each request; with a page their keys stand in one cache, else
    there is one request, whose batch rows may be padded. gap: rows of others between two requests."""

    requests: tuple[tuple[int, int, int], ...]
    heads: tuple[int, int] = (2, 1)
    page: int = 0
    padding: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    width: int = 64
    gap: int = 0
    layer: int = 0
    sinks: bool = False
    prompt: int | None = None

    @property
    def batch(self) -> int:
        return max(1, len(self.padding))

    @property
    def rows(self) -> int:
        return sum(rows + self.gap for rows, *_ in self.requests)

    def slots(self, seed: int) -> list[Tensor]:
        """What a layer hands over: output, queries, keys and values or the cache, tables, sinks."""
        source, wide = torch.Generator().manual_seed(seed), 2 * self.width

        def drawn(*shape: int) -> Tensor:
            return (2 * torch.randn(shape, generator=source)).to(DEVICE, self.dtype)

        q = drawn(self.batch, self.rows, self.heads[0], self.width)
        found = [torch.full_like(q, torch.nan), q]
        if self.page:
            counts = [-(-sum(one) // self.page) for one in self.requests]
            found.append(drawn(sum(counts) + 1, self.page, self.heads[1], wide))
            order = torch.randperm(sum(counts), generator=source)
            tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
            for table, pages in zip(tables, order.split(counts), strict=True):
                table[: len(pages)] = pages
            found.append(tables.to(DEVICE))
        else:
            found += [drawn(self.batch, self.heads[1], sum(self.requests[0]), self.width) for _ in range(2)]
        return [*found, torch.randn(self.heads[0], generator=source).to(DEVICE)] if self.sinks else found

    def calls(self, slots: Sequence[Tensor], layer: int) -> Iterator[tuple[AttentionCall, Tensor]]:
        """Each request's call, and the place of its output."""
        out, q, *rest = slots
        options: dict[str, Any] = {"layer": layer, "sinks": rest.pop() if self.sinks else None}
        begin = 0
        if self.padding:
            options["starts"] = torch.tensor(self.padding, dtype=torch.int32, device=DEVICE)
        for n, (rows, before, behind) in enumerate(self.requests):
            part = slice(begin, begin + rows)
            mine, where = (x[:, part].transpose(1, 2) for x in (q, out))
            keys = before + rows + behind
            if self.page:
                k, v = rest[0].split(self.width, -1)
                pages = Pages(k, v, rest[1][n, : -(-keys // self.page)], keys)
                given: tuple[Any, Any] = pages, pages
            else:
                given = rest[0], rest[1]
            prompt = None if self.prompt is None else keys + self.prompt
            yield AttentionCall(mine, *given, q_offset=before, prompt_lengths=prompt, **options), where
            begin += rows + self.gap


def work(method: Pipeline, sizes: Sizes, slots: Sequence[Tensor], layer: int) -> list[Tensor]:
    """As a server's session does: all that is told of the calls; the output lies in its slot."""
    calls, outs = zip(*sizes.calls(slots, layer), strict=True)
    results: list[Result]
    if len(calls) == 1:
        results = [method.run_into(calls[0], Memory(), outs[0])]
    else:
        results = method.run_many(calls, [Memory() for _ in calls])
        for out, result in zip(outs, results, strict=True):
            out.copy_(result.out)
    found = list[Tensor]()
    for one in results:
        assert one.parts is None
        found += [one.lse, *(mask.pairs() for mask in one.plan.computed())]
        found += [] if one.skipped is None else [one.skipped.pairs]
    return found


def recorded(method: Pipeline, sizes: Sizes) -> Step:
    assert method.repeats
    slots = sizes.slots(seed=0)
    found, step = record(lambda: work(method, sizes, slots, sizes.layer), slots, ROOM)
    assert isinstance(step, Step), step
    plain = sizes.slots(seed=0)
    same([*plain, *work(method, sizes, plain, sizes.layer)], [*slots, *found])
    return step


def same(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
    for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
        alike = (one == other) | (one.isnan() & other.isnan())
        assert bool(alike.all()), f"{int((~alike).sum())} of {one.numel()} numbers of tensor {i} differ"


def check(case: str, sizes: Sizes, seeds: Sequence[int] = (1,), small: bool = True) -> None:
    method = pipeline(case, small)
    step = recorded(method, sizes)
    for seed in seeds:
        mine, plain, layer = sizes.slots(seed), sizes.slots(seed), sizes.layer + 3 * seed
        assert step.slots.fit(mine)
        same([*plain, *work(method, sizes, plain, layer)], [*mine, *step.run(mine, layer)])


LENGTHS = st.sampled_from([1, 127, 128, 129, 2, 37, 131, 149])
BEFORE = st.sampled_from([0, 1, 16, 61, 127])


@st.composite
def all_sizes(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> Sizes:
    """Steps of every kind: alone, padded, of pages, of several requests in one launch."""
    kind = draw(st.sampled_from(["alone", "padded", "pages", "several"]))
    count = draw(st.integers(2, 3)) if kind == "several" else 1
    behind = draw(st.integers(0, 20)) if kind == "alone" else 0
    requests = tuple((draw(LENGTHS), draw(BEFORE), behind) for _ in range(count))
    keys = sum(requests[0])
    return Sizes(
        requests,
        draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2)])),
        draw(st.sampled_from([16, 32])) if kind in ("pages", "several") else 0,
        (draw(st.integers(0, keys - 1)), 0) if kind == "padded" else (),
        draw(st.sampled_from(dtypes)),
        gap=draw(st.sampled_from([0, 3])),
        layer=draw(st.integers(0, 5)),
        sinks=draw(st.booleans()),
        prompt=draw(st.sampled_from([None, 0, 7, 1 << 17])),
    )


FIXED: dict[str, Sizes] = {
    "alone": Sizes(((43, 24, 3),), (4, 2), prompt=5),
    "of pages": Sizes(((37, 30, 0),), page=16, dtype=torch.float16, layer=2),
    "several": Sizes(((20, 17, 0), (33, 0, 0), (1, 40, 0)), page=16, gap=2, dtype=torch.float16, prompt=1 << 17),
}


@pytest.mark.parametrize("sizes", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("case", few_of(CASES, EVERY_RUN))
def test_a_step_is_repeated_to_the_bit(case: str, sizes: Sizes) -> None:
    check(case, sizes, seeds=(1, 2) if CUDA else (1,))


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25 if CUDA else 3)
@given(sizes=all_sizes())
def test_any_step_is_repeated_to_the_bit(case: str, sizes: Sizes) -> None:
    check(case, sizes)


LONG = (
    Sizes(((2048, 2048, 0),), (12, 2), 16, dtype=torch.bfloat16, width=128),
    Sizes(((1531, 0, 0), (129, 700, 0), (1, 999, 0)), (12, 2), 16, dtype=torch.bfloat16, width=128),
    Sizes(((1000, 333, 0),), (8, 2), dtype=torch.bfloat16, width=128),
    Sizes(((700, 0, 0),), (8, 2), padding=(77, 0), dtype=torch.bfloat16, width=128),
)


@pytest.mark.gpu
@pytest.mark.parametrize("small", [False, True], ids=["", "small"])
@pytest.mark.parametrize("sizes", LONG, ids=lambda one: str(one.requests))
@pytest.mark.parametrize("case", CASES)
def test_long_steps_of_bfloat16_are_repeated_to_the_bit(case: str, sizes: Sizes, small: bool) -> None:
    check(case, sizes, seeds=(1, 2), small=small)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["repeated", "plain"])
@pytest.mark.parametrize("sizes", LONG[:2], ids=lambda one: str(one.requests))
@pytest.mark.parametrize("case", CASES)
def test_a_graph_of_a_step_gives_the_same_for_other_inputs(case: str, sizes: Sizes, how: str) -> None:
    """Captured once, and replayed with other numbers in its inputs."""
    method = pipeline(case, small=False)
    step, slots = recorded(method, sizes), sizes.slots(seed=1)

    def launch() -> list[Tensor]:
        return step.run(slots, sizes.layer) if how == "repeated" else work(method, sizes, slots, sizes.layer)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is kept by size is made for this stream
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = launch()
    for seed in (2, 3):
        plain = sizes.slots(seed)
        for mine, other in zip(slots, plain, strict=True):
            mine.copy_(other)
        graph.replay()
        same([*plain, *work(method, sizes, plain, sizes.layer)], [*slots, *found])
