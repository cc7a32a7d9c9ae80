"""What the scoreboard says, as plain data, as cells of a table and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import asdict
from sparseprefill.adapters.cli.render import Table

from lab.files import grid

from .peers import Peer
from .scoreboard import Score

COLUMNS = ("kernel", "mask", "density", "ms", "TFLOP/s", "efficiency", "plan, ms", "off")
FEATURES = ("kernel", "causal", "GQA", "paged", "LSE", "stripes", "fp8", "waits")


def fact(score: Score) -> dict[str, Any]:
    """One score: sizes and figures; seconds."""
    sizes = {"kernel": score.kernel, "mask": score.mask, **asdict(score.shape)}
    said = {"refused": score.refused or None, "error": score.error or None, "off": score.off}
    if not score.counts:
        return sizes | said
    return {
        **sizes,
        **said,
        **{"seconds": score.seconds, "dense_seconds": score.dense, "baseline": score.baseline},
        **{"density": score.density, "flops": score.flops, "efficiency": score.efficiency},
        **{"plan_seconds": score.plan, "syncs": score.syncs},
    }


def features(peers: Iterable[Peer], scores: Sequence[Score], device: torch.device) -> list[dict[str, Any]]:
    """What each kernel can do, how to get it, and why it is not here, if so."""
    return [
        {
            "kernel": peer.name,
            **asdict(peer.features),
            "syncs": _most_waits(peer, scores),
            "missing": peer.missing(device) or None,
            "install": peer.install or None,
        }
        for peer in here(peers, device)
    ]


def cells(score: Score) -> tuple[str, ...]:
    """One row of a table of `COLUMNS`."""
    off = "" if score.off is None else f"{score.off:.1e}"
    if not score.counts:
        return score.kernel, score.mask, "", "off" if score.off is not None else "failed", "", "", "", off
    return (
        score.kernel,
        score.mask,
        f"{score.density:.3f}",
        f"{score.seconds * 1e3:.2f}",
        f"{score.flops / 1e12:.3g}",
        f"{score.efficiency:.2f}",
        "" if score.plan is None else f"{score.plan * 1e3:.2f}",
        off,
    )


def shown(scores: Iterable[Score]) -> list[Score]:
    """Those that belong into a table: a kernel that does not take a mask has no row."""
    return [score for score in scores if not score.refused]


def by_length(scores: Iterable[Score]) -> list[list[Score]]:
    """Scores of one shape together, in the order of their coming."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(title(score), []).append(score)
    return list(found.values())


def title(score: Score) -> str:
    """What the scores of one table have in common."""
    return f"{score.shape.length:,} tokens, {score.shape}, inputs random"


def remarks(scores: Sequence[Score]) -> Iterator[str]:
    """The yardstick of a table and its times; what was refused or went wrong, once for each reason."""
    times = [score.dense * 1e3 for score in scores if score.counts and score.dense]
    kernel = next((score.baseline for score in scores if score.counts), "")
    if kernel:
        span = f"{min(times):.2f}" if min(times) == max(times) else f"{min(times):.2f} to {max(times):.2f}"
        yield f"fastest dense ({kernel}): {span} ms beside the rows"
    for word, attribute in (("does not take", "refused"), ("failed on", "error")):
        reasons: dict[tuple[str, str], list[str]] = {}
        for score in scores:
            if reason := getattr(score, attribute):
                reasons.setdefault((score.kernel, reason), []).append(score.mask)
        for (name, reason), masks in reasons.items():
            yield f"{name} {word} {', '.join(masks)}: {reason}"


def feature_cells(peers: Iterable[Peer], scores: Sequence[Score], device: torch.device) -> list[tuple[str, ...]]:
    """Rows of a table of `FEATURES`."""
    rows: list[tuple[str, ...]] = []
    for peer in here(peers, device):
        can, waits = peer.features, _most_waits(peer, scores)
        told = "" if waits is None else str(waits)
        rows.append((peer.name, can.causal, can.gqa, can.paged, can.lse, can.stripes, can.fp8, told))
    return rows


def here(peers: Iterable[Peer], device: torch.device) -> list[Peer]:
    """Those that matter on a device: what stands in for a GPU's kernels on a CPU does not on a GPU."""
    return [peer for peer in peers if peer.device != "cpu" or device.type == "cpu"]


def absent(peers: Iterable[Peer], device: torch.device) -> list[str]:
    """A line for each way to install kernels that are not here, with their names and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for peer in peers:
        reason = peer.missing(device)
        if reason and (peer.install or peer.device == device.type):
            found.setdefault((reason, peer.install), []).append(peer.name)
    return [
        f"not here: {', '.join(names)} ({reason})" + (f": {install}" if install else "")
        for (reason, install), names in found.items()
    ]


def markdown(scores: Sequence[Score], peers: Sequence[Peer], device: torch.device) -> str:
    """Tables for docs/benchmarks.md."""
    lines: list[str] = []
    for group in by_length(scores):
        lines += [f"### {title(group[0])}", "", *grid(Table(heads=COLUMNS, rows=[*map(cells, shown(group))])), ""]
        lines += [*(f"- {text}" for text in remarks(group)), ""]
    lines += ["### Features", "", *grid(Table(heads=FEATURES, rows=feature_cells(peers, scores, device))), ""]
    lines += [f"- {text}" for text in absent(peers, device)]
    return "\n".join([*lines, ""])


def _most_waits(peer: Peer, scores: Sequence[Score]) -> int | None:
    waits = [score.syncs for score in scores if score.kernel == peer.name and score.syncs is not None]
    return max(waits, default=None)
