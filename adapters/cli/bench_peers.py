"""`bench --peers`: our executor beside other people's kernels, and the tables of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench import facts, score_tables
from ..bench.clock import Clock
from ..bench.peers import OURS
from ..bench.scoreboard import Score, Scoreboard
from . import render
from .bench_options import Files, Wanted
from .files import write
from .group import CommandError
from .kept import Stop
from .progress import bars
from .setup import Place

HEADS = ("kernel", "mask", "density", "ms", "TFLOP/s", "eff.", "plan", "off")
DROP = ("off", "plan", "TFLOP/s", "density")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "ms: median time, by the device's clock. TFLOP/s: counts the pairs that the mask selects. eff.: density x the "
    "fastest dense kernel's time / time, that is pairs per second as a share of that kernel's. plan: ms that a kernel "
    "needs to make its lists from the mask's maps, not part of ms. off: difference of 128 output rows from attention "
    "in float32, as a share of the norm."
)
ON_CPU = (
    "These are times on a CPU, where FlexAttention runs uncompiled and computes every pair. They say nothing about the "
    "kernels, which need a GPU."
)
FEATURES = (
    "causal, by tile: the kernel cannot leave out pairs inside a tile. fp8: the kernel computes in fp8; caches: it "
    "only reads keys and values in fp8. waits: how often planning and one run waited for the device."
)


def peers(wanted: Wanted, place: Place, files: Files, clock: Clock, seed: int) -> bool:
    """Measure every kernel that is here; whether ours failed on any mask."""
    if files.plot is not None:
        raise CommandError("--plot cannot be combined with --peers; leave one of them out")
    masks, shapes = wanted.scoreboard(place.device.type)
    board = Scoreboard(clock, masks, seed)
    scores: list[Score] = []
    with bars(board.steps * len(shapes)) as shown, place.threaded(), Stop() as stop:
        for shape in shapes:
            turn: list[Any] = []

            def step(name: str, length: int = shape.length, turn: list[Any] = turn) -> None:
                _next(turn, shown.contender(f"{name}, {length:,} tokens"))

            try:
                scores += board.run(shape, step)
            finally:
                _next(turn)
    stop.check(len(scores))
    _write(scores, board, place, files, clock, seed)
    stop.end(len({score.shape for score in scores}), len(shapes), "lengths")
    return any(score.error or score.refused for score in scores if score.kernel == OURS)


def _next(turn: list[Any], context: Any = None) -> None:
    """Ends the bar of one kernel and begins another's."""
    if turn:
        turn.pop().__exit__(None, None, None)
    if context is not None:
        context.__enter__()("measuring", 0, 1)
        turn.append(context)


def _write(scores: Sequence[Score], board: Scoreboard, place: Place, files: Files, clock: Clock, seed: int) -> None:
    device = place.device
    if files.markdown is not None:
        write("--markdown", files.markdown, score_tables.markdown(scores, board.peers, device))
    if files.json is not None:
        found = facts.about(
            device,
            seed=seed,
            rounds=clock.rounds,
            scores=[score_tables.fact(score) for score in scores],
            peers=score_tables.features(board.peers, scores, device),
        )
        if files.alone:
            render.write_json(found)
            return
        write("--json", files.json, render.to_json(found) + "\n")
    for group in score_tables.by_length(scores):
        rows = map(score_tables.cells, score_tables.shown(group))
        render.figures(score_tables.title(group[0]), HEADS, rows, score_tables.remarks(group), drop=DROP)
    render.line(NOTES + (f" {ON_CPU}" if device.type == "cpu" else ""), style="dim")
    features = score_tables.feature_cells(board.peers, scores, device)
    absent = score_tables.absent(board.peers, device)
    render.figures("features on Hopper", score_tables.FEATURES, features, absent, FEATURES)
    for path in (files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")
