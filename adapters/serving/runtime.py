"""One engine's worth of state in one process: the session, the requests, the metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from attrs import asdict, define, evolve, field

from sparseprefill.breakeven.before import Before
from sparseprefill.breakeven.gate import with_remedy
from sparseprefill.call import AttentionCall, resized
from sparseprefill.errors import AttachError, ParameterError, SparsePrefillError
from sparseprefill.route import Route

from ..session.kinds import Code, Why
from ..session.report import Mode, Report
from ..session.session import Prefill, Session
from .failures import reason
from .layer import Layer
from .model import Model
from .options import NO_GATE, TABLE, Options, Source
from .pace import Pace
from .requests import Requests, Row
from .summary import SECONDS, Summary, every
from .tally import Chunk, Owner, Served, Tally
from .tensor_parallel import LocalRegistry
from .wishes import OFF, Unknown
from .written import LOST, Unwritten, Write, Written, nowhere

LEFT_DENSE = "gate or profile leave each of them dense"
STEPS = 1024
"""Steps of the longest prompt up to which the gate is asked at the start: for more that would take too long."""
ENDLESS = "chunks of prompts whose length the server does not give: each chunk gets a dense tail"
ASKED_DENSE = f"the request asks for it ({TABLE}: {OFF})"
NOT_COUNTED = (
    "layers whose density was not counted, as a CUDA graph was captured, or memory ran out: "
    f"{TABLE}.measure counts each call"
)
NO_PROFILE = f"the request asks for a profile that this engine does not have ({TABLE})"
log = logging.getLogger(__name__)


@define(eq=False)
class Runtime:
    """State that the layers and metadata builders of one engine share in one process.

    session, tally: of the requests that ask for nothing, together `main`. profiles: what serves the others, by the name
    that they ask for. unread: index of the layer of which no rows are computed that nobody reads, if there is one.
    chunks: of the step's prefill rows; None where the host computes the row whatever the layer. kinds: what `kind` has
    said, by the layer's index. written: how the keys in the server's cache were computed; None where nobody keeps that.
    A server's adapter says in a subclass which requests it still has.
    """

    options: Options
    session: Session
    model: Model
    tally: Tally
    profiles: Mapping[str, Served] = field(factory=dict)
    main: Served = field(init=False)
    unread: int | None = field(init=False)
    requests: Requests = field(factory=Requests, init=False)
    warmed: set[object] = field(factory=set, init=False)
    surveyed: bool = field(default=False, init=False)
    foretold: bool = field(default=False, init=False)
    informed: bool = field(default=False, init=False)
    chunks: list[Chunk | None] = field(factory=list, init=False)
    pace: Pace = field(init=False)
    written: Written | None = field(default=None, init=False)
    _step: tuple[object, list[Prefill]] | None = field(default=None, init=False)
    _warned: set[str] = field(factory=set, init=False)
    kinds: dict[int, Hashable] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.main = Served(self.session, self.tally)
        self.pace = Pace(self.tally.summary.step)
        self.unread = self.model.identity.layers - 1 if self.options.skip_unread else None

    @classmethod
    def made(cls, options: Options, model: Model, owner: Owner) -> Self:
        """Make what the options ask for. owner: of the metrics.

        Raises what wrong options raise; ParameterError where a layer is asked for that the model has not.
        """
        outside = sorted(i for i in options.layers or () if i >= model.identity.layers)
        if outside:
            raise ParameterError(f"{TABLE}.layers names {outside[0]}: {model.name} has {model.identity.layers} layers")
        summary = Summary()
        main = _served(options.source, options, model, owner, summary)
        profiles = {
            name: _served(one, options, model, evolve(owner, profile=name), summary)
            for name, one in options.profiles.items()
        }
        return cls(options, main.session, model, main.tally, profiles)

    def alive(self, name: str) -> bool:
        """True if the server still has a request of this id, running or waiting for its next chunk."""
        raise NotImplementedError

    @property
    def every(self) -> tuple[Served, ...]:
        """All that may serve a request."""
        return (self.main, *self.profiles.values())

    def prefills(
        self,
        step: object,
        rows: Sequence[Row],
        decoding: Callable[[Iterable[str | None]], Mapping[str | None, int]],
        layers: int = 0,
    ) -> list[Prefill]:
        """The prefills of one step's rows: see Requests. Every group of layers asks with the same `step` object.

        decoding: finds the step's other rows of some requests, and tells the first token of each. layers: of the group
        that asks, each of which will run every row that may run sparse; 0 where that is not known.
        """
        if self._step is None or self._step[0] is not step or len(self._step[1]) != len(rows):
            for one in self.every:
                one.session.read_recall()
            self.pace.read()
            self.settle()
            finished = self.requests.finished
            others = decoding([*self.requests.names, *(row.name for row in rows)]) if len(self.requests) else {}
            found = self.requests.step(rows, others, self.alive, self._before)
            self._step = (step, found)
            self.chunks = [self._begin(row, prefill) for row, prefill in zip(rows, found, strict=True)]
            begun = [chunk for chunk in self.chunks if chunk is not None]
            if begun:
                timed = self.pace.begin(sum(row.end - row.start for row in rows), len(begun))
                for new in begun:
                    new.step = timed
            if self.requests.finished > finished and log.isEnabledFor(logging.DEBUG):
                self._tell()
        for chunk in self.chunks:
            if chunk is not None:
                chunk.layers += layers
        return self._step[1]

    def kind(self, layer: Layer) -> Hashable:
        """All that layers must have in common for what one comes to in a step to hold for the other."""
        own = tuple(one.session.kind(layer.index) for one in self.every)
        found = layer.scale, layer.softcap, layer.sinks is None, layer.index == self.unread, own
        self.kinds[layer.index] = found
        return found

    def serving(self, row: Row) -> Served:
        """The service that runs a row sparse."""
        return self.profiles.get(row.asked, self.main) if isinstance(row.asked, str) else self.main

    def settle(self) -> None:
        """The step that ran last is through all layers: count those of its chunks that were not yet."""
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            if chunk is not None:
                chunk.settle()

    def tell(self) -> None:
        """Log what prefill did since the last time, as a line; nothing where there was none.

        A step that is under way is none of it, however long it takes: time tells nobody that it is over.
        """
        self.pace.read()
        line = self.tally.summary.line()
        if line is not None:
            log.info("sparseprefill: %s", line)

    def start(self, usual: float = SECONDS) -> None:
        """Begin to log the summary, if it is asked for: by the first worker of those that share a layer's heads.

        usual: seconds between two of the server's own lines.
        """
        seconds = usual if self.options.log_interval is None else self.options.log_interval
        if seconds and self.model.first_head == 0 and log.isEnabledFor(logging.INFO):
            every(seconds, self, self.tell)

    def lose(self, error: Exception) -> None:
        """The server tells of its cache otherwise than it is understood: no more is known of it, and nothing ends."""
        self.written = Unwritten(LOST.format(error=reason(error)))
        log.warning("sparseprefill: how cached tokens were computed: %s", self.written.why)

    def _before(self, row: Row) -> Before | None:
        if self.written is None:
            return None
        try:
            return self.written.before(row)
        except Exception as error:
            self.lose(error)
            return self.written.before(row)

    def _writing(self, row: Row) -> Write:
        try:
            return nowhere if self.written is None or row.name is None else self.written.writing(row)
        except Exception as error:
            self.lose(error)
            return nowhere

    def _begin(self, row: Row, prefill: Prefill) -> Chunk | None:
        """A row's chunk, if it may run sparse; else it is counted at once."""
        served, tokens = self.serving(row), row.end - row.start
        write, chunk = self._writing(row), self._chunk(served, row, tokens)
        if chunk is not None:
            chunk.ended = partial(self._ended, served, prefill, write)
        else:
            self._ended(served, None if row.prompt is None or row.end < row.prompt else prefill, write, False)
        return chunk

    def _ended(self, served: Served, prefill: Prefill | None, write: Write, sparse: bool) -> None:
        """A chunk is through all layers. prefill: whose first one tells how it runs; None where that is yet to come."""
        try:
            write(served.session.route.name if sparse else "")
        except Exception as error:
            self.lose(error)
        if prefill is not None and not prefill.counted:
            prefill.counted = True
            mode: Mode = "sparse" if sparse else "dense"
            served.session.prompts.count(mode, prefill.before)
            served.tally.prompt(mode, prefill.before)

    def _chunk(self, served: Served, row: Row, tokens: int) -> Chunk | None:
        if row.prompt is None and self.options.tail:
            served.session.note(ENDLESS)
        if tokens < self.options.min_query:
            served.session.count_short()
            served.tally.dense(tokens, Why(Code.SHORT, f"fewer than {self.options.min_query} tokens"))
            return None
        dense = self._dense(row.asked)
        if dense is None:
            return served.tally.chunk(tokens, row.end)
        why, detail = dense
        if detail and why.text not in self._warned:
            self._warned.add(why.text)
            log.warning("sparseprefill: a request runs dense: %s", detail)
        served.session.note(why.text)
        served.tally.dense(tokens, why)
        return None

    def _dense(self, asked: object) -> tuple[Why, str] | None:
        """Reason for which a request that asks for this stays dense, and the log's words on the first; None where it
        does not."""
        if asked is None or (isinstance(asked, str) and asked in self.profiles):
            return None
        if isinstance(asked, Unknown):
            return Why(Code.UNKNOWN, asked.why), asked.detail or asked.why
        if asked == OFF:
            return Why(Code.OFF, ASKED_DENSE), ""
        return Why(Code.NO_PROFILE, NO_PROFILE), str(self.options.unknown(asked))

    def expect(self, layers: Sequence[tuple[int, str | None]]) -> None:
        """Name all layers of this process, and why they will stay dense; say in the log what will run how.

        layers: index and reason of each; an encoder's and a decoder's may have the same index. Where nothing will run
        sparse that is a warning, and a note in the report. AttachError where a layer will stay dense and `strict` is
        on.
        """
        chosen = self.options.layers
        asked = [(i, why) for i, why in layers if chosen is None or i in chosen]
        dense = sorted((i, why) for i, why in asked if why)
        if dense and self.options.strict:
            shown = "; ".join(f"layer {i}: {why}" for i, why in dense)
            raise AttachError(f"strict: these layers would stay dense: {shown}")
        for one in self.every:
            one.session.expect(i for i, _ in layers)
        self._announce(len(asked), Counter(why for _, why in dense))

    def foretell(self, call: AttentionCall, longest: int, option: str) -> None:
        """Say from which length on the gate lets prompts run sparse, in this server's steps.

        Where it lets none, that is a warning, and a note in the report. call: see `Route.least`. longest: tokens of a
        request, at most. option: the server's for the length of a step.
        """
        self.foretold, step = True, self.requests.chunk
        for one in self.every:
            route = one.session.route
            if route.gate is None or step * STEPS < longest:
                continue
            try:
                least = route.least(call, longest, step)
                whole = route.least(call, longest) if least is None and step < longest else None
                doubt = "" if least is None else route.choose(resized(call, least, least)).note
            except SparsePrefillError as error:  # a gate that fails leaves requests dense, and ends no start
                log.warning("sparseprefill: %s: from which length on prompts run sparse: %s", route.name, reason(error))
                continue
            one.tally.gate = "never" if least is None else str(least)
            if least is not None:
                text = "sparseprefill: by the gate, prompts of some %d tokens and more run %s in steps of %d"
                log.info(text, least, route.name, step)
                if doubt:
                    log.info("sparseprefill: %s", doubt)
                continue
            more = "" if whole is None else f"; in one step they do from some {whole} tokens on ({option})"
            text = f"no prompt of up to {longest} tokens runs {route.name} in steps of {step}: {LEFT_DENSE}{more}"
            log.warning("sparseprefill: %s", with_remedy(text, NO_GATE))
            one.session.note(text)
        self.inform()

    def inform(self) -> None:
        """Tell the metrics what runs, once: when no more is to be known of it."""
        if not self.informed:
            self.informed = True
            for one in self.every:
                one.tally.inform(self.requests.chunk)

    def leave(self, what: str, count: int = 1) -> None:
        """Note in the reports that so many layers are no concern of the methods: they run as without them."""
        for _ in range(count):
            for one in self.every:
                one.session.note(what)

    def _announce(self, layers: int, dense: Counter[str]) -> None:
        name, model, host = self.session.route.name, self.model.name, self.model.attention
        if dense.total() < layers:
            text = "sparseprefill: %s for prefill chunks of %d tokens and more of %s, %s for the rest"
            log.info(text, name, self.options.min_query, model, host)
            for why, count in dense.items():
                log.info("sparseprefill: %d of %d layers stay dense: %s", count, layers, why)
            return
        if layers:
            self.nothing("; ".join(dense))
        self.inform()  # nobody will foretell anything

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
        """Report what every layer did, and why (measures densities that wait: host sync).

        profile: for requests that ask for it; None for those that ask for nothing.
        """
        served = self.main if profile is None else self.profiles[profile]
        report = served.session.report(self.model.name, self.model.attention)
        lost = sum(one.mode == "sparse" and one.density is None for one in report.layers)
        if lost:  # as a note it stands in the text, too, and counts the layers
            report = evolve(report, notes={**report.notes, NOT_COUNTED: lost})
        if not self.options.measure:
            return report
        means = served.tally.means()
        return evolve(report, layers=tuple(evolve(x, mean_density=means.get(x.layer)) for x in report.layers))

    def answer(self) -> dict[str, Any]:
        """Every report as plain data, with its ``text``; that of the profiles under ``profiles``."""
        others = {name: plain(self.report(name)) for name in self.profiles}
        return {**plain(self.report()), "worker": self.tally.owner.worker, "profiles": others}


def plain(report: Report) -> dict[str, Any]:
    """A report as plain data, with what follows from it, and its ``text``."""
    names = ("density", "fallbacks", "recall", "least_recall", "row_p1", "row_lowest")
    derived = {name: getattr(report, name) for name in names}
    return {**asdict(report), **derived, "text": str(report)}


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
    tally = Tally(options.measure, model.identity.layers, evolve(owner, method=route.name), summary)
    session = Session(
        route,
        evolve(options, strict=False, measure=False),  # of a server's start, and of its tally
        told=tally.ran,
        gate=source.gate,
        hear_recall=tally.recall,
        off=NO_GATE,
    )
    if session.route.gate is None:
        tally.gate = "none"
    return Served(session, tally)
