"""What the command reports: a table for each task, JSON, and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, fields, frozen
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.catalog import worded
from sparseprefill.adapters.cli.group import write
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.results import right_of, small
from sparseprefill.adapters.evaluation.outcome import Divergence, pooled

from lab import files as written
from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import Files

from .agents import Chunk, Run
from .requests import COUNTED
from .talk import FIRST, Played, Scores

if TYPE_CHECKING:
    from sparseprefill.adapters.cli.setup import Place
    from sparseprefill.adapters.evaluation.outcome import Contender

HALF = 0.5
"""Share of right answers below which the model itself cannot do what a column shows."""
PAIRED = "right / asked; -N, +N: of dense's right ones that are lost, and of its wrong ones that are right here. "
NOTES = (
    f"{PAIRED}density: pairs computed / causal pairs of the text's prefill, "
    "mean over the layers. Methods prefill; every answer is decoded, or read, with dense attention behind their cache."
)
TASKS = {
    "lookups": "values that are exact, by the third of the text in which they stand; one conversation a text, in which "
    "every question stands behind those before it and their right answers.",
    "requests": f"the first {COUNTED} tokens of a note that are the likeliest, by which of the notes about its topic "
    f"it is (teacher forcing); exact: notes of which greedy decoding gives the first {FIRST} tokens.",
    "chain": "values that are exact: keys, which the text says; doors, which the text says of keys: the question "
    "before was answered with one.",
}
"""What the columns of each table are."""
AGENTS = (
    "Each chunk is prefilled behind the cache of all before it. copies, facts: restated tokens and facts that are the "
    f"likeliest, of those that an earlier chunk has (in the prefix: of all): {PAIRED}KL, 99 %: KL(dense || "
    "sparse) of the next token in nats over all rows of the chunk, mean and 99th percentile, against the run in which "
    "everything was dense; NLL: ratio of mean negative log-likelihoods, sparse / dense. density: pairs computed / "
    "causal pairs of the chunk's calls. seconds: of the chunk's prefill, mean over the texts, on a CPU with "
    "the counting of pairs; speed-up: stock's / these."
)
DROP = ("99 %", "NLL", "density")


@frozen(eq=False)
class Found:
    """Everything that was measured: conversations of the tasks that ask, and texts of agents."""

    played: list[Played] = field(factory=list)
    runs: list[Run] = field(factory=list)
    title: str = ""

    @property
    def count(self) -> int:
        """Conversations and texts, of all contenders."""
        return len(self.played) + len(self.runs)

    @property
    def failed(self) -> bool:
        """Whether something stopped a contender."""
        return any(one.error for one in self.played) or any(one.error for one in self.runs)

    def tables(self) -> list[Table]:
        """A table for each task that there is anything of."""
        tasks = dict.fromkeys(one.task for one in self.played)
        made = [asked_table(task, [one for one in self.played if one.task == task], self.title) for task in tasks]
        return made + ([agents_table(self.runs, self.title)] if self.runs else [])


def report(found: Found, about: Mapping[str, Any], place: Place, files: Files) -> None:
    """Print the tables, and write what is wanted of them."""
    if files.markdown is not None:
        write("--markdown", files.markdown, "\n".join(map(written.markdown, found.tables())))
    keep(found, about, place, files, last=True)
    if files.alone:
        return
    for table in found.tables():
        render.show(table)
    for path in (files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")


def keep(found: Found, about: Mapping[str, Any], place: Place, files: Files, *, last: bool = False) -> None:
    """Write the figures to the JSON file, should one be wanted: what a long run has is there if it is killed."""
    if last or not files.alone:
        asked = [_played(one, _dense_scores(one, found.played)) for one in found.played]
        stock = {one.text: one for one in found.runs if one.contender.pipeline is None and not one.error}
        agents = [_run(one, None if one.contender.pipeline is None else stock.get(one.text)) for one in found.runs]
        write_figures(files.json, facts.about(place.device, **about, conversations=asked, agents=agents))


@frozen
class Paired:
    """Answers of one contender beside dense's to the same questions. lost: that dense has right and this one has not;
    won: the other way round."""

    right: int
    asked: int
    lost: int = 0
    won: int = 0

    @classmethod
    def of(cls, mine: Sequence[bool], dense: Sequence[bool] | None) -> Paired:
        """dense: None for dense itself, or where its answers are not known."""
        pairs = [] if dense is None else list(zip(mine, dense, strict=True))
        lost, won = (sum(one == pair for one in pairs) for pair in ((False, True), (True, False)))
        return cls(sum(mine), len(mine), lost, won)

    def __add__(self, other: Paired) -> Paired:
        """Both together."""
        sums = (getattr(self, one.name) + getattr(other, one.name) for one in fields(Paired))
        return Paired(*sums)

    @property
    def text(self) -> str:
        """Right and asked, and what differs from dense's; nothing where nothing was asked."""
        apart = [f"{sign}{count}" for sign, count in (("-", self.lost), ("+", self.won)) if count]
        return " ".join([right_of((self.right, self.asked)), *apart]).strip()

    @classmethod
    def by_column(cls, scores: Scores, dense: Scores | None) -> dict[str, Paired]:
        """Of each column of one conversation or chunk."""
        return {name: cls.of(mine, None if dense is None else dense.get(name)) for name, mine in scores.items()}


