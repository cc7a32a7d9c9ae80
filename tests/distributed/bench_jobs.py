"""What the processes of the benchmark's tests do: rows that work, that fail together, and that fail on a rank alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attrs import evolve
from sparseprefill.adapters.star import RankError, ranks

from helpers.patience import patient
from lab.bench.clock import Run
from lab.star import layer, model
from lab.star.run import Rows
from lab.star.table import Table

CPU = torch.device("cpu")
LONG = patient(60)
SHAPE = layer.LayerShape(heads=4, kv_heads=2, head_dim=64, dtype="float32", device=CPU)
SMALL = evolve(model.SHAPE, hidden=256, inner=128, heads=2, kv_heads=1)


def nothing() -> Run:
    """A row that does nothing."""
    return lambda: None


def refuses() -> Run:
    """A row that cannot be made."""
    raise MemoryError("no room for this row")


def stumbles(on: int, here: ranks.Ranks) -> Run:
    """A row that fails on a rank; the others meet in a collective first."""

    def run() -> None:
        if here.rank == on:
            raise MemoryError("no room in this row")
        here.gather(torch.zeros(1))

    return run


def table(path: str, seconds: float = 5 * LONG, wanted: str = "") -> Table:
    """The table of all processes."""
    return Table(ranks.Ranks(timeout=LONG), CPU, seconds, path=Path(path), wanted=wanted)


def survives(rank: int, path: str) -> int:
    """Rows that fail in step, between others."""
    made = table(path)
    made.row(1, "first", nothing, base="first")
    made.row(1, "refused everywhere", refuses)
    made.row(1, "refused by one", refuses if rank else nothing)
    made.row(1, "stumbles everywhere", partial(stumbles, rank, made.ranks))
    made.row(1, "last", nothing, against="first")
    made.close()
    return made.ranks.begun


def ends(rank: int, path: str) -> str:
    """A row that fails on rank 1 while rank 0 waits for it."""
    before, ranks.PATIENCE = ranks.PATIENCE, patient(1.0)
    made = table(path)
    made.row(1, "first", nothing)
    try:
        made.row(1, "stumbles", partial(stumbles, 1, made.ranks))
    except RankError as error:
        return str(error)
    finally:
        made.close()
        ranks.PATIENCE = before
    return "went on"


def chosen(rank: int, path: str) -> None:
    """Rows by name, and rows that come too late."""
    made = table(path, wanted="^a")
    made.row(1, "a", nothing)
    made.row(1, "b", nothing)
    made.close()


def every(rank: int, path: str) -> list[str]:
    """Each kind of row but the ring's, which PyTorch has on GPUs alone."""
    made, tokens = table(path), 512
    before, model.SHAPE = model.SHAPE, SMALL
    rows = Rows(made, SHAPE, None, [tokens])
    for inside in ("", "pieces", "streaming"):
        rows.star(tokens, rows.quarter(tokens), inside)
    rows.decode(tokens, graphs=False)
    kinds: dict[str, Callable[[], Run]] = {
        "dense": lambda: layer.one_gpu(SHAPE, tokens),
        "layers, dense": lambda: model.dense(CPU, tokens),
        "layers, star": lambda: model.star(CPU, tokens, 128, "streaming", LONG),
        "layers, dense decode": lambda: model.decode_dense(CPU, 64),
        "layers, star decode": lambda: model.decode_star(CPU, tokens, LONG),
    }
    for name, make in kinds.items():
        made.row(tokens, name, make, rounds=0)
    made.close()
    model.SHAPE = before
    return list(kinds)
