"""What the processes of the fault tests do: one of them dies, stalls, fails or was given something else.

Nothing here hangs on the pace of the machine: a fault happens when all other ranks wait in a collective, and a short
timeout counts from then on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from sparseprefill.adapters.star import Context, RankError, Star, ranks

import sparseprefill as sp
from distributed.models import build, device, tokens
from helpers.patience import patient
from sparseprefill.errors import ParameterError, SparsePrefillError

SIZES: dict[str, Any] = {"block_size": 48, "tile": 16}
LONG = patient(60)
"""Seconds that no rank waits for another, unless something is wrong."""
NEW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@contextmanager
def quick() -> Iterator[None]:
    """Ranks look at the store more often, and have a second to answer, of three: so the tests take less."""
    before = ranks.GRACE, ranks.POLL
    ranks.GRACE = patient(1.0)
    if device().type == "cpu":
        ranks.POLL = 0.05
    try:
        yield
    finally:
        ranks.GRACE, ranks.POLL = before


def told(run: Callable[[], Any]) -> str:
    """The RankError that a part raises."""
    try:
        run()
    except RankError as error:
        return str(error)
    return "went on"


def at_layer(model: Any, layer: int, what: Any, after: int = 0) -> None:
    """Call `what` when a layer has run `after` times more."""
    left = [after]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            what()

    model.model.layers[layer].register_forward_pre_hook(hook)


def when_others_wait(here: ranks.Ranks, who: int, fault: Callable[[], None], timeout: float) -> Callable[[], None]:
    """What rank `who` calls in the place of its fault: the fault, as soon as all others wait in a collective.

    timeout: of the others, from the fault on.
    """
    others = [f"waits/{rank}" for rank in range(here.size) if rank != who]
    wait, hear, waiting = here.wait, here.hear, [False]

    def waits(work: Any, x: Any) -> None:
        waiting[0] = True
        wait(work, x)
        waiting[0] = False

    def hears() -> None:
        if waiting[0] and here.store.check(["place"]):
            here.store.set(f"waits/{here.rank}", "")
            if here.store.check(["fault"]):
                here.timeout = timeout
        hear()

    if here.rank != who:
        here.wait, here.hear = waits, hears  # type: ignore[method-assign]

    def strike() -> None:
        here.store.set("place", "")
        while not here.store.check(others):
            time.sleep(0.01)
        here.store.set("fault", "")
        fault()

    return strike


def ends(rank: int, who: int, how: int, phase: int, timeout: float) -> str:
    """Rank `who` gets the signal `how` in phase 1, or after three tokens of phase 2; the others' error."""
    with quick():
        model = build()
        star = Star(model, timeout=LONG, **SIZES)
        strike = when_others_wait(star.ranks, who, lambda: os.kill(os.getpid(), how), timeout)

        def work() -> None:
            if phase == 1 and rank == who:
                at_layer(model, 1, strike)
            context = star.encode([tokens(200)])
            if rank == who:
                at_layer(model, 1, strike, after=3)
            context.generate([tokens(9, 5)], max_new_tokens=20, do_sample=False)

        return told(work)


def noted(rank: int, who: int, how: int, folder: str, timeout: float) -> str:
    """On GPUs, phase 2, with files of what `Watch` logs and of when it happened. how: 0 stalls the main thread."""
    logging.getLogger("sparseprefill.adapters.star.watch").addHandler(logging.FileHandler(f"{folder}/log{rank}"))

    def fault() -> None:
        Path(folder, "when").write_text(str(time.time()))
        os.kill(os.getpid(), how) if how else time.sleep(1000)

    with quick():
        model = build()
        # Compiling counts as a stall, if the timeout is shorter.
        Star(model, timeout=LONG, **SIZES).encode([tokens(200)]).generate([tokens(9, 5)], max_new_tokens=3)
        star = Star(model, timeout=timeout, **SIZES)

        def work() -> None:
            context = star.encode([tokens(200)])
            if rank == who:
                at_layer(model, 1, fault, after=3)
            context.generate([tokens(9, 5)], max_new_tokens=20, do_sample=False)

        return told(work)


