"""What the processes of the tests on several GPUs do: everything that needs no fault, since a start takes so long."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sparseprefill.adapters.star import Star, exchange
from sparseprefill.adapters.star.executor import AnchoredBlockExecutor, Shard
from sparseprefill.adapters.star.ranks import Ranks
from torch import Tensor

from distributed import jobs
from distributed.models import NEW, QUESTIONS, Case, alone, build, device, tokens
from helpers.patience import patient
from sparseprefill import AttentionCall, SparseMask
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.plan import Plan

STREAMING = {"method": "streaming", "parameters": {"sink": 64, "window": 64}}
CASES = (
    Case("many blocks, the last short, tokens left over", {"block_size": 128, "tile": 64}, 1000),
    Case("fewer blocks than ranks", {"block_size": 1024, "tile": 64}, 1000),
    Case("a short anchor", {"block_size": 192, "anchor_length": 64, "tile": 64}, 1000),
    Case("a method inside", {"block_size": 256, "tile": 64, "inner": STREAMING}, 1000),
)
ROWS = (tokens(1000), tokens(330, seed=3))
ASKED = (tokens(12, 5), tokens(5, 6))
HEADS, KV_HEADS, WIDTH = 32, 8, 128

Found = dict[str, Any]


def everything(rank: int, length: int) -> dict[str, Found]:
    """All checks, by name; length: of the context of the executor's."""
    torch.set_float32_matmul_precision("highest")
    found: dict[str, Found] = {}
    groups = jobs.groups()
    for family in ("Llama", "Qwen3"):
        model = build(family)
        for case in CASES if family == "Llama" else CASES[:2]:
            wanted = alone(model, case.context, QUESTIONS, **case.parameters)
            for size, group in enumerate(groups, start=1):
                if size > max(rank, 1):
                    found[f"{family}, {case.name}, {size} ranks"] = _compared(model, case, wanted, group)
    model = build()
    found["rows merged by shares"] = _swapped(model)
    found["a batch"] = _batch(model)
    found["sampling"] = _sampled(model)
    case = CASES[0]
    half = build().to(torch.bfloat16)
    found["bfloat16"] = _compared(half, case, alone(half, case.context, QUESTIONS, **case.parameters), None)
    found["executor"] = _executor(rank, length)
    return found


def _compared(model: Any, case: Case, wanted: list[Any], group: Any) -> Found:
    """Two turns: how far the logits are off, and all greedy tokens."""
    found = jobs.turns(model, case, group)
    answers, expected = found["answers"], [answer for _, answer in wanted]
    same = 2 if answers[0] == expected[0] else 1  # bfloat16 may part ways: then the next turn is another one
    pairs = [(ours, logits) for ours, (logits, _) in zip(found["logits"][:same], wanted, strict=False)]
    norms = [float((ours - logits).float().norm() / logits.float().norm()) for ours, logits in pairs]
    apart = max(float((ours - logits).abs().max()) for ours, logits in pairs)
    return {"apart": apart, "norm": max(norms), "answers": answers, "wanted": expected}


def _swapped(model: Any) -> Found:
    case, before, exchange.LARGE = CASES[0], exchange.LARGE, 0
    try:
        return _compared(model, case, alone(model, case.context, QUESTIONS, **case.parameters), None)
    finally:
        exchange.LARGE = before


def _batch(model: Any) -> Found:
    """Two contexts of unequal lengths, against each alone."""
    parameters = CASES[0].parameters
    rows = [alone(model, row, (asked,), **parameters)[0] for row, asked in zip(ROWS, ASKED, strict=True)]
    context = Star(model, timeout=patient(60), **parameters).encode(ROWS)
    logits = context.logits(ASKED)
    apart = max(float((logits[n, -len(ASKED[n]) :] - wanted).abs().max()) for n, (wanted, _) in enumerate(rows))
    context.rewind()
    answers = context.generate(ASKED, max_new_tokens=NEW, do_sample=False)
    return {"apart": apart, "answers": answers, "wanted": [answer for _, answer in rows]}


def _sampled(model: Any) -> Found:
    """Tokens drawn with one seed, twice: the same on every rank."""
    context = Star(model, timeout=patient(60), **CASES[0].parameters).encode([CASES[0].context])
    drawn = []
    for seed in (1, 1, 2):
        context.rewind()
        drawn += context.generate([QUESTIONS[0]], seed=seed, max_new_tokens=12, do_sample=True, temperature=2.0)
    return {"drawn": drawn}


def _executor(rank: int, length: int) -> Found:
    """AnchoredBlockExecutor alone in bfloat16: a block behind the anchor, and a question over the keys of all ranks."""
    here, size = device(), dist.get_world_size()
    source = torch.Generator(here).manual_seed(0)
    block = length // size
    q, k, v = (
        torch.randn(1, heads, length + 33, WIDTH, generator=source, dtype=torch.bfloat16, device=here)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    executor, found = AnchoredBlockExecutor(AutoExecutor(), Ranks(timeout=patient(60))), {}
    own = slice(rank * block, (rank + 1) * block)
    seen = [x[:, :, own] if rank == 0 else torch.cat([x[:, :, :block], x[:, :, own]], 2) for x in (k, v)]
    call = AttentionCall(q[:, :, own], *seen)
    result = executor.executor.execute(call, Plan(SparseMask.full(call)))
    found["phase 1"] = _apart(result.out, result.lse, *_exact(call))
    for few in (1, 33):
        asked = slice(length, length + few)
        new = AttentionCall(q[:, :, asked], k[:, :, asked], v[:, :, asked])
        shard = Shard(k[:, :, own], v[:, :, own], (block,))
        out, lse = executor.attend(new, shard, owner=rank == size - 1)
        whole = AttentionCall(q[:, :, asked], k[:, :, : length + few], v[:, :, : length + few])
        found[f"phase 2, {few} rows"] = _apart(out, lse, *_exact(whole))
    return found


def _exact(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and LSE in float32, a KV head at a time."""
    rows, keys = call.q.shape[2], call.k.shape[2]
    later = torch.ones(rows, keys, dtype=torch.bool, device=call.q.device).triu_(keys - rows + 1)
    outs, lses = [], []
    for head in range(call.q.shape[1]):
        q, k, v = (
            x[0, n].float() for x, n in ((call.q, head), (call.k, head // call.group), (call.v, head // call.group))
        )
        logits = (q @ k.T * call.softmax_scale).masked_fill_(later, -torch.inf)
        lses.append(logits.logsumexp(-1))
        outs.append(logits.softmax(-1) @ v)
    return torch.stack(outs)[None], torch.stack(lses)[None]


def _apart(out: Tensor, lse: Tensor | None, exact: Tensor, exact_lse: Tensor) -> tuple[float, float]:
    """Relative norm of the output's error, and the largest of the LSE's."""
    assert lse is not None
    return float((out.float() - exact).norm() / exact.norm()), float((lse - exact_lse).abs().max())