def summed(found: Sequence[Mapping[str, Paired]]) -> dict[str, Paired]:
    """Of each column of several conversations or chunks."""
    made: dict[str, Paired] = {}
    for name, one in (pair for each in found for pair in each.items()):
        made[name] = made[name] + one if name in made else one
    return made


@frozen
class _Row:
    """One contender on several conversations."""

    contender: Contender
    scores: Mapping[str, Paired]
    density: float
    error: str


def asked_table(task: str, played: Sequence[Played], title: str = "") -> Table:
    """One row for each contender; columns that dense itself cannot do are left out, and a remark says so."""
    rows = []
    for group in _grouped(played):
        done = [one for one in group if not one.error]
        scores = summed([Paired.by_column(one.scores, _dense_scores(one, played)) for one in done])
        density = fmean(one.density for one in done) if done else 1.0
        rows.append(_Row(group[0].contender, scores, density, next((one.error for one in group if one.error), "")))
    able, unable = _able(rows[0].scores)
    columns: list[Column[_Row]] = [
        Column("method", lambda one: _named(one.contender), words=True),
        Column("density", lambda one: f"{one.density:.1%}"),
        *(Column(name, _cell(name)) for name in able),
    ]
    tokens = max((one.tokens for one in played), default=0)
    texts = len({one.text for one in played})
    head = f"{task}: {tokens:,} tokens prefilled, {texts} texts{title}"
    return Table.of(
        columns,
        rows,
        lambda one: one.error,
        title=head,
        drop=("density",),
        remarks=[*unable, *_remarks(played)],
        notes=f"{TASKS[task]} {NOTES}",
    )


def _dense_scores(one: Played, played: Sequence[Played]) -> Scores | None:
    """Dense's answers to the same questions; None for dense itself, and where it has none."""
    if one.contender.pipeline is None:
        return None
    same = (dense for dense in played if dense.contender.pipeline is None and not dense.error)
    return next((dense.scores for dense in same if (dense.task, dense.text) == (one.task, one.text)), None)


def _cell(name: str) -> Callable[[Any], str]:
    return lambda one: one.scores[name].text if name in one.scores else ""


def _able(stock: Mapping[str, Paired]) -> tuple[list[str], list[str]]:
    """Columns that say something, and what is to be said of the others."""
    able = [name for name, one in stock.items() if one.right >= HALF * one.asked]
    return able, [
        f"left out: {name}, of which dense attention itself gets {one.right} of {one.asked} right"
        for name, one in stock.items()
        if name not in able
    ]


@frozen
class _Turn:
    """One contender's chunks of one place, of several texts."""

    contender: Contender
    name: str
    chunks: tuple[Chunk, ...]
    stock: tuple[Chunk, ...]
    error: str = ""

    @property
    def scores(self) -> dict[str, Paired]:
        own = self.contender.pipeline is None
        pairs = zip(self.chunks, self.stock, strict=True)
        return summed([Paired.by_column(mine.scores, None if own else dense.scores) for mine, dense in pairs])

    @property
    def divergence(self) -> Divergence | None:
        known = [one.divergence for one in self.chunks if one.divergence is not None]
        return pooled(known) if known else None

    @property
    def seconds(self) -> float:
        return fmean(one.seconds for one in self.chunks)

    @property
    def speed_up(self) -> float:
        return sum(one.seconds for one in self.stock) / sum(one.seconds for one in self.chunks)


