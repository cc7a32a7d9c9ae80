"""What a server's layer takes: `python -m lab.host` (from tests/) times a layer behind the first of its step.

*host*: microseconds until its last launch is made, as a server runs it: repeated, its record kept; *asked*: where every
stage is asked in each layer; *first*: of the first layer of a step in sizes that no step had before, which is recorded;
*step*: of each of the 24 layers of such a step, the first among them, until the device is done. With `--asks` each
layer asks the estimator, as one in plain PyTorch: *estimator* is what that alone takes of *host*.
On a GPU launches are real and nobody waits for them, and made-up heads are also timed layer after layer (*layers*),
from a CUDA graph of each (*graph*), and of one request beside the fastest dense kernel that is installed (*dense*); a
graph's output is held to its layer's, bit by bit. `--kernels` tells what each of a layer's kernels takes. Without a GPU
kernels are compiled for an H100 and a driver that does nothing takes their launches, so that what PyTorch and the
driver take comes on top.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen
from sparseprefill.adapters.calibration.layers import Slots
from sparseprefill.adapters.session.ledger import Ran
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.repeat import Asking, Repeat
from sparseprefill.adapters.session.session import Prefill, Session
from sparseprefill.adapters.vllm.pages import pages_of

import sparseprefill as sp
from sparseprefill import AttentionCall, kernels

PAGE, LAYERS, FRESH, STEP = 16, 4, 21, 24
"""Tokens of a page; layers that take turns, each with a cache of its own; sessions that know no sizes yet; layers of a
step."""


@frozen
class Host:
    """Microseconds a layer. launches: that it repeats, torch's operators among them. estimator: of `host`, what an
    estimator takes that each layer asks, else 0. From `layers` on: on a GPU, else 0; pairs: share of the causal pairs
    that it computes there; kernels: of each, if asked for."""

    method: str
    requests: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    launches: int
    host: float
    asked: float
    first: float
    step: float
    estimator: float = 0.0
    layers: float = 0.0
    graph: float = 0.0
    dense: float = 0.0
    kernel: str = ""
    pairs: float = 0.0
    kernels: dict[str, float] = field(factory=dict)

    def __str__(self) -> str:
        several = f"{self.requests} requests of " if self.requests > 1 else ""
        sizes = (
            f"{self.method}, {several}{self.rows:,} rows of {self.keys:,} keys, {self.heads} / {self.kv_heads} heads"
        )
        text = f"{sizes}, d {self.width}: {self.launches} launches, host {self.host:.0f} us, asked {self.asked:.0f}"
        text = f"{text}, first {self.first:.0f}, step {self.step:.0f}"
        text = f"{text}, estimator {self.estimator:.0f}" if self.estimator else text
        if not self.layers:
            return text
        text = f"{text}; layers {self.layers:.0f}, graph {self.graph:.0f}"
        if self.dense:
            text = f"{text}, dense {self.dense:.0f} ({self.kernel}): {self.dense / self.layers:.2f} x"
        text = f"{text}, at {self.pairs:.1%} of the pairs"
        return "\n".join((text, *(f"{time:10.1f} us  {name[:60]}" for name, time in self.kernels.items())))


def idle() -> None:
    """From now on this process has an H100 that does nothing: kernels are compiled, and launched no further."""
    from kernels.offline import Loading, known, pretend, replace
    from sparseprefill.executors.auto import AutoExecutor
    from sparseprefill.executors.triton import TritonExecutor
    from sparseprefill.kernels.hopper.record import HOPPER

    pretend(Loading(lambda *_: None))
    known(HOPPER)
    executor = TritonExecutor()
    many = {name: getattr(executor, name) for name in ("execute_many", "execute_many_into")}
    ours = {name: lambda _, *given, run=run: run(*given) for name, run in many.items()}
    replace(AutoExecutor, choose=lambda *_: executor, **ours)
    replace(kernels, serve=lambda _: True, serve_device=lambda _: True, serve_rows=lambda _: True)


class Layer:
    """A layer of a server, with its own cache. Requests of a step have as many rows and keys each."""

    def __init__(self, requests: int, rows: int, keys: int, shape: tuple[int, int, int], seed: int) -> None:
        heads, kv_heads, width = shape
        device, dtype = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16
        self.rows, self.keys, self.width = rows, keys, width
        count = -(-keys // PAGE)
        self.cache = torch.empty(requests * count, kv_heads, PAGE, 2 * width, dtype=dtype, device=device)
        self.tables = torch.arange(requests * count, dtype=torch.int32, device=device).view(requests, count)
        self.query = torch.empty(requests * rows, heads, width, dtype=dtype, device=device)
        if device == "cuda":
            from sparseprefill.testing.heads import head_tensors

            sizes: dict[str, Any] = {"q_len": count * PAGE, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
            for i, table in enumerate(self.tables):
                q, k, v = head_tensors(**sizes, seed=seed + LAYERS * i, device=device, dtype=dtype)
                self.query[i * rows : (i + 1) * rows].copy_(q[0, :, keys - rows : keys].transpose(0, 1))
                both = torch.cat([k, v], -1)[0]  # [Hkv, N, 2 * D]
                self.cache[table.long()] = both.unflatten(1, (count, PAGE)).transpose(0, 1)
        self.output = torch.empty_like(self.query)

    @property
    def slots(self) -> Slots:
        """As vLLM's adapter has them."""
        return self.query, self.output, self.cache, self.tables

    def calls(self, index: int) -> list[AttentionCall]:
        """One of each request, as vLLM's adapter makes it."""

        def of(rows: torch.Tensor, table: torch.Tensor) -> AttentionCall:
            pages = pages_of(self.cache, self.width, table, self.keys, dtype=rows.dtype)
            return AttentionCall(rows.transpose(0, 1)[None], pages, pages, prompt_lengths=self.keys, layer=index)

        return [of(*each) for each in zip(self.query.split(self.rows), self.tables, strict=True)]

    def ask(self, session: Session, index: int, prefills: Sequence[Prefill], slots: Slots = ()) -> Repeat | None:
        """Have a session compute it; what does the same for other layers."""
        repeats: list[Repeat] = []
        asked = [(call, prefill, None) for call, prefill in zip(self.calls(index), prefills, strict=True)]
        outs = [one.transpose(0, 1)[None] for one in self.output.split(self.rows)]
        for found in session.run_many(asked, outs, slots, repeats):
            if not isinstance(found, Ran):
                raise RuntimeError(f"a layer did not run: {found}")
        return repeats[0] if repeats else None


