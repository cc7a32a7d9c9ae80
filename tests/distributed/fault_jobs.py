"""What the processes of the fault tests do: one of them dies, stalls, fails or was given something else."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sparseprefill.adapters.star import RankError, Star, ranks

from distributed.models import build, device, tokens

ranks.GRACE = 1.0  # of three seconds, so that the tests take less
SIZES: dict[str, Any] = {"block_size": 48, "tile": 16}


def at_layer(model: Any, layer: int, what: Any, after: int = 0) -> None:
    """Call `what` when a layer has run `after` times more."""
    left = [after]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            what()

    model.model.layers[layer].register_forward_pre_hook(hook)


def ends(rank: int, who: int, how: int, phase: int, timeout: float) -> str:
    """Rank `who` gets the signal `how` in phase 1, or after three tokens of phase 2; the others' error."""
    model = build()
    if device().type == "cuda":  # compiling counts as a stall, if the timeout is shorter
        Star(model, timeout=60, **SIZES).encode([tokens(200)]).generate([tokens(9, 5)], max_new_tokens=3)
    star = Star(model, timeout=timeout, **SIZES)
    if phase == 1 and rank == who:
        at_layer(model, 1, lambda: os.kill(os.getpid(), how))
    try:
        context = star.encode([tokens(200)])
        if rank == who:
            at_layer(model, 1, lambda: os.kill(os.getpid(), how), after=3)
        context.generate([tokens(9, 5)], max_new_tokens=20, do_sample=False)
    except RankError as error:
        return str(error)
    return "went on"


def noted(rank: int, who: int, how: int, folder: str, timeout: float) -> str:
    """As `ends` in phase 2, with files of what `Watch` logs and of when it happened. how: 0 stalls the main thread."""
    logging.getLogger("sparseprefill.adapters.star.watch").addHandler(logging.FileHandler(f"{folder}/log{rank}"))
    before = os.kill

    def fault(process: int, number: int) -> None:
        Path(folder, "when").write_text(str(time.time()))
        before(process, number) if number else time.sleep(1000)

    os.kill = fault
    return ends(rank, who, how, 2, timeout)


def fails(rank: int, who: int, memory: bool) -> list[str]:
    """Rank `who` raises in phase 1; what every rank is told, there and when it tries again."""
    model = build()
    star = Star(model, timeout=20, **SIZES)

    def failure() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB") if memory else KeyError("lost")

    if rank == who:
        at_layer(model, 1, failure)
    told = []
    for _ in range(2):
        try:
            star.encode([tokens(200)])
        except RankError as error:
            told.append(str(error))
    return told


def differs(rank: int, what: str) -> str:
    """Rank 1 is given something else; what every rank is told."""
    sizes, seed, context, question, options = dict(SIZES), 0, tokens(200), tokens(9, 5), {"max_new_tokens": 3}
    if rank == 1:
        if what == "sizes":
            sizes["block_size"] = 32
        elif what == "weights":
            seed = 1
        elif what == "contexts":
            context[100] += 1
        elif what == "questions":
            question[0] += 1
        elif what == "options":
            options = {"max_new_tokens": 4}
        elif what == "inner":
            sizes["inner"] = "streaming"
    try:
        Star(build(seed=seed), timeout=20, **sizes).encode([context]).generate([question], do_sample=False, **options)
    except RankError as error:
        return str(error)
    return "went on"


def late(rank: int) -> str:
    """Rank 1 never makes its Star."""
    if rank == 1:
        signal.pause()
    try:
        Star(build(), timeout=1, **SIZES)
    except RankError as error:
        return str(error)
    return "went on"


def works(rank: int) -> int:
    """A second group after the first, and the model is its own again."""
    model = build()
    ids = torch.tensor([tokens(30)])
    with torch.no_grad():
        before = model(ids).logits
        for _ in range(2):
            context = Star(model, timeout=20, **SIZES).encode([tokens(200)])
            context.generate([tokens(9, 5)], max_new_tokens=3, do_sample=False)
        after = model(ids).logits
    dist.barrier()
    return int(torch.equal(before, after))
