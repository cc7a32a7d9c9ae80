"""What the processes of the equality tests do: groups of 1 to 4 ranks in one world of 4 processes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sparseprefill.adapters.star import Context, Star, exchange

from distributed.models import CASES, NEW, QUESTIONS, Case, build, tokens
from helpers.patience import patient

RANKS = 4
PATIENT = patient(60)
ALL = range(1, RANKS + 1)
SOME = (1, 3)
"""Without an exchange, and with one of parts of unequal size."""
ROWS = (tokens(200), tokens(77, seed=3), tokens(140, seed=4))
ASKED = ((tokens(12, 5), tokens(5, 6), tokens(9, 7)), (tokens(3, 8), tokens(8, 9), tokens(1, 10)))
BATCH: dict[str, Any] = {"block_size": 48, "tile": 16}


@cache
def groups() -> list[Any]:
    """The groups of the first rank, the first two and so on; every rank makes all of them, once."""
    return [dist.new_group(list(range(size))) for size in range(1, dist.get_world_size() + 1)]


def mine(rank: int, sizes: Iterable[int] = ALL) -> dict[int, Any]:
    """Of the groups of these sizes those that a rank is in."""
    return {size: group for size, group in enumerate(groups(), start=1) if size in sizes and rank < size}


def equal(rank: int, family: str) -> dict[tuple[int, str], Any]:
    """Two turns of every case and number of ranks: logits, answers, tokens held."""
    found = {}
    model = build(family)
    for case, sizes in cases(family):
        for size, group in mine(rank, sizes).items():
            found[size, case.name] = turns(model, case, group)
    return found


def cases(family: str) -> list[tuple[Case, Iterable[int]]]:
    """All of them for one family, one for the others, with the numbers of ranks; the first over every number."""
    if family != "Llama":
        return [(CASES[0], (3,))]
    return [(CASES[0], ALL), *((case, (2 + 2 * (number % 2), 3)) for number, case in enumerate(CASES[1:]))]


def turns(model: Any, case: Case, group: Any) -> dict[str, Any]:
    """Two turns of a case: logits, answers, tokens held."""
    star = Star(model, group=group, timeout=PATIENT, **case.parameters)
    context = star.encode([case.context])

    def after(turn: int) -> Context:
        context.rewind()
        for before in QUESTIONS[:turn]:
            context.generate([before], max_new_tokens=NEW, do_sample=False)
        return context

    logits, answers = [], []
    for turn, question in enumerate(QUESTIONS):
        logits.append(after(turn).logits([question])[0, -len(question) :])
    for question in QUESTIONS:
        context = after(0) if question is QUESTIONS[0] else context
        answers += context.generate([question], max_new_tokens=NEW, do_sample=False)
    return {"logits": logits, "answers": answers, "held": context.held}


def batch(rank: int) -> dict[int, Any]:
    """Three contexts of unequal lengths, two turns of unequal questions, and the same after `rewind`."""
    found = {}
    model = build()
    for size, group in mine(rank, SOME).items():
        context = Star(model, group=group, timeout=PATIENT, **BATCH).encode(ROWS)
        first = [context.generate(asked, max_new_tokens=NEW, do_sample=False) for asked in ASKED]
        context.rewind()
        logits = context.logits(ASKED[0])
        context.rewind()
        again = [context.generate(asked, max_new_tokens=NEW, do_sample=False) for asked in ASKED]
        found[size] = {"answers": first, "again": again, "logits": logits}
    return found


def sampled(rank: int) -> dict[int, Any]:
    """Sampling with one seed and with another, with the state of the generator before and after."""
    found = {}
    model = build()
    for size, group in mine(rank, SOME).items():
        context = Star(model, group=group, timeout=PATIENT, block_size=48, tile=16).encode([tokens(200)])
        torch.manual_seed(rank)
        before = torch.random.get_rng_state()
        drawn = []
        for seed in (1, 1, 2):
            context.rewind()
            drawn += context.generate([tokens(9, 5)], seed=seed, max_new_tokens=8, do_sample=True, temperature=2.0)
        found[size] = {"drawn": drawn, "kept": bool(torch.equal(before, torch.random.get_rng_state()))}
    return found


def ends(rank: int, end: int) -> Any:
    """A batch of which one row ends early, and a turn after it."""
    star = Star(build(), timeout=PATIENT, **BATCH)
    context = star.encode(ROWS)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    return [context.generate(asked, **options) for asked in ASKED]


def volume(rank: int, count: int) -> dict[str, Any]:
    """Bytes that this rank sends for `count` tokens of phase 2, and for the anchor in phase 1."""
    model = build()
    star = Star(model, timeout=PATIENT, block_size=48, tile=16)
    sent = star.ranks.sent
    context = star.encode([tokens(200)])
    anchor = star.ranks.sent - sent - 4  # and 4 bytes to meet at its end
    context.logits([tokens(count, 5)])
    return {"anchor": anchor, "tokens": star.ranks.sent - sent - anchor - 4}


def swapped(rank: int) -> Any:
    """Logits of a question that is merged by rows, as a very long one is."""
    before, exchange.LARGE = exchange.LARGE, 0
    try:
        context = Star(build(), timeout=PATIENT, **BATCH).encode([tokens(200)])
        return context.logits([QUESTIONS[0]])[0, -len(QUESTIONS[0]) :]
    finally:
        exchange.LARGE = before


def embedded(rank: int, context: list[int], questions: list[list[int]], new: int) -> dict[int, Any]:
    """The embedded model's logits and answers."""
    from sparseprefill.adapters.demo.model import load_model

    model, found = load_model(torch.float32), {}
    for size, group in mine(rank).items():
        held = Star(model, group=group, timeout=PATIENT, block_size=128).encode([context])
        made = []
        for question in questions:
            logits = held.logits([question])[0, -len(question) :]
            held.rewind()
            made.append((logits, held.generate([question], max_new_tokens=new, do_sample=False)[0]))
            held.rewind()
        found[size] = made
    return found


def tensor(rank: int, parameters: dict[str, Any], tied: bool) -> Any:
    """Two copies of the weights, each shared by two ranks. tied: the head's weights are those of the embeddings."""
    from sparseprefill.adapters.star.tensor import shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("star", "tensor"))
    model = build(tie_word_embeddings=tied)
    shard(model, mesh["tensor"])
    star = Star(model, group=mesh["star"].get_group(), timeout=PATIENT, **parameters)
    context = star.encode([tokens(200)])
    logits = context.logits([QUESTIONS[0]])[0, -len(QUESTIONS[0]) :]
    context.rewind()
    (answer,) = context.generate([QUESTIONS[0]], max_new_tokens=NEW, do_sample=False)
    return {"logits": logits, "answer": answer, "heads": star.layers[0].heads}
