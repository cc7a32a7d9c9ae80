"""The report of `compare` and `demo`: a table, and the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from attrs import NOTHING, asdict, evolve, fields_dict

from sparseprefill import __version__
from sparseprefill.registry import default_registry

from ..evaluation.outcome import Contender, Outcome, Summary, summaries, unsteady
from ..evaluation.reading import APART, Sizes, inside_rows
from . import render
from .catalog import worded
from .options import DENSE
from .render import Column, Item, Table
from .setup import Place

NOTES = (
    "KL, 99 %, NLL, same: KL(dense || sparse) of the next token in nats, its mean and 99th percentile, the text's own "
    "negative log-likelihood over dense's, and the share of rows where both choose the same token, over {inside}. end "
    "KL: the mean over the prompt's last {last} rows, the {tail} tokens that follow and {greedy} tokens of dense "
    "attention's own continuation. recall: share of the attention mass kept, mean over layers, heads and {sampled} "
    "rows; rows: 1st percentile of these rows; lowest: lowest mean of a head, over these or the last rows. density: "
    "pairs computed / causal pairs. prefill: time of one forward pass, without the measuring; speed-up: the stock "
    "model's time {when} / this time."
)
DROP = ("extra", "prefill", "same", "end KL", "rows", "lowest", "NLL", "recall", "99 %", "density", "KL")
"""Columns that a narrow terminal leaves out, in this order."""
COPIED = (
    "copies: tokens of passages that are restated far below, on which the likeliest token is right. facts count as "
    "answers inside. "
)
ROUNDING = "dense: every key, by this library's kernel instead of the model's: what 16 bits alone change. "
ANSWERS = (
    "inside: answers inside the prompt, which rows before its last {apart} must find / dense's. end: values right / "
    "asked behind the prompt, where the dense tail helps; dense attention decodes greedily."
)
TOO_SHORT = (
    "no answers inside the prompt: it is too short for rows that look back beyond a window of 1,024 tokens; pass "
    "--tokens 4096 or more"
)
ON_CPU = (
    "On a CPU, PyTorch's own fused attention runs over the keys that a method selects. On a GPU the speed-up is "
    "different."
)
MEASURED: Mapping[str, Callable[[Summary], str]] = {
    "copies": lambda one: right_of((one.copies.right, one.copies.asked)),
    "inside": lambda one: right_of(one.answers_inside),
    "end": lambda one: right_of(one.answers),
    "KL": lambda one: "" if one.inside is None else small(one.inside.kl),
    "99 %": lambda one: "" if one.inside is None else small(one.inside.high),
    "NLL": lambda one: ratio(one.inside.nll_ratio) if one.inside is not None else "",
    "same": lambda one: "" if one.inside is None else f"{one.inside.agreement:.1%}",
    "end KL": lambda one: "" if one.end is None else small(one.end.kl),
    "recall": lambda one: f"{one.recall:.1%}",
    "rows": lambda one: f"{one.row_p1:.1%}",
    "lowest": lambda one: f"{min(one.lowest, one.last_lowest):.1%}",
    "density": lambda one: f"{one.density:.1%}",
    "prefill": lambda one: f"{one.seconds / max(1, one.prompts):.2f} s",
}
"""Columns of every table of what methods do to a model, and what each says of a contender."""


def measured(summary: Callable[[Item], Summary], without: Sequence[str] = ()) -> list[Column[Item]]:
    """The columns of `MEASURED` but some, for items that have a summary."""
    heads = [head for head in MEASURED if head not in without]
    return [Column(head, lambda item, cell=MEASURED[head]: cell(summary(item))) for head in heads]  # type: ignore[misc]


def ratio(value: float) -> str:
    """A ratio; nothing where it is not known."""
    return "" if value != value else f"{value:.3f}"


def right_of(answers: tuple[int, int]) -> str:
    """Right and asked; nothing where nothing was asked."""
    return f"{answers[0]} / {answers[1]}" if answers[1] else ""


def line_of(found: Sequence[Outcome], sizes: Sizes) -> str:
    """The last of some outcomes in one line, for those who wait."""
    last = found[-1]
    if last.error:
        return f"{last.contender.label} failed: {last.error}"
    one = summaries([found[0], last] if last is not found[0] else [last], sizes.greedy)[-1]
    heads = [head for head in ("copies", "inside", "end", "KL", "prefill") if MEASURED[head](one)]
    return f"{last.contender.label}: {', '.join(f'{head} {MEASURED[head](one)}' for head in heads)}"


def report(
    found: Sequence[Outcome],
    sizes: Sizes,
    place: Place,
    title: str,
    facts: Mapping[str, Any],
    files: Mapping[str, Path | None],
    *,
    json: bool,
) -> None:
    """Print the table, what failed or ran dense, what the columns mean and which files there are; or all as JSON."""
    rows = summaries(found, sizes.greedy)
    if json:
        render.write_json(
            {
                "version": __version__,
                **facts,
                "sizes": asdict(sizes),
                "methods": [_summary(one, rows[0]) for one in rows],
                "outcomes": [_facts(one) for one in found],
            }
        )
        return
    table = table_of(rows, sizes, title)
    short = [TOO_SHORT] if "end" in table.heads and "inside" not in table.heads else []
    beware = f" {ON_CPU}" if place.device.type == "cpu" else ""
    render.show(evolve(table, remarks=[*short, *table.remarks, *_dense_layers(found)], notes=f"{table.notes}{beware}"))
    for what, path in files.items():
        if path is not None:
            render.line(f"{what}: {path}", whole=True)


def table_of(rows: Sequence[Summary], sizes: Sizes, title: str = "") -> Table:
    """A line for each contender that read a prompt, with what failed and what the columns mean.

    rows: the first is the stock model.
    """
    doubt = _doubt(rows)

    def times(one: Summary) -> str:
        found = one.speed_up(rows[0])
        return "" if found is None else "?" if doubt else f"{found:.2f}"

    columns: list[Column[Summary]] = [
        Column("method", lambda one: one.contender.label),
        Column("setting", lambda one: _changed(one.contender), words=True),
        *measured(lambda one: one),
        Column("speed-up", times),
        Column("extra", lambda one: "" if one.extra_bytes is None else f"{one.extra_bytes / 2**20:,.0f} MiB"),
    ]
    stock = rows[0]
    parts = [COPIED] if stock.copies.asked else []
    parts += [f"{ANSWERS} "] if stock.answers[1] else []
    parts += [ROUNDING] if any(one.contender.name == DENSE for one in rows[1:]) else []
    when = "right before or behind it" if sizes.beside else "in this run"
    notes = "".join([*parts, NOTES]).format(
        **{**asdict(sizes), "apart": APART, "when": when, **_looked_at(rows, sizes)}
    )
    remarks = [*([doubt] if doubt else []), *_failures(rows), *cannot(rows)]
    read = [one for one in rows if one.prompts]
    return Table.of(columns, read, title=title, drop=DROP, remarks=remarks, notes=notes)


def _doubt(rows: Sequence[Summary]) -> str:
    """Reason for which the times mean little, by the stock model's own on each prompt; empty where they do not, or
    where it was timed once."""
    for stock in rows[0].each:
        again = [one.beside for row in rows for one in row.each if one.prompt == stock.prompt]
        said = unsteady([stock.seconds, *(one for one in again if one is not None)])
        if said:
            return said
    return ""


def _changed(contender: Contender) -> str:
    """The parameters that are not the method's defaults; of a file its name alone."""
    methods = default_registry().methods()
    usual = methods[contender.name].config if contender.name in methods else None
    defaults = {} if usual is None else {str(one.alias): one.default for one in fields_dict(usual).values()}
    files = {name: Path(value).name for name, value in contender.parameters.items() if isinstance(value, str)}
    given = {name: value for name, value in contender.parameters.items() if defaults.get(name, NOTHING) != value}
    return worded({**given, **{name: value for name, value in files.items() if name in given}}, "")