def own_group() -> dist.ProcessGroup:
    """A group of all ranks for one job, so that what a fault breaks is its own."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)  # an integer only for a rank outside the group
    return group


def fails(rank: int, who: int, phase: int, memory: bool) -> list[str]:
    """Rank `who` raises in a phase; what every rank is told, there and when it tries again. In a group of its own."""
    model = build()
    star = Star(model, group=own_group(), timeout=LONG, **SIZES)

    def failure() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB") if memory else KeyError("lost")

    if phase == 1 and rank == who:
        at_layer(model, 1, failure)
    made: list[Context] = []

    def work() -> None:
        made[:] = made or [star.encode([tokens(200)])]
        if rank == who:
            at_layer(model, 1, failure)
        made[0].generate([tokens(9, 5)], **NEW)

    with quick():
        return [told(work), told(work)]


class Marked:
    """An estimator without a repr of its own: its address is in the one that it has."""

    def __init__(self, weight: float) -> None:
        self.keep, self.weights = build, torch.tensor([weight, 1.0, 2.0])

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        return sp.Plan(sp.SparseMask.full(call))


def marked(weight: float = 0.0) -> sp.Pipeline:
    """A pipeline of objects and functions that Python shows by their addresses."""
    return evolve(sp.build("dense"), estimator=Marked(weight))


def differs(rank: int, what: str) -> str:
    """Rank 1 is given something else; what every rank is told."""
    other = rank == 1
    sizes, context, question, options = dict(SIZES), tokens(200), tokens(9, 5), dict(NEW)
    layers = 1 if other and what == "model" else 2
    model = build(seed=int(other and what == "weights"), num_hidden_layers=layers)
    if what in ("same", "inner.estimator.weights"):
        sizes["inner"] = marked(float(other and what.endswith("weights")))
    if what == "same":
        options["logits_processor"] = [Plain()]
    if other:
        if what == "sizes":
            sizes["block_size"] = 32
        elif what == "dtype":
            model = model.double()
        elif what == "inner":
            sizes["inner"] = "streaming"
        elif what == "inner.estimator.window":
            sizes["inner"] = {"method": "streaming", "parameters": {"window": 64}}
        elif what == "contexts":
            context[100] += 1
        elif what == "questions":
            question[0] += 1
        elif what == "options.max_new_tokens":
            options["max_new_tokens"] = 4
        elif what == "generation_config":
            model.generation_config.max_new_tokens = 7
        elif what == "seed":
            options["seed"] = 1
    elif what == "inner.estimator.window":
        sizes["inner"] = "streaming"

    def work() -> None:
        held = Star(model, timeout=LONG + float(other and what == "timeout"), **sizes).encode([context])
        if what == "before":
            held.generate([question], **options)
            if other:
                held.rewind()
        if what == "the call" and other:
            held.logits([question])
        else:
            held.generate([question], **options)

    with quick():
        return told(work)


def refuses(rank: int, what: str) -> str:
    """Rank 1 is given something that it has to refuse, or for "all" both are; the error of every rank."""
    wrong, model, sizes = rank == 1, build(), dict(SIZES)
    changes: dict[str, Any] = {"block_size": -1, "inner": "nope"}
    if wrong and what in changes:
        sizes[what] = changes[what]
    if wrong and what == "training":
        model.train()

    def work() -> None:
        timeout: Any = "x" if wrong and what == "timeout" else LONG
        context = Star(model, timeout=timeout, **sizes).encode([[]] if wrong and what == "contexts" else [tokens(90)])
        if what == "logits":
            context.logits([[500 if wrong else 5]])
        question = [] if wrong and what == "questions" else tokens(9, 5)
        if what == "all":
            try:
                context.generate([question], num_beams=2, **NEW)
            except ParameterError as error:
                (answer,) = context.generate([question], **NEW)
                raise ParameterError(f"{str(error)[:14]}, then an answer of {len(answer)}") from error
        context.generate([question], num_beams=1 + int(wrong and what == "num_beams"), **NEW)

    try:
        work()
    except SparsePrefillError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


class Apart:
    """A criterion that ends row 1 after a token and row 0 after two on rank 0, and never on others."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return torch.tensor([self.calls == 2, self.calls == 1]) & (dist.get_rank() == 0)


def stops(rank: int) -> list[int]:
    """Lengths of two answers that end by a criterion which differs over the ranks."""
    context = Star(build(), timeout=LONG, **SIZES).encode([tokens(90), tokens(70)])
    answers = context.generate([[5], [6]], max_new_tokens=9, do_sample=False, stopping_criteria=[Apart()])
    return list(map(len, answers))


class Plain:
    """A processor of scores that changes none, and has no repr of its own."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


def late(rank: int) -> str:
    """The second rank never makes its Star."""
    if rank:
        return ""
    with quick():
        return told(lambda: Star(build(), timeout=1.0, **SIZES))


def poisoned(rank: int, who: int, where: str) -> list[str]:
    """Something in rank `who` makes NaN; what every rank is told in each phase, and when it tries again.

    where: in phase 1; in keys or values of the context, as they are read in each way; in the tail; in the scores.
    """
    from sparseprefill.adapters.star import exchange

    model, large = build(), exchange.LARGE
    made: list[Context] = []
    star = Star(model, group=own_group(), timeout=LONG, **SIZES)
    nan = torch.tensor(torch.nan)
    if where == "phase 1" and rank == who:
        model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda module, given, out: out * nan)
    if where == "rows merged by shares":
        exchange.LARGE = 0
    with quick():
        heard = [told(lambda: made.append(star.encode([tokens(200)])))]
        (context,) = made
        if rank == who:
            if where == "scores":
                model.lm_head.register_forward_hook(lambda module, given, out: out * nan)
            elif where == "tail":
                model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda module, given, out: out * nan)
            elif where != "phase 1":
                shard = context.phase.shards[1]
                (shard.k if where == "keys" else shard.v)[0, 0, 3, 2] = torch.nan
        asked = tokens(9, 5)
        reads = {"logits": lambda: context.logits([asked])}
        drawn = {"max_new_tokens": 3, "do_sample": where == "sampling"}
        heard.append(told(reads.get(where, lambda: context.generate([asked], **drawn))))
        heard.append(told(lambda: star.encode([tokens(200)])))
    exchange.LARGE = large
    return heard


def works(rank: int) -> int:
    """A second group after the first, and the model is its own again."""
    model = build()
    ids = torch.tensor([tokens(30)])
    with torch.no_grad():
        before = model(ids).logits
        for _ in range(2):
            Star(model, timeout=LONG, **SIZES).encode([tokens(200)]).generate([tokens(9, 5)], **NEW)
        after = model(ids).logits
    dist.barrier()
    return int(torch.equal(before, after))
