"""One engine's worth of state in one process: the session, the requests, the metrics."""

from __future__ import annotations

import logging
import multiprocessing
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field

from sparseprefill.errors import AttachError, ParameterError, SparsePrefillError
from sparseprefill.route import Route

from ..session.report import Report
from ..session.session import Prefill, Session
from .chunks import check_chunk, check_grain
from .failures import reason
from .logs import show
from .model import Model, identity
from .names import Names, Unknown, drafting
from .options import OFF, TABLE, Options, Source, parse
from .requests import Requests, Row
from .served import Served
from .summary import Summary, every, interval_of_host
from .tally import Chunk, Owner, Tally
from .tensor_parallel import LocalRegistry

NAME = "CUSTOM"
ENDLESS = "chunks of prompts whose length vLLM does not give: each chunk gets a dense tail"
DRAFTS = "layers of a draft model: what is drafted runs dense"
KEYLESS = "layers of type {kind}: they have no keys to choose from"
BLIND = "nobody would know which request asks for dense attention or for a profile"
ASKED_DENSE = f"the request asks for it ({TABLE}: {OFF})"
NOT_COUNTED = (
    "layers whose density was not counted, as a CUDA graph was captured, or memory ran out: "
    f"{TABLE}.measure counts each call"
)
NO_PROFILE = f"the request asks for a profile that this engine does not have ({TABLE})"
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
UNSEEN = (
    "the server's /metrics does not show what this process counts: set PROMETHEUS_MULTIPROC_DIR to an empty folder "
    "before it starts"
)
log = logging.getLogger(__name__)
_runtimes: dict[int, Runtime] = {}


@define(eq=False)
class Runtime:
    """What the layers and metadata builders of one engine share in one process.

    session, tally: of the requests that ask for nothing, together `main`. profiles: what serves the others, by the name
    that they ask for. chunks: of the step's prefill rows; None where the host computes the row whatever the layer.
    """

    options: Options
    session: Session
    model: Model
    tally: Tally
    profiles: Mapping[str, Served] = field(factory=dict)
    main: Served = field(init=False)
    requests: Requests = field(factory=Requests, init=False)
    names: Names = field(factory=Names.of_nobody, init=False)
    warmed: set[object] = field(factory=set, init=False)
    surveyed: bool = field(default=False, init=False)
    chunks: list[Chunk | None] = field(factory=list, init=False)
    _step: tuple[object, list[Prefill]] | None = field(default=None, init=False)
    _told: object = field(default=None, init=False)
    _warned: set[str] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.main = Served(self.session, self.tally)

    @property
    def every(self) -> tuple[Served, ...]:
        """All that may serve a request."""
        return (self.main, *self.profiles.values())

    def prefills(
        self, step: object, rows: Sequence[Row], decoding: Callable[[Iterable[str | None]], Mapping[str | None, int]]
    ) -> list[Prefill]:
        """The prefills of one step's rows: see Requests. Every group of layers asks with the same `step` object.

        decoding: finds the step's other rows of some requests, and tells the first token of each.
        """
        if self._step is None or self._step[0] is not step or len(self._step[1]) != len(rows):
            for one in self.every:
                one.session.read_recall()
            self.settle()
            finished = self.requests.finished
            others = decoding([*self.requests.names, *(row.name for row in rows)]) if len(self.requests) else {}
            self._step = (step, self.requests.step(rows, others, self.names.alive))
            self.chunks = [self._begin(row) for row in rows]
            if self.requests.finished > finished and log.isEnabledFor(logging.DEBUG):
                self._tell()
        return self._step[1]

    def serving(self, row: Row) -> Served:
        """What runs a row sparse."""
        return self.profiles.get(row.asked, self.main) if isinstance(row.asked, str) else self.main

    def settle(self) -> None:
        """The step that ran last is through all layers: count its chunks."""
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            if chunk is not None:
                chunk.settle()

    def tell(self) -> None:
        """Log what prefill did since the last time, as a line; nothing where there was none."""
        step = None if self._step is None else self._step[0]
        if step is self._told:  # nothing has come since, so the last step is over
            self.settle()
        self._told = step
        line = self.tally.summary.line()
        if line is not None:
            log.info("sparseprefill: %s", line)

    def start(self) -> None:
        """Begin to log the summary, if it is asked for: by the first worker of those that share a layer's heads."""
        seconds = self.options.log_interval
        seconds = interval_of_host() if seconds is None else seconds
        if seconds and self.model.first_head == 0 and log.isEnabledFor(logging.INFO):
            every(seconds, self, self.tell)
        if multiprocessing.parent_process() is not None and DIRECTORY not in os.environ:
            log.info("sparseprefill: %s", UNSEEN)

    def _begin(self, row: Row) -> Chunk | None:
        """A row's chunk, if it may run sparse; else it is counted at once."""
        served, tokens = self.serving(row), row.end - row.start
        if row.prompt is None and self.options.tail:
            served.session.note(ENDLESS)
        if tokens < self.options.min_query:
            served.session.count_short()
            served.tally.settle(tokens, f"fewer than {self.options.min_query} tokens")
            return None
        dense = self._dense(row.asked)
        if dense is None:
            return served.tally.chunk(tokens)
        why, detail = dense
        if detail and why not in self._warned:
            self._warned.add(why)
            log.warning("sparseprefill: a request runs dense: %s", detail)
        served.session.note(why)
        served.tally.settle(tokens, why)
        return None

    def _dense(self, asked: object) -> tuple[str, str] | None:
        """Why a request stays dense that asks for this, and what the log says of the first; None where it does not."""
        if asked is None or (isinstance(asked, str) and asked in self.profiles):
            return None
        if isinstance(asked, Unknown):
            return asked.why, asked.detail or asked.why
        return (ASKED_DENSE, "") if asked == OFF else (NO_PROFILE, str(self.options.unknown(asked)))

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
        for one in self.every:
            one.session.expect(i for i, _ in layers)
        self._announce(len(asked), Counter(why for _, why in dense))

    def leave(self, what: str, count: int = 1) -> None:
        """Note in the reports that so many layers are no concern of the methods: they run as without them."""
        for _ in range(count):
            for one in self.every:
                one.session.note(what)

    def check_names(self) -> None:
        """AttachError where nobody will know what requests ask for: none of them may run sparse then."""
        why = self.names.objection()
        if why:
            raise AttachError(f"{BLIND}: {why}")

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

    def report(self, profile: str | None = None) -> Report:
        """What every layer did, and why (measures densities that wait: host sync). profile: for requests that ask for
        it; None for those that ask for nothing."""
        served = self.main if profile is None else self.profiles[profile]
        report = served.session.report(self.model.name, self.model.attention)
        lost = sum(one.mode == "sparse" and one.density is None for one in report.layers)
        if lost:  # as a note it stands in the text, too, and counts the layers
            report = evolve(report, notes={**report.notes, NOT_COUNTED: lost})
        if not self.options.measure:
            return report
        means = served.tally.means()
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
        made = _runtimes[id(owner)] = make_runtime(config, attention)
        made.start()
        weakref.finalize(owner, _runtimes.pop, id(owner), None)
    return _runtimes[id(owner)]