def _looked_at(rows: Sequence[Summary], sizes: Sizes) -> dict[str, str]:
    """Rows that were looked at in words, which short prompts have fewer of than were asked for."""
    lengths = max((one.lengths for one in rows), key=len)
    count = sum(ceil(inside_rows(one) / sizes.every) for one in lengths)
    each = "" if sizes.every == 1 else f", one in {sizes.every},"
    of = f" of {len(lengths)} prompts," if len(lengths) > 1 else ""
    where = f"the whole prompt but its last {APART}" if any(one > APART for one in lengths) else "the whole prompt"
    if lengths and min(lengths) <= APART < max(lengths):
        where += ", and over all of shorter ones"
    sampled = sorted({min(sizes.rows, one) for one in lengths} or {sizes.rows})
    return {
        "inside": f"the {count} rows{each}{of} of {where}",
        "sampled": " to ".join(map(str, dict.fromkeys((sampled[0], sampled[-1])))),
    }


def cannot(rows: Sequence[Summary]) -> list[str]:
    """Tasks that the model itself cannot do, so that the methods' answers say nothing."""
    stock, made = rows[0], []
    if stock.copies.asked and not stock.copies.telling:
        made.append(
            f"the model cannot copy: its own attention goes on rightly with {stock.copies.right} of "
            f"{stock.copies.asked} restated tokens, so what methods keep of them says little"
        )
    scores = (("inside the prompt", stock.answers_inside), ("behind the prompt", stock.answers))
    return made + [
        f"the model cannot do the task: its own attention gives none of {asked} answers {where}, so those of methods "
        "compare nothing. Take a model that answers such questions, or shorter texts (--tokens)"
        for where, (right, asked) in scores
        if asked and not right
    ]