def agents_table(runs: Sequence[Run], title: str = "") -> Table:
    """One row for each contender and chunk; what dense itself cannot do is left out, and a remark says so."""
    groups = _grouped(runs)
    stock = {one.text: one for one in groups[0]}
    rows = []
    for group in groups:
        done = [one for one in group if not one.error]
        broken = [one.error for one in group if one.error]
        if broken:
            rows.append(_Turn(group[0].contender, "", (), (), broken[0]))
        for index in range(len(done[0].chunks) if done and not broken else 0):
            chunks = tuple(one.chunks[index] for one in done)
            dense = tuple(stock[one.text].chunks[index] for one in done)
            rows.append(_Turn(group[0].contender, str(index or "prefix"), chunks, dense))
    scores = summed([one.scores for one in rows if one.contender.pipeline is None])
    able, unable = _able({name: one for name, one in scores.items() if one.asked})

    def apart(head: str, figure: Callable[[Divergence], str]) -> Column[_Turn]:
        return Column(head, lambda one: "" if one.divergence is None else figure(one.divergence))

    columns: list[Column[_Turn]] = [
        Column("method", lambda one: _named(one.contender), words=True),
        Column("turn", lambda one: one.name, words=True),
        *(Column(name, _cell(name)) for name in able),
        apart("KL", lambda found: small(found.kl)),
        apart("99 %", lambda found: small(found.high)),
        apart("NLL", lambda found: f"{found.nll_ratio:.3f}"),
        Column("density", lambda one: f"{fmean(each.density for each in one.chunks):.1%}"),
        Column("seconds", lambda one: f"{one.seconds:.3f}"),
        Column("speed-up", lambda one: f"{one.speed_up:.2f}"),
    ]
    head = f"agents: {len(stock)} texts{title}"
    remarks = [*unable, *_remarks(runs)]
    return Table.of(columns, rows, lambda one: one.error, title=head, drop=DROP, remarks=remarks, notes=AGENTS)


def _grouped(items: Sequence[Any]) -> list[list[Any]]:
    """By contender, in the order in which they came; dense comes first."""
    made: dict[str, list[Any]] = {}
    for one in items:
        made.setdefault(_named(one.contender), []).append(one)
    return list(made.values())


def _named(contender: Contender) -> str:
    """With its settings, since a method may run with several."""
    return f"{contender.label} {worded(contender.parameters, '')}".strip()


def _remarks(items: Sequence[Played] | Sequence[Run]) -> list[str]:
    """What stopped whom, and whose layers ran dense."""
    made: dict[str, None] = {}
    for one in items:
        if one.error:
            made[f"{_named(one.contender)} failed on {one.text}: {one.error}"] = None
    why: Counter[tuple[str, str]] = Counter()
    for one in items:
        why.update({(_named(one.contender), reason): count for reason, count in one.reasons.items()})
    return [*made, *(f"{who} ran dense in {count} calls of a layer: {reason}" for (who, reason), count in why.items())]


def _who(one: Played | Run) -> dict[str, Any]:
    return {
        **{"text": one.text, "method": one.contender.name, "parameters": dict(one.contender.parameters)},
        **{"dense": one.contender.pipeline is None, "error": one.error or None, "reasons": dict(one.reasons)},
    }


def _played(one: Played, dense: Scores | None) -> dict[str, Any]:
    scores = _answers(one.scores, dense)
    figures = {} if one.error else {"tokens": one.tokens, "density": one.density, "scores": scores}
    return {"task": one.task, **_who(one), **figures}


def _run(one: Run, dense: Run | None) -> dict[str, Any]:
    chunks = [None] * len(one.chunks) if dense is None else dense.chunks
    return {**_who(one), "chunks": [_chunk(mine, own) for mine, own in zip(one.chunks, chunks, strict=True)]}


def _answers(scores: Scores, dense: Scores | None) -> dict[str, Any]:
    """Counts by column, and every answer: 1 for a right one."""
    paired = Paired.by_column(scores, dense)
    return {
        name: {**asdict(paired[name]), "answers": "".join("01"[one] for one in mine)} for name, mine in scores.items()
    }


def _chunk(one: Chunk, dense: Chunk | None) -> dict[str, Any]:
    return {
        **_answers(one.scores, None if dense is None else dense.scores),
        **({} if one.divergence is None else one.divergence.figures),
        **{"density": one.density, "seconds": one.seconds},
    }
