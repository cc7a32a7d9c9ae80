"""Sessions at once against one server, and what each turn of them took and answered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from statistics import quantiles
from typing import Any

from attrs import asdict, frozen

from sparseprefill.errors import ParameterError

from .client import Answer, Counters, Server, ServerError
from .script import Question, Script, Turn


@frozen
class Asked:
    """One request. session: its index, -1 for the prefix alone. turn: from 1 on, 0 for the prefix. question: which of
    the turn's; the first one's time is the turn's. kind: copies or facts; empty where nothing was asked. right: whether
    the answer is. error: what went wrong, the other figures are then empty."""

    session: int
    turn: int
    question: int
    kind: str = ""
    right: bool = False
    answer: Answer | None = None
    error: str = ""

    @property
    def place(self) -> tuple[int, int, int]:
        """The request's place in the script."""
        return self.session, self.turn, self.question

    @classmethod
    def of(cls, found: Any) -> Asked:
        """A request in a record."""
        session, turn, question = (int(found[name]) for name in ("session", "turn", "question"))
        answer = None if found["answer"] is None else Answer.of(found["answer"])
        return cls(session, turn, question, str(found["kind"]), bool(found["right"]), answer, str(found["error"]))


@frozen
class Run:
    """A server's answers to a script. asked: its requests. counted: by the server's own counters while it ran; None
    where it has none."""

    url: str
    model: str
    asked: tuple[Asked, ...] = ()
    counted: Counters | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON holds it; `of` reads it."""
        return asdict(self)

    @classmethod
    def of(cls, found: Any) -> Run:
        """A run in a record; ParameterError where it is none."""
        try:
            return cls(str(found["url"]), str(found["model"]), tuple(Asked.of(one) for one in found["asked"]))
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ParameterError(f"run is not what a replay records ({error!r}): record it anew") from error

    @property
    def warm(self) -> bool:
        """True where the prefix was in the server's cache before the run began, as far as the server says."""
        first = next((one.answer for one in self.asked if one.turn == 0), None)
        return (
            first is not None and bool(first.cached and first.prompt) and 2 * (first.cached or 0) > (first.prompt or 0)
        )

    @property
    def by_place(self) -> Mapping[tuple[int, int, int], Asked]:
        """The requests that were answered."""
        return {one.place: one for one in self.asked if one.answer is not None}


def play(server: Server, script: Script, tokens: int) -> Iterator[Asked]:
    """The prefix alone, then all sessions at once, each turn behind the one before; gives requests as they end.

    tokens: of an answer, at most. A session ends at its first error.
    """
    yield _ask(server, script.prefix, 1, (-1, 0, 0), None)
    found: queue.Queue[Asked | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def session(index: int, turns: Sequence[Turn]) -> None:
        try:
            for one in _session(server, script.prefix, index, turns, tokens):
                found.put(one)
                if stop.is_set():
                    return
        except BaseException as error:  # raised again where the results are read
            found.put(error)
        finally:
            found.put(None)

    for index, turns in enumerate(script.sessions):
        threading.Thread(target=session, args=(index, turns), daemon=True).start()
    left = len(script.sessions)
    try:
        while left:
            one = found.get()
            if isinstance(one, BaseException):
                raise one
            if one is None:
                left -= 1
            else:
                yield one
    finally:
        stop.set()


def _session(server: Server, prefix: str, index: int, turns: Sequence[Turn], tokens: int) -> Iterator[Asked]:
    text = prefix
    for number, turn in enumerate(turns, start=1):
        text += turn.text
        for at, question in enumerate(turn.questions or (None,)):
            behind = "" if question is None else question.text
            one = _ask(server, text + behind, tokens, (index, number, at), question)
            yield one
            if one.error:
                return
        if turn.questions:
            text += turn.questions[0].text + turn.questions[0].answer


def _ask(server: Server, text: str, tokens: int, place: tuple[int, int, int], question: Question | None) -> Asked:
    try:
        answer = server.complete(text, tokens)
    except ServerError as error:
        return Asked(*place, error=str(error))
    if question is None:
        return Asked(*place, answer=answer)
    return Asked(*place, question.kind, question.right(answer.text), answer)


@frozen
class Share:
    """A count out of a total; `text` shows it."""

    count: int = 0
    of: int = 0

    @property
    def text(self) -> str:
        """As a table shows it; empty where there are none."""
        return f"{self.count} / {self.of}" if self.of else ""


@frozen
class Row:
    """A turn over all sessions, or all turns. title: names it. times: seconds to the first token. between: seconds of
    each token behind it. prompt, cached: tokens of its requests and those cached, None where the server does not say.
    copies, facts: right answers. same: answers with the text that the reference gives. errors: requests that failed.
    """

    title: str
    times: tuple[float, ...] = ()
    between: tuple[float, ...] = ()
    prompt: int | None = None
    cached: int | None = None
    copies: Share = Share()
    facts: Share = Share()
    same: Share = Share()
    errors: int = 0

    @classmethod
    def of(cls, title: str, asked: Sequence[Asked], reference: Run | None) -> Row:
        """The figures of some requests. Times and cached tokens are those of the turns' first questions."""
        led = [one.answer for one in asked if one.answer is not None and not one.question]
        known = {} if reference is None else reference.by_place
        pairs = [
            (one.answer.text, other.text)
            for one in asked
            if one.answer is not None
            and one.turn
            and (other := getattr(known.get(one.place), "answer", None)) is not None
        ]
        return cls(
            title,
            tuple(one.first for one in led),
            tuple((one.whole - one.first) / (one.pieces - 1) for one in led if one.pieces > 1),
            _total([one.prompt for one in led]),
            _total([one.cached for one in led]),
            _right(asked, "copies"),
            _right(asked, "facts"),
            Share(sum(mine == other for mine, other in pairs), len(pairs)),
            sum(bool(one.error) for one in asked),
        )

    @property
    def figures(self) -> dict[str, Any]:
        """As plain data."""
        shares = {
            name: None if not one.of else {"right": one.count, "asked": one.of}
            for name, one in (("copies", self.copies), ("facts", self.facts))
        }
        return {
            "turn": self.title,
            "requests": len(self.times),
            "first_p50": quantile(self.times, 0.5),
            "first_p99": quantile(self.times, 0.99),
            "token_p50": quantile(self.between, 0.5),
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            **shares,
            "same": None if not self.same.of else {"same": self.same.count, "compared": self.same.of},
            "errors": self.errors,
        }


def rows(run: Run, reference: Run | None = None) -> list[Row]:
    """The prefix, every turn, and all turns together."""
    turns = sorted({one.turn for one in run.asked})
    made = [
        Row.of(str(turn) if turn else "prefix", [one for one in run.asked if one.turn == turn], reference)
        for turn in turns
    ]
    return [*made, Row.of("all turns", [one for one in run.asked if one.turn], reference)]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of them lie, in whole percents, between neighbours in a straight line; None of
    none."""
    if len(values) < 2:
        return next(iter(values), None)
    return quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def _right(asked: Sequence[Asked], kind: str) -> Share:
    of = [one for one in asked if one.kind == kind and one.answer is not None]
    return Share(sum(one.right for one in of), len(of))


def _total(values: Sequence[int | None]) -> int | None:
    known = [one for one in values if one is not None]
    return sum(known) if known and len(known) == len(values) else None