class Asked:
    """An estimator that does not say that it repeats, as one in plain PyTorch, so that each layer asks it."""

    def __init__(self, estimator: sp.PatternEstimator) -> None:
        self.estimate = estimator.estimate


def measure(
    method: str,
    rows: int,
    keys: int,
    shape: tuple[int, int, int],
    rounds: int,
    asks: bool,
    each: bool = False,
    requests: int = 1,
) -> Host:
    """Time a method's layers of these sizes. asks: each layer asks the estimator. each: time each kernel, on a GPU.
    requests: of a step, with so many rows and keys each."""
    made = sp.build(method)

    def session() -> Session:
        return Session(evolve(made, estimator=Asked(made.estimator)) if asks else made, HostOptions(recall_every=0))

    sessions = [session() for _ in range(2 * (FRESH + 5))]
    layers = [Layer(requests, rows, keys, shape, seed) for seed in range(LAYERS)]
    prefills = [Prefill() for _ in range(requests)]

    def asked(index: int, slots: Slots = ()) -> Repeat | None:
        return layers[index].ask(sessions[0], index, prefills, slots)

    def first(_: int) -> None:
        layers[0].ask(sessions.pop(), 0, [Prefill() for _ in range(requests)], layers[0].slots)

    def through(_: int) -> None:
        begun = layers[0].ask(sessions.pop(), 0, [Prefill() for _ in range(requests)], layers[0].slots)
        for i in range(1, STEP):
            if begun is not None:
                begun.run(i, layers[i % LAYERS].slots)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    asked(0)  # compiles
    repeat = asked(0, layers[0].slots)
    if repeat is None:
        raise RuntimeError(f"{method} does not repeat at these sizes")

    def again(index: int) -> None:
        repeat.run(index, layers[index].slots)

    host, asking, recorded = _host(again, rounds), _host(asked, rounds), _host(first, FRESH - 1)
    whole = _host(through, FRESH - 1) / STEP
    step = repeat.how.rest if isinstance(repeat.how, Asking) else repeat.how
    counted = 0 if isinstance(step, str) else len(step.work)

    def estimate(_: int) -> None:
        made.estimator.estimate(call, sp.Memory())

    call = layers[0].calls(0)[0]
    alone = _host(estimate, rounds) if asks else 0.0
    told = host, asking, recorded, whole, alone
    if not torch.cuda.is_available():
        return Host(method, requests, rows, keys, *shape, counted, *told)
    found = sessions[0].report("lab", "none")
    density = next(one.density for one in found.layers if one.density is not None)
    kernel, dense = _dense(layers[0]) if requests == 1 else ("", 0.0)
    times = _device(again, rounds), _device(_graphs(again, layers), rounds), dense
    kernels = _kernels(again, rounds) if each else {}
    return Host(method, requests, rows, keys, *shape, counted, *told, *times, kernel, density, kernels)


