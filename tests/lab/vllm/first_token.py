"""Time to the first token of one prompt: vLLM's own attention, ours with every key, and methods, engine by engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from sparseprefill.adapters.cli.group import CommandError

from lab.bench.baseline import baseline
from lab.bench.clock import Clock, middle
from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.profiles.table import Progress

from .counters import pairs
from .engine import Engine, Setup, described, prompt
from .structure import Structure

LENGTHS = (8192, 32768, 131072)
CHUNK = 8192


@frozen(kw_only=True)
class Timed:
    """One prompt through one engine. chunk: tokens of a step at most, `steps` what was counted.

    seconds: median, of the whole request. stock: the same of vLLM's own attention, None if it was not run. attention:
    of dense attention alone over all layers, in one piece by the kernel named `kernel`. density: computed / causal
    pairs of the calls that ran sparse. fallbacks: why calls ran dense in the timed runs, with counts; slower: which ran
    on a slower kernel, and why. extra: most bytes of PyTorch held at a time beyond those before it, on GPUs.
    """

    backend: str
    parameters: Mapping[str, Any] = field(factory=dict)
    tokens: int = 0
    chunk: int = 0
    steps: int = 0
    seconds: float = 0.0
    stock: float | None = None
    attention: float | None = None
    kernel: str = ""
    density: float | None = None
    fallbacks: Mapping[str, int] = field(factory=dict)
    slower: Mapping[str, int] = field(factory=dict)
    extra: int | None = None
    error: str = ""

    @property
    def speedup(self) -> float | None:
        """The stock engine's time over this one."""
        return self.stock / self.seconds if self.stock and self.seconds else None


@frozen
class Contender:
    """name: of the row. sparse: the table ``sparseprefill``, None for vLLM's own attention."""

    name: str
    sparse: Mapping[str, Any] | None = None

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Those of the method that differ from its defaults."""
        found: Mapping[str, Any] = (self.sparse or {}).get("parameters", {})
        return found


@define(kw_only=True)
class FirstToken:
    """Times every length in every chunk. chunks: tokens; None for the whole prompt at once. rounds: of which the
    median counts, after one run that does not."""

    setup: Setup
    structure: Structure
    lengths: Sequence[int] = LENGTHS
    chunks: Sequence[int | None] = (None, CHUNK)
    rounds: int = 3
    _stock: dict[tuple[int, int], float] = field(factory=dict, init=False)
    _dense: dict[int, tuple[str, float]] = field(factory=dict, init=False)

    def run(self, contender: Contender, progress: Progress = lambda what, done, of: None) -> Iterator[Timed]:
        """A row for each length and chunk; where the engine fails, a last row with the error."""
        cases = self.cases()
        progress("starting", 0, len(cases))
        longest = max(self.lengths)
        sizes = {"longest": longest + 16, "kept": longest + 16, "max_num_seqs": 1}
        budget = max(chunk for _, chunk in cases)
        switches = {"enable_prefix_caching": False, "enable_chunked_prefill": True, "max_num_batched_tokens": budget}
        try:
            with self.setup.engine(contender.sparse, **sizes, **switches) as engine:
                engine.apply(self.structure.fit)
                for done, (tokens, chunk) in enumerate(cases):
                    progress(f"{tokens:,} tokens in steps of {chunk:,}", done, len(cases))
                    yield self._row(engine, contender, tokens, chunk)
        except CommandError:
            raise
        except Exception as error:  # whatever vLLM raises: other engines may do
            yield Timed(backend=contender.name, parameters=contender.parameters, error=described(error))

    def cases(self) -> list[tuple[int, int]]:
        """Lengths and the tokens of a step."""
        pairs = ((tokens, min(tokens, chunk or tokens)) for tokens in self.lengths for chunk in self.chunks)
        return list(dict.fromkeys(pairs))

    def _row(self, engine: Engine, contender: Contender, tokens: int, chunk: int) -> Timed:
        engine.chunk(chunk)
        ids = prompt(tokens, self.setup.shape.vocabulary, self.setup.seed)
        self._once(engine, ids)
        steps = self.structure.steps
        if steps != -(-tokens // chunk):
            raise SparsePrefillError(f"a prompt of {tokens} tokens ran in {steps} steps, not in steps of {chunk}")
        before, slower = engine.fallbacks(), engine.slower()
        held = allocated(self.structure.device)
        seconds = middle(partial(self._once, engine, ids), self.rounds)
        most = None if held is None else torch.cuda.max_memory_allocated(self.structure.device) - held
        after = engine.fallbacks()
        row = Timed(backend=contender.name, parameters=contender.parameters, tokens=tokens, chunk=chunk, steps=steps)
        if contender.sparse is None:
            self._stock[tokens, chunk] = seconds
        kernel, attention = self._attention(tokens)
        return evolve(
            row,
            seconds=seconds,
            stock=self._stock.get((tokens, chunk)),
            attention=attention,
            kernel=kernel,
            density=None if contender.sparse is None else self._density(engine, ids),
            fallbacks=dict(after - before),
            slower=dict(engine.slower() - slower),
            extra=most,
        )

    def _once(self, engine: Engine, ids: list[int]) -> float:
        """Seconds from the request to its first token."""
        self.structure.begin(len(ids))
        began = time.perf_counter()
        engine.ask([ids], 1)
        return time.perf_counter() - began

    def _density(self, engine: Engine, ids: list[int]) -> float | None:
        """Of one more run, whose pairs are counted; None if no call ran sparse."""
        runtime = engine.runtime
        if runtime is None:
            raise SparsePrefillError("vLLM did not take the adapter's backend: nothing but its own attention ran")
        before, runtime.tally.measure = pairs(), True
        try:
            self._once(engine, ids)
        finally:
            runtime.tally.measure = False
        computed, causal = (a - b for a, b in zip(pairs(), before, strict=True))
        return computed / causal if causal else None

    def _attention(self, tokens: int) -> tuple[str, float]:
        """Dense attention's kernel, and its seconds for all layers; measured once a length, beside an engine."""
        if tokens not in self._dense:
            q, k = self.structure.tensors(tokens)
            dense = baseline(AttentionCall(q, k, torch.randn_like(k)), [tokens])
            seconds = Clock(self.structure.device, budget=1.0).median(dense.run)
            self._dense[tokens] = dense.kernel, seconds * self.setup.shape.layers
        return self._dense[tokens]


def allocated(device: torch.device) -> int | None:
    """Bytes of PyTorch on a GPU, from which its peak is counted anew; None on others."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
