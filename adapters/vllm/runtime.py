"""One engine's worth of state in one process: the session, the requests, the metrics."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field

from sparseprefill.errors import AttachError, ParameterError
from sparseprefill.route import Route

from ..session.report import Report
from ..session.session import Prefill, Session
from .logs import show
from .model import Model, identity
from .options import Options, parse
from .requests import Requests, Row
from .tally import Tally
from .tensor_parallel import LocalRegistry

NAME = "CUSTOM"
NAMELESS = "chunks behind others whose request vLLM does not name: what a method remembers does not reach them"
log = logging.getLogger(__name__)
_runtimes: dict[int, Runtime] = {}


@define(eq=False)
class Runtime:
    """What the layers and metadata builders of one engine share in one process."""

    options: Options
    session: Session
    model: Model
    tally: Tally
    requests: Requests = field(factory=Requests)
    warmed: set[object] = field(factory=set, init=False)
    _step: tuple[object, list[Prefill]] | None = field(default=None, init=False)

    def prefills(self, step: object, rows: Sequence[Row], decoding: Sequence[Row] = ()) -> list[Prefill]:
        """The prefills of one step's rows: see Requests. Every group of layers asks with the same `step` object."""
        if self._step is None or self._step[0] is not step or len(self._step[1]) != len(rows):
            finished = self.requests.finished
            self._step = (step, self.requests.step(rows, decoding))
            for row in rows:
                if row.start and row.before is None:
                    self.session.note(NAMELESS)
                if row.end - row.start < self.options.min_query:
                    self.session.count_short()
            if self.requests.finished > finished and log.isEnabledFor(logging.DEBUG):
                log.debug("%s", self.report())
        return self._step[1]

    def expect(self, layers: Mapping[int, str | None]) -> None:
        """Name layers, and why they will stay dense. AttachError where one will and `strict` is on."""
        chosen = self.options.layers
        dense = {i: why for i, why in layers.items() if why and (chosen is None or i in chosen)}
        if dense and self.options.strict:
            shown = "; ".join(f"layer {i}: {why}" for i, why in sorted(dense.items()))
            raise AttachError(f"strict: these layers would stay dense: {shown}")
        if chosen is not None:
            outside = sorted(i for i in chosen if not 0 <= i < self.model.identity.layers)
            if outside:
                raise ParameterError(f"sparseprefill.layers names {outside[0]}: {self.model.identity.layers} layers")
        self.session.expect(layers)

    def report(self) -> Report:
        """What every layer did, and why (measures densities that wait: host sync)."""
        report = self.session.report(self.model.name, self.model.attention)
        if not self.options.measure:
            return report
        means = self.tally.means()
        return evolve(report, layers=tuple(evolve(x, mean_density=means.get(x.layer)) for x in report.layers))


def runtime_of(config: Any, attention: str) -> Runtime | None:
    """The runtime of an engine, made when its first layer asks; None where the backend is not selected.

    config: the VllmConfig; copies of it that vLLM makes share their compilation config. attention: name of the host's
    own attention. Raises what wrong options raise.
    """
    if not selected(config):
        return None
    owner = config.compilation_config
    if id(owner) not in _runtimes:
        _runtimes[id(owner)] = _make(config, attention)
        weakref.finalize(owner, _runtimes.pop, id(owner), None)
    return _runtimes[id(owner)]


def existing(config: Any) -> Runtime | None:
    """The runtime of an engine, if a layer has asked for it."""
    return _runtimes.get(id(getattr(config, "compilation_config", None)))


def selected(config: Any) -> bool:
    """Whether the backend is selected, for all layers or for a kind of them."""
    chosen = config.attention_config
    kinds = getattr(chosen, "backend_per_kind", None) or {}
    return any(getattr(backend, "name", None) == NAME for backend in (chosen.backend, *kinds.values()))


def _make(config: Any, attention: str) -> Runtime:
    options = parse(config.additional_config)
    show(options.log_level)
    model = identity(config, attention)
    whole = model.local is model.identity
    route = Route.of(options.build(None if whole else LocalRegistry(model.identity, model.local)))
    route.check_model(model.local)
    tally = Tally(measure=options.measure)
    session = Session(
        route, min_query=options.min_query, layers=options.layers, observe=tally.observe, gate=options.gate
    )
    parallel = config.parallel_config
    batches = int(parallel.pipeline_parallel_size) * max(1, int(getattr(parallel, "num_ubatches", 1)))
    text = "sparseprefill: %s for prefill chunks of %d tokens and more of %s, %s for the rest"
    log.info(text, route.name, options.min_query, model.name, attention)
    return Runtime(options, session, model, tally, Requests(batches))