def _host(run: Callable[[int], Any], rounds: int) -> float:
    """Microseconds of the host, the median; the device is waited for before each."""
    found = []
    for i in range(rounds + 5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(i % LAYERS)
        found.append(time.perf_counter() - start)
    return 1e6 * median(found[5:])


def _device(run: Callable[[int], Any], rounds: int) -> float:
    """Microseconds a layer, of many that follow each other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(LAYERS):
        run(i)
    torch.cuda.synchronize()
    begin.record()
    for i in range(rounds):
        run(i % LAYERS)
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / rounds


def _kernels(run: Callable[[int], Any], rounds: int) -> dict[str, float]:
    """Microseconds a layer of each kernel, in their order, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for i in range(rounds):
            run(i % LAYERS)
        torch.cuda.synchronize()
    took = dict[str, float]()
    for event in sorted(seen.events() or (), key=lambda event: event.time_range.start):
        if event.device_type.name == "CUDA":
            took[event.name] = took.get(event.name, 0.0) + event.time_range.elapsed_us() / rounds
    return took


def _graphs(again: Callable[[int], None], layers: Sequence[Layer]) -> Callable[[int], None]:
    """Each layer in a CUDA graph of its own, whose output is the layer's: one alone finds its keys in the cache."""
    graphs = list[torch.cuda.CUDAGraph]()
    for i, layer in enumerate(layers):
        again(i)
        wanted, graph = layer.output.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again(i)
        layer.output.zero_()
        graph.replay()
        if not torch.equal(wanted, layer.output):
            raise RuntimeError("a graph of the layer gives another output")
        graphs.append(graph)
    return lambda i: graphs[i].replay()


def _dense(layer: Layer) -> tuple[str, float]:
    """The fastest dense kernel for the layer's call, and its microseconds."""
    from lab.bench.baseline import baseline

    (call,) = layer.calls(0)
    plain = AttentionCall(call.q, call.k, call.v)
    found = baseline(plain, [layer.keys])
    return found.kernel, _device(lambda _: found.run(), 20)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["rowmax"])
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--keys", type=int, nargs="+", default=[32768])
    parser.add_argument("--requests", type=int, default=1, help="of a step, with so many rows and keys each")
    parser.add_argument("--shape", type=int, nargs=3, default=(12, 2, 128), metavar=("HEADS", "KV_HEADS", "WIDTH"))
    parser.add_argument("--asks", action="store_true", help="ask the estimator in each layer, as if it did not repeat")
    parser.add_argument("--kernels", action="store_true", help="on a GPU, also tell what each kernel takes")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        idle()
    for method, rows, keys in product(given.method, given.rows, given.keys):
        sizes = min(rows, keys), keys, tuple(given.shape)
        found = measure(method, *sizes, given.rounds, given.asks, given.kernels, given.requests)
        print(json.dumps(asdict(found)) if given.json else found, flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
