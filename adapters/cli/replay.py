"""The command `replay`: agents' turns against a running server, their times beside what is still answered."""

from __future__ import annotations

import json as reading
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import define, evolve, field

from sparseprefill import structure
from sparseprefill.errors import ParameterError, nearest

from . import options, render
from .group import CommandError, Stop, check_writable, write

if TYPE_CHECKING:
    from ..replay.client import Counters, Server
    from ..replay.play import Asked, Row, Run
    from ..replay.script import Script

VERSION = 1
"""Of a record's form."""
MOST = 1 << 30
"""Bytes of a record."""
COUNTED = 2000
"""Words of each kind of text on which a server's tokens are counted."""
SOON = 10.0
"""Seconds to wait for a server's counters, of which nothing depends."""
KEY = "OPENAI_API_KEY"
"""The variable that openai's own client reads, too."""
NOTES = (
    "first: seconds to the first token of a turn, over sessions; a token: of those behind it; copies, facts: right "
    "answers; same: answers with the reference's text. With few sessions p99 is close to the slowest."
)


def replay(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, such as http://127.0.0.1:8000.")],
    sessions: Annotated[int, typer.Option(min=1, max=256, help="Sessions at once.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each session.")] = 10,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the text in front, which all sessions share.")] = 24576,
    turn: Annotated[
        str, typer.Option(metavar="N|FEWEST-MOST", help="Tokens that a turn appends; a range is drawn from.")
    ] = "2048-8192",
    questions: Annotated[
        int, typer.Option(min=1, help="Questions behind each turn; the first one's time is the turn's.")
    ] = 2,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 32,
    model: Annotated[str | None, typer.Option(help="Name of the model; by default the first that is served.")] = None,
    body: Annotated[str | None, typer.Option(metavar="JSON", help="Further fields of every request.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="A server to compare with, which gets the same requests after.")
    ] = None,
    against_body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Its further fields; without --against, the same server is asked again."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write texts and answers to this file.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Send the texts of a recorded file, and compare with its answers.")
    ] = None,
    seed: options.Seed = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, callback=options.finite, help="Seconds that a request may be silent.")
    ] = 600.0,
    json: options.Json = False,
) -> None:
    """Replay agents' turns on a running OpenAI-compatible server: first token of each turn, cache hits, answers kept.

    A long prefix is shared; every turn appends text and asks for passages and facts that stand far above. Ctrl-C stops
    and shows what was measured so far.
    """
    from ..replay.client import Server
    from ..replay.play import rows

    if compare is not None and (against is not None or against_body is not None):
        raise CommandError("--compare and --against name two references: pass one of them")
    span = _span(turn)
    check_writable("--record", record)
    key = os.environ.get(KEY) or None
    server = Server(url, timeout, key, _fields("--body", body))
    beside = None
    if against is not None or against_body is not None:
        beside = Server(against or url, timeout, key, _fields("--against-body", against_body))
    recorded = None if compare is None else _read(compare)
    server = _chosen(server, model)  # the first request: what options say by themselves is known to fit
    if beside is not None:
        beside = _chosen(beside, model if against is None else None)
    reference: Run | None = None
    if recorded is None:
        script, guessed = _made(server, prefix, span, turns, sessions, questions, seed, answer)
    else:
        script, answer, reference = recorded
        guessed = False
        _check_room(server, script.tokens, answer, f"--compare {compare}")
    every = 1 + sum(max(1, len(one.questions)) for turns_ in script.sessions for one in turns_)
    expected = every * (1 if beside is None else 2)
    mine, others = _Played(server), None if beside is None else _Played(beside)
    with Stop() as stop:
        mine.play(script, answer, expected)
        if others is not None and not mine.failed:
            others.play(script, answer, expected)
    run = mine.run
    if others is not None and not mine.failed:
        reference = others.run
    done = len(mine.asked) + (0 if others is None else len(others.asked))
    if not json:  # which is whole without any request, too
        stop.check(done)
    found = rows(run, reference)
    remarks = _remarks(run, reference, guessed)
    if record is not None and not stop.heard:
        whole = {"version": VERSION, "answer": answer, "script": script.plain, "run": run.plain}
        write("--record", record, reading.dumps(whole))
    beside_rows = [] if reference is None else rows(reference)
    if json:
        render.write_json(
            {
                **{"url": url, "model": server.model, "script": script.settings, "stopped": stop.heard},
                **_facts(run, found),
                "reference": None if reference is None else {**_whose(reference), **_facts(reference, beside_rows)},
                "remarks": remarks,
            }
        )
    else:
        title = f"{server.model} at {url}: {len(script.sessions)} sessions, up to {script.tokens:,} tokens"
        title += "" if reference is None else f"; reference: {reference.model} at {reference.url}"
        cold = not any(one.warm for one in (run, reference) if one is not None)
        render.show(table_of(found, beside_rows, title, remarks, cold=cold))
    failed = bool(_errors(run) or (beside is not None and reference is not None and _errors(reference)))
    stop.end(done, expected, "requests", failed=failed)


