"""What `compare` and `demo` report: the table, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from sparseprefill import __version__

from ..evaluation.divergence import Divergence
from ..evaluation.outcome import Outcome, Summary
from ..evaluation.reading import Sizes
from . import render

NOTES = (
    "KL, worst, same: KL(dense || sparse) of the next token in nats, mean and largest, and the share of rows where "
    "both choose the same token; over the prompt's last {last} rows, the {tail} tokens that follow and {greedy} tokens "
    "of dense attention's own continuation. parts: greedy tokens until sparse would have chosen another (median). "
    "recall: share of the attention mass kept, mean over layers, heads and {rows} rows; lowest: lowest head recall, "
    "over these or the last rows. density: pairs computed / causal pairs. prefill: time of one forward pass, without "
    "the measuring; speed-up: the stock model's time in this run / this time."
)
DROP = ("parts", "worst", "extra", "same", "recall", "prefill", "density", "KL", "lowest")
"""Columns that a narrow terminal leaves out, in this order."""
ANSWERS = (
    "answers: right values / values asked; the same method reads each question, and dense attention decodes greedily."
)
ON_CPU = (
    "On a CPU, PyTorch's own fused attention runs over the keys that a method selects. On a GPU the speed-up is "
    "different."
)


def as_table(found: Sequence[Outcome], title: str, sizes: Sizes, on_cpu: bool) -> None:
    """Print the table, what failed or ran dense, and what the columns mean."""
    rows = summaries(found, sizes)
    heads, lines = columns(rows)
    notes = [*([ANSWERS] if "answers" in heads else []), NOTES.format(**asdict(sizes)), *([ON_CPU] if on_cpu else [])]
    render.figures(title, heads, lines, [*failures(rows), *_dense_layers(found)], " ".join(notes), drop=DROP)


def as_json(found: Sequence[Outcome], facts: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Everything that was measured."""
    rows = summaries(found, sizes)
    return {
        "version": __version__,
        **facts,
        "sizes": asdict(sizes),
        "methods": [_summary(one, rows[0]) for one in rows],
        "outcomes": [_facts(one) for one in found],
    }


def summaries(found: Sequence[Outcome], sizes: Sizes) -> list[Summary]:
    """One summary a contender; the first is the stock model."""
    from ..evaluation.runs import summaries

    return summaries(found, sizes.greedy)


def speed_up(one: Summary, stock: Summary) -> float | None:
    """Stock's prefill time over the contender's, of the prompts that it read; None where it read fewer."""
    return stock.seconds / one.seconds if one.seconds and one.prompts == stock.prompts else None


def columns(rows: Sequence[Summary]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Heads of the table's columns, and a line for each contender that read a prompt. The first is the stock model."""
    asked, extra = any(one.answers[1] for one in rows), any(one.extra_bytes is not None for one in rows)
    heads = ["method", *(["answers"] if asked else []), "KL", "worst", "same", "parts", "recall", "lowest"]
    heads += ["density", "prefill", "speed-up", *(["extra"] if extra else [])]
    return heads, [_row(one, rows[0], asked, extra) for one in rows if one.prompts]


def _row(one: Summary, stock: Summary, asked: bool, extra: bool) -> tuple[str, ...]:
    found, times = one.divergence, speed_up(one, stock)
    distance = ("", "", "", "")
    if found is not None:
        parted = "" if one.parted is None else f"{one.parted:.0f}"
        distance = (_small(found.kl), _small(found.worst), f"{found.agreement:.1%}", parted)
    return (
        one.contender.label,
        *([f"{one.answers[0]} / {one.answers[1]}"] if asked else []),
        *distance,
        f"{one.recall:.1%}",
        f"{min(one.lowest, one.last_lowest):.1%}",
        f"{one.density:.1%}",
        f"{one.seconds / max(1, one.prompts):.2f} s",
        "" if times is None else f"{times:.2f}",
        *(["" if one.extra_bytes is None else f"{one.extra_bytes / 2**20:,.0f} MiB"] if extra else []),
    )


def _small(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.1f}"


def failures(rows: Sequence[Summary]) -> list[str]:
    """What stopped whom on which prompts."""
    made = []
    for one in rows:
        reasons = dict[str, list[str]]()
        for prompt, reason in one.failed.items():
            reasons.setdefault(reason, []).append(prompt)
        made += [f"{one.contender.label} failed on {', '.join(where)}: {why}" for why, where in reasons.items()]
    return made


def _dense_layers(found: Sequence[Outcome]) -> list[str]:
    reasons: dict[tuple[str, str], set[int]] = {}
    for outcome in found:
        for layer in outcome.layers:
            if layer.reason:
                reasons.setdefault((outcome.contender.label, layer.reason), set()).add(layer.index)
    return [
        f"{label}: dense in layers {', '.join(map(str, sorted(layers)))}: {reason}"
        for (label, reason), layers in reasons.items()
    ]


def _summary(one: Summary, stock: Summary) -> dict[str, Any]:
    return {
        "method": one.contender.name,
        "parameters": dict(one.contender.parameters),
        "prompts": one.prompts,
        "failed": dict(one.failed),
        **_divergence(one.divergence),
        "perplexity_ratio": one.perplexity_ratio,
        "parted": one.parted,
        "recall": {"mean": one.recall, "p5": one.p5, "lowest": one.lowest},
        "last_rows_recall": {"mean": one.last_recall, "p5": one.last_p5, "lowest": one.last_lowest},
        "density": one.density,
        "seconds": one.seconds,
        "speed_up": speed_up(one, stock),
        "extra_bytes": one.extra_bytes,
        "right": one.answers[0],
        "asked": one.answers[1],
    }


def _divergence(found: Divergence | None) -> dict[str, Any]:
    return {"kl": None, "worst_kl": None, "agreement": None} if found is None else {
        "kl": found.kl, "worst_kl": found.worst, "agreement": found.agreement,
    }  # fmt: skip


def _facts(outcome: Outcome) -> dict[str, Any]:
    facts: dict[str, Any] = {"method": outcome.contender.name, "prompt": outcome.prompt, "error": outcome.error or None}
    if outcome.error:
        return facts
    fidelity = outcome.fidelity
    return facts | {
        "tokens": outcome.tokens,
        "fidelity": None if fidelity is None else asdict(fidelity),
        "seconds": outcome.seconds,
        "extra_bytes": outcome.extra_bytes,
        "density": outcome.density,
        "families": {name: {"right": right, "asked": asked} for name, (right, asked) in outcome.answers.items()},
        "layers": [asdict(layer, filter=lambda attribute, _: attribute.name != "lowest") for layer in outcome.layers],
        "notes": dict(outcome.notes),
    }
