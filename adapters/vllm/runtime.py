"""One engine's worth of state in one process: the session, the requests, the metrics."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import define, evolve, field

from sparseprefill.errors import AttachError, ParameterError, SparsePrefillError
from sparseprefill.route import Route

from ..session.report import Report
from ..session.session import Prefill, Session
from .failures import reason
from .logs import show
from .model import Model, identity
from .names import Names
from .options import TABLE, Options, parse
from .requests import Requests, Row
from .tally import Tally
from .tensor_parallel import LocalRegistry

NAME = "CUSTOM"
NAMELESS = "chunks behind others whose request vLLM does not name: what the method remembers does not reach them"
ENDLESS = "chunks of prompts whose length vLLM does not tell: the dense tail is every chunk's"
FORGETS = "what the method remembers of a prompt does not reach from one chunk to the next"
log = logging.getLogger(__name__)
_runtimes: dict[int, Runtime] = {}


@define(eq=False)
class Runtime:
    """What the layers and metadata builders of one engine share in one process."""

    options: Options
    session: Session
    model: Model
    tally: Tally
    requests: Requests = field(factory=Requests, init=False)
    names: Names = field(factory=Names.of_nobody, init=False)
    warmed: set[object] = field(factory=set, init=False)
    surveyed: bool = field(default=False, init=False)
    _step: tuple[object, list[Prefill]] | None = field(default=None, init=False)

    def prefills(self, step: object, rows: Sequence[Row], decoding: Sequence[Row] = ()) -> list[Prefill]:
        """The prefills of one step's rows: see Requests. Every group of layers asks with the same `step` object."""
        if self._step is None or self._step[0] is not step or len(self._step[1]) != len(rows):
            self.session.read_recall()
            finished = self.requests.finished
            self._step = (step, self.requests.step(rows, decoding, self.names.alive))
            for row in rows:
                if row.start and row.name is None and self.session.route.remembers:
                    self.session.note(NAMELESS)
                if row.prompt is None and self.options.tail:
                    self.session.note(ENDLESS)
                if row.end - row.start < self.options.min_query:
                    self.session.count_short()
            if self.requests.finished > finished and log.isEnabledFor(logging.DEBUG):
                self._tell()
        return self._step[1]

    def expect(self, layers: Sequence[tuple[int, str | None]]) -> None:
        """Name all layers of this process, and why they will stay dense; say in the log what will run how.

        layers: index and reason of each; an encoder's and a decoder's may have the same index. Where nothing will run
        sparse that is a warning, and a note in the report. AttachError where a layer will stay dense and `strict` is
        on; ParameterError where a layer is asked for that the model has not.
        """
        chosen = self.options.layers
        if chosen is not None:
            outside = sorted(i for i in chosen if not 0 <= i < self.model.identity.layers)
            if outside:
                raise ParameterError(f"sparseprefill.layers names {outside[0]}: {self.model.identity.layers} layers")
        asked = [(i, why) for i, why in layers if chosen is None or i in chosen]
        dense = sorted((i, why) for i, why in asked if why)
        if dense and self.options.strict:
            shown = "; ".join(f"layer {i}: {why}" for i, why in dense)
            raise AttachError(f"strict: these layers would stay dense: {shown}")
        self.session.expect(i for i, _ in layers)
        self._announce(len(asked), Counter(why for _, why in dense))

    def remembers_by(self, fields: set[str]) -> None:
        """Say so in the log if requests will have no names, and the method needs them. fields: of vLLM's metadata."""
        why = self.names.objection(fields)
        if why and self.session.route.remembers:
            log.warning("sparseprefill: %s: %s", FORGETS, why)

    def _announce(self, layers: int, dense: Counter[str]) -> None:
        name, model, host = self.session.route.name, self.model.name, self.model.attention
        if dense.total() < layers:
            text = "sparseprefill: %s for prefill chunks of %d tokens and more of %s, %s for the rest"
            log.info(text, name, self.options.min_query, model, host)
            for why, count in dense.items():
                log.info("sparseprefill: %d of %d layers stay dense: %s", count, layers, why)
        elif layers:
            self.nothing("; ".join(dense))

    def nothing(self, why: str) -> None:
        """Say in log and report that nothing can run sparse, and why; AttachError where `strict` is on."""
        if self.options.strict:
            raise AttachError(f"strict: nothing can run sparse: {why}")
        text = f"{self.session.route.name} is selected, but nothing can run sparse: {why}"
        log.warning("sparseprefill: %s: %s", self.model.name, text)
        self.session.note(text)

    def _tell(self) -> None:
        try:
            log.debug("%s", self.report())
        except Exception as error:  # such as a mask that cannot be counted: it must not end the engine
            log.debug("no report: %s", reason(error))

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
    try:
        route = Route.of(options.build(None if whole else LocalRegistry(model.identity, model.local)))
        route.check_model(model.local)
    except SparsePrefillError:
        raise
    except Exception as error:
        raise AttachError(f"{TABLE}: the method's own code failed when it was built: {reason(error)}") from error
    tally = Tally(measure=options.measure, layers=model.identity.layers)
    session = Session(
        route,
        min_query=options.min_query,
        layers=options.layers,
        observe=tally.observe,
        gate=options.gate,
        tail=options.tail,
        recall_every=options.recall_every,
        strict_recall=options.strict_recall,
        hear_recall=tally.recall,
    )
    return Runtime(options, session, model, tally)