@define
class _Played:
    """A server's answers to a script, as far as they have come. counted: see `Run`."""

    server: Server
    asked: list[Asked] = field(factory=list)
    counted: Counters | None = None

    @property
    def failed(self) -> bool:
        """True if the first request did."""
        return bool(self.asked and self.asked[0].error)

    @property
    def run(self) -> Run:
        """All of it."""
        from ..replay.play import Run

        return Run(self.server.url, self.server.model, tuple(self.asked), self.counted)

    def play(self, script: Script, answer: int, expected: int) -> None:
        """Let the server answer. Whatever ends it leaves what has come, and the server's counters."""
        from ..replay.play import play
        from .progress import bars

        soon = evolve(self.server, timeout=min(SOON, self.server.timeout))
        before = soon.counters()
        try:
            with bars(expected) as shown:
                for one in play(self.server, script, answer):
                    self.asked.append(one)
                    with shown.contender(self.server.url) as progress:
                        progress(f"session {one.session + 1}, turn {one.turn}", 0, 1)
                    if self.failed:
                        break
        finally:
            after = soon.counters() if before is not None else None
            if before is not None and after is not None:
                self.counted = after.since(before)


def table_of(
    found: Sequence[Row], reference: Sequence[Row], title: str, remarks: Sequence[str], *, cold: bool
) -> render.Table:
    """A row for each turn, beside the reference's where there is one. cold: whether their times may be compared."""
    from ..replay.play import Row, quantile

    others = {one.title: one for one in reference}

    def other(row: Row) -> Row:
        return others.get(row.title, Row(row.title))

    def faster(row: Row) -> str:
        mine, theirs = (quantile(one.times, 0.5) for one in (row, other(row)))
        return f"{theirs / mine:.2f}" if cold and mine and theirs else ""

    columns: list[render.Column[Row]] = [
        render.Column("turn", lambda row: row.title),
        render.Column("tokens", lambda row: "" if row.prompt is None else f"{row.prompt // len(row.times):,}"),
        render.Column("cached", lambda row: "" if row.cached is None else f"{row.cached / (row.prompt or 1):.0%}"),
        render.Column("first, p50", lambda row: _seconds(quantile(row.times, 0.5))),
        render.Column("first, p99", lambda row: _seconds(quantile(row.times, 0.99))),
        render.Column("reference, p50", lambda row: _seconds(quantile(other(row).times, 0.5))),
        render.Column("reference, p99", lambda row: _seconds(quantile(other(row).times, 0.99))),
        render.Column("speed-up", faster),
        render.Column("a token", lambda row: _seconds(quantile(row.between, 0.5))),
        render.Column("copies", lambda row: row.copies.text),
        render.Column("reference's copies", lambda row: other(row).copies.text),
        render.Column("facts", lambda row: row.facts.text),
        render.Column("reference's facts", lambda row: other(row).facts.text),
        render.Column("same", lambda row: row.same.text),
        render.Column("errors", lambda row: str(row.errors) if row.errors else ""),
    ]
    drop = ("a token", "tokens", "reference, p99")
    return render.Table.of(columns, found, title=title, drop=drop, remarks=remarks, notes=NOTES)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _chosen(server: Server, wanted: str | None) -> Server:
    """The server with a model that it serves; CommandError where the one that is wanted is none of them."""
    known = server.models()
    if wanted is not None and wanted not in known:
        raise CommandError(f"--model {wanted}: {server.url} serves no such model{nearest(wanted, [*known])}")
    return evolve(server, model=wanted or next(iter(known)))