def small(value: float) -> str:
    """A KL in nats."""
    return f"{value:.4f}" if value < 10 else f"{value:.1f}"


def _failures(rows: Sequence[Summary]) -> list[str]:
    """Errors, by contender and prompt."""
    made: dict[tuple[str, str], list[str]] = {}
    for one in rows:
        for prompt, reason in one.failed.items():
            made.setdefault((one.contender.label, reason), []).append(prompt)
    return [f"{label} failed on {', '.join(where)}: {why}" for (label, why), where in made.items()]


def _dense_layers(found: Sequence[Outcome]) -> list[str]:
    """Layers that ran dense, by contender, with their reasons."""
    made: dict[tuple[str, str], set[int]] = {}
    for outcome in found:
        for layer in outcome.layers:
            if layer.reason:
                made.setdefault((outcome.contender.label, layer.reason), set()).add(layer.index)
    return [f"{label}: dense in layers {', '.join(map(str, sorted(at)))}: {why}" for (label, why), at in made.items()]


def _summary(one: Summary, stock: Summary) -> dict[str, Any]:
    return {
        "method": one.contender.name,
        "parameters": dict(one.contender.parameters),
        "prompts": one.prompts,
        "failed": dict(one.failed),
        **one.places,
        "perplexity_ratio": one.perplexity_ratio,
        "parted": one.parted,
        "recall": {
            **{"mean": one.recall, "p5": one.p5, "lowest": one.lowest},
            **{"row_p1": one.row_p1, "row_lowest": one.row_lowest},
        },
        "last_rows_recall": {"mean": one.last_recall, "p5": one.last_p5, "lowest": one.last_lowest},
        "density": one.density,
        "seconds": one.seconds,
        "speed_up": one.speed_up(stock),
        "extra_bytes": one.extra_bytes,
    }


def _facts(outcome: Outcome) -> dict[str, Any]:
    facts: dict[str, Any] = {"method": outcome.contender.name, "prompt": outcome.prompt, "error": outcome.error or None}
    if outcome.error:
        return facts
    found = outcome.fidelity
    parts = () if found is None else ("inside", "last", "tail", "greedy")
    return facts | {
        "tokens": outcome.tokens,
        "fidelity": found and {**{name: getattr(found, name).figures for name in parts}, "parted": found.parted},
        "seconds": outcome.seconds,
        "beside_seconds": outcome.beside,
        "extra_bytes": outcome.extra_bytes,
        "density": outcome.density,
        "copies": outcome.copies and outcome.copies.figures,
        "inside": _families(outcome.inside),
        "families": _families(outcome.answers),
        "layers": [
            {
                **asdict(layer, filter=lambda part, _: part.name not in ("lowest", "rows")),
                "row_lowest": layer.row_lowest,
            }
            for layer in outcome.layers
        ],
        "notes": dict(outcome.notes),
    }


def _families(answers: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    return {name: {"right": right, "asked": asked} for name, (right, asked) in answers.items()}