def layer_runtime(config: Any, attention: str) -> Runtime | None:
    """The same for a layer: None for one of a draft model, whose rows are vLLM's alone; the report notes it."""
    if not drafting():
        return runtime_of(config, attention)
    runtime = existing(config)
    if runtime is not None:
        runtime.leave(DRAFTS)
    return None


def existing(config: Any) -> Runtime | None:
    """The runtime of an engine, if a layer has asked for it."""
    return _runtimes.get(id(getattr(config, "compilation_config", None)))


def selected(config: Any) -> bool:
    """Whether the backend is selected, for all layers or for a kind of them."""
    chosen = config.attention_config
    kinds = getattr(chosen, "backend_per_kind", None) or {}
    return any(getattr(backend, "name", None) == NAME for backend in (chosen.backend, *kinds.values()))


def make_runtime(config: Any, attention: str) -> Runtime:
    """The same, made anew. Raises what wrong options raise."""
    options = parse(config.additional_config)
    show(options.log_level)
    model = identity(config, attention)
    check_chunk(config, options)
    summary = Summary()
    owner = _owner(config)
    main = _served(options.source, options, model, owner, summary)
    profiles = {
        name: _served(one, options, model, evolve(owner, profile=name), summary)
        for name, one in options.profiles.items()
    }
    return Runtime(options, main.session, model, main.tally, profiles)


def _served(source: Source, options: Options, model: Model, owner: Owner, summary: Summary) -> Served:
    whole = model.local is model.identity
    try:
        route = Route.of(source.build(None if whole else LocalRegistry(model.identity, model.local)))
        route.check_model(model.local)
    except ParameterError as error:
        here = "" if str(error).startswith(source.at) or source.at == TABLE else f"{source.at}: "
        raise type(error)(f"{here}{error}") from error
    except SparsePrefillError:
        raise
    except Exception as error:
        raise AttachError(f"{source.at}: the method's own code failed when it was built: {reason(error)}") from error
    check_grain(options.chunk, route, source.at)
    tally = Tally(options.measure, model.identity.layers, evolve(owner, method=route.name), summary)
    session = Session(
        route,
        min_query=options.min_query,
        layers=options.layers,
        observe=tally.observe,
        gate=source.gate,
        tail=options.tail,
        recall_every=options.recall_every,
        strict_recall=options.strict_recall,
        hear_recall=tally.recall,
    )
    return Served(session, tally)


def _owner(config: Any) -> Owner:
    """Of a process: the model's name as vLLM's metrics have it, and the number of its worker."""
    given, parallel = getattr(config, "model_config", None), getattr(config, "parallel_config", None)
    name: Any = getattr(given, "served_model_name", None) or getattr(given, "model", "")
    rank, replica = (int(getattr(parallel, field, 0) or 0) for field in ("rank", "data_parallel_index"))
    worker = f"{replica}.{rank}" if int(getattr(parallel, "data_parallel_size", 1) or 1) > 1 else str(rank)
    return Owner(str(name if isinstance(name, str) else name[0]), worker=worker)