def _made(
    server: Server,
    prefix: int,
    span: tuple[int, int],
    turns: int,
    sessions: int,
    questions: int,
    seed: int,
    answer: int,
) -> tuple[Script, bool]:
    """The script for a server, and whether its tokens are guessed because the server does not count them."""
    from ..replay.script import KINDS, Pieces, least_prefix, sample, script_of

    given = f"--turn {span[0]}-{span[1]} --turns {turns}"
    _check_room(server, prefix + span[1] * turns, answer, f"--prefix {prefix} {given}")
    rates, guessed = {}, False
    for kind in KINDS[:1] if sessions == 1 else KINDS[:sessions]:
        text = sample(kind, COUNTED, seed, prefix if kind == KINDS[0] else turns * sum(span) // 2)
        counted = server.complete(text, 1).prompt
        guessed = guessed or counted is None
        words = len(Pieces()(text)["input_ids"])
        rates[kind] = (len(text) / 4 if counted is None else counted) / words
    try:
        return script_of(prefix, span, turns, sessions, questions, seed, rates), guessed
    except ParameterError as error:
        least = least_prefix(rates[KINDS[0]])
        _check_room(server, least + span[1] * turns, answer, f"--{error}; with {given}")
        raise CommandError(f"--{error}") from error


def _check_room(server: Server, tokens: int, answer: int, given: str) -> None:
    """CommandError where a server says that its model does not read so many tokens."""
    room = server.models().get(server.model)
    if room is not None and tokens + answer > room:
        raise CommandError(
            f"{given}: a session gets up to {tokens + answer:,} tokens, and {server.model} reads {room:,}; pass fewer "
            "turns or shorter ones, or raise the server's limit"
        )


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise CommandError(f"--turn {text}: pass a number of tokens, or a range such as 2048-8192")
    return fewest, most


def _fields(option: str, text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        return structure.table(structure.parsed(text, remedy='pass an object such as {"seed": 1}'), "its value")
    except ParameterError as error:
        raise CommandError(f"{option} {text}: {error}") from error


def _read(path: Path) -> tuple[Script, int, Run]:
    """Script, tokens of an answer and run of a record."""
    from ..replay.play import Run
    from ..replay.script import Script

    try:
        found = structure.parsed(structure.read(path, MOST))
        answer = found.get("answer") if isinstance(found, dict) and found.get("version") == VERSION else None
        if not isinstance(answer, int) or answer < 1:
            raise ParameterError("it is not what --record of this version writes: record it anew")
        return Script.of(found.get("script")), answer, Run.of(found.get("run"))
    except ParameterError as error:
        raise CommandError(f"--compare {path}: {error}") from error


def _whose(run: Run) -> dict[str, Any]:
    return {"url": run.url, "model": run.model}


def _facts(run: Run, found: Sequence[Row]) -> dict[str, Any]:
    """A run as plain data. found: its rows."""
    return {
        **{"turns": [one.figures for one in found], "cache": _hits(run), "prefill": _prefill(run)},
        "errors": _errors(run),
        "requests": run.plain["asked"],
    }


def _errors(run: Run) -> dict[str, int]:
    return Counter(one.error for one in run.asked if one.error)


def _hits(run: Run) -> dict[str, float] | None:
    return None if run.counted is None else {"hits": run.counted.hits, "queries": run.counted.queries}


def _prefill(run: Run) -> dict[str, float] | None:
    if run.counted is None or run.counted.each is None:
        return None
    return {"seconds": run.counted.prefill, "requests": run.counted.requests}


def _remarks(run: Run, reference: Run | None, guessed: bool) -> list[str]:
    """Remarks beside the figures."""
    made = []
    for name, one in (("", run), ("reference: ", reference)):
        if one is None:
            continue
        made += [f"{name}{count} x {error}" for error, count in _errors(one).items()]
        answers = [each.answer for each in one.asked if each.answer is not None]
        if one.counted is not None and one.counted.queries:
            made.append(
                f"{name}the server's own counters: {one.counted.hits:,.0f} of {one.counted.queries:,.0f} tokens came "
                "from its prefix cache while this ran, other requests among them"
            )
        elif answers and all(each.cached is None for each in answers):
            made.append(
                f"{name}the server does not say what was cached: start vLLM with --enable-prompt-tokens-details, "
                "SGLang with --enable-cache-report or --enable-metrics"
            )
        if one.warm:
            made.append(
                f"{name}the prefix was in the server's cache before this began, so times are those of a second run and "
                "no speed-up is shown: pass another --seed, or empty the cache"
            )
    made += _in_engine(run, reference)
    if guessed:
        made.append("the server sends no usage: lengths are guessed, at 4 characters a token")
    return made


def _in_engine(run: Run, reference: Run | None) -> list[str]:
    """Remark on what the engine's own clock says of prefills; nothing where the server has none."""
    mine = None if run.counted is None else run.counted.each
    if not mine:
        return []
    text = f"the engine's own clock: {_seconds(mine)} of prefill a request, cached ones among them"
    theirs = None if reference is None or reference.counted is None else reference.counted.each
    if theirs is not None:
        text = f"{text}; the reference {_seconds(theirs)}, {theirs / mine:.2f} times"
    return [f"{text}. The rest of a first token passes in front of it: HTTP, and tokenizing the whole text each time"]
