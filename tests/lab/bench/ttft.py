"""Time to the first token of a model of Llama-3-8B's shape with random weights, through the Hugging Face adapter.

Random weights give attention without any structure: nothing is sparse there, and no method has anything to find. So
every layer computes its attention on q and k of made-up heads, in place of its own, and on its own v: the work is that
of a model whose layers look so, while the text that comes out means nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, fields, frozen
from sparseprefill.adapters.huggingface import attach
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.profiles.table import Progress
from sparseprefill.route import Route
from sparseprefill.validate import whole

from .case import Part, random_mask
from .clock import middle
from .dense import ANY, KERNELS, forced
from .shape import ModelShape

logger = logging.getLogger(__name__)


@frozen(eq=False)
class Injected(Pipeline):
    """A pipeline whose calls of one length run on other queries and keys. given: q and k."""

    given: tuple[Tensor, Tensor] = field(kw_only=True)

    def run(self, call: AttentionCall, memory: Memory | None = None) -> Result:
        """Run the call, on the other queries and keys if it has their shape."""
        return super().run(self._other(call), memory)

    def run_into(self, call: AttentionCall, memory: Memory | None, out: Tensor, begun: Plan | None = None) -> Result:
        """As `run`, which hosts call where they have a place for the output."""
        return super().run_into(self._other(call), memory, out, begun)

    def _other(self, call: AttentionCall) -> AttentionCall:
        q, k = self.given
        same = call.q.shape == q.shape and call.k.shape == k.shape
        return evolve(call, q=q, k=k) if same else call


@frozen(eq=False)
class RandomTiles:
    """A share of the tiles at random, the same for every layer, so that no time goes into estimating."""

    share: float
    _kept: dict[str, SparseMask] = field(factory=dict, init=False)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """A plan with the mask of this shape of calls, drawn once."""
        sizes = call.geometry.describe()
        if sizes not in self._kept:
            self._kept[sizes] = random_mask(call, [Part("tiles", self.share)], seed=0)
        return Plan(self._kept[sizes])


def tiles(share: float) -> Pipeline:
    """Random tiles as a contender: what the executor alone gives at that density."""
    return Pipeline(RandomTiles(share), name=f"tiles {share:g}")


@frozen(kw_only=True)
class Timed:
    """One model run. name: of the method, or of the dense kernel. density: mean over layers; None for the stock model.

    dense_layers: reasons of layers that ran dense, with their number. structure: what the attention of its layers ran
    on.
    """

    name: str
    tokens: int
    structure: str = "heads"
    seconds: float = 0.0
    stock: float = 0.0
    density: float | None = None
    dense_layers: dict[str, int] = field(factory=dict)
    error: str = ""

    @property
    def speedup(self) -> float:
        """The stock model's time over this one."""
        return self.stock / self.seconds if self.seconds else 0.0


@frozen(eq=False, kw_only=True)
class Prefill:
    """Times one prompt through a model: one forward with a cache, logits of the last token alone.

    rounds: of each contender, of which the median counts, after one that does not.
    """

    shape: ModelShape
    device: torch.device
    tokens: int
    rounds: int = field(default=3, validator=whole())
    seed: int = 0

    def run(
        self, methods: Sequence[tuple[str, Pipeline | Route]], progress: Progress = lambda what, done, of: None
    ) -> list[Timed]:
        """The stock model with cuDNN's attention, then each method through `attach`, then the stock model again."""
        progress("model", 0, len(methods) + 2)
        model = self.shape.build(self.tokens, self.device, self.seed)
        source = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(2, self.shape.vocabulary, (1, self.tokens), generator=source).to(self.device)
        given = self.shape.structured(self.tokens, self.device, self.seed)
        progress("stock model", 0, len(methods) + 2)
        kernel, stock = self._stock(model, ids)
        rows = []
        for done, (name, pipeline) in enumerate(methods, 1):
            progress(name, done, len(methods) + 2)
            rows.append(self._attached(model, ids, name, pipeline, given))
        progress("stock model", len(methods) + 1, len(methods) + 2)
        stock = (stock + self._stock(model, ids)[1]) / 2
        first = Timed(name=f"stock ({kernel})", tokens=self.tokens, seconds=stock)
        return [evolve(one, stock=stock) for one in (first, *rows)]

    def _stock(self, model: Any, ids: Tensor) -> tuple[str, float]:
        for kernel in KERNELS if self.device.type == "cuda" else ():
            try:
                with forced(kernel):
                    return kernel, self._median(model, ids)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.info("%s does not run this model: %s", kernel, str(error).split("\n")[0])
        return ANY, self._median(model, ids)

    def _attached(
        self, model: Any, ids: Tensor, name: str, pipeline: Pipeline | Route, given: tuple[Tensor, Tensor]
    ) -> Timed:
        row = Timed(name=name, tokens=self.tokens)
        try:
            with attach(model, injected(pipeline, given), verify=False, gate=None, recall_every=0):
                seconds = self._median(model, ids)
            route = injected(pipeline, given)
            with attach(model, route, verify=False, gate=None, measure=True, recall_every=0) as handle:
                _forward(model, ids)
            layers = handle.report().layers
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return evolve(row, error=str(error).split("\n")[0])
        densities = [1.0 if layer.density is None else layer.density for layer in layers]
        reasons = Counter(reason for layer in layers for reason in layer.reasons)
        return evolve(
            row,
            seconds=seconds,
            density=sum(densities) / len(densities),
            dense_layers=dict(reasons),
        )

    def _median(self, model: Any, ids: Tensor) -> float:
        _forward(model, ids)
        return middle(partial(_forward, model, ids), self.rounds)


def injected(pipeline: Pipeline | Route, given: tuple[Tensor, Tensor]) -> Route:
    """The pipeline on other queries and keys (`Injected`)."""
    names = [(str(one.alias), one.name) for one in fields(Pipeline) if one.init]
    return Route.of(pipeline).each(
        lambda one: Injected(**{alias: getattr(one, name) for alias, name in names}, given=given)
    )


@torch.inference_mode()
def _forward(model: Any, ids: Tensor) -> float:
    """Seconds of one prefill, by the wall clock; the cache goes at its end."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    began = time.perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - began
