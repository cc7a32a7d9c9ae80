"""Skip-softmax by the share that it skips: `python -m lab.skip_share` (from tests/), times, error and KL.

One layer of made-up heads (`testing.head_tensors`). For the full mask the constant c is searched at which so much of
its pairs is skipped; then bfla and anchor-attention run with the same c. Beside each: the time without, the output's
relative error against dense attention, and the mean over rows of KL(kept || dense), which is the loss of LSE in nats.
On a Hopper GPU everything runs twice, with values fetched on demand and fetched in any case.

131,072 tokens, 32/8 heads of 128 in bfloat16 on a GPU; on a CPU 2,048 tokens, 4/2 heads of 64 in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from attrs import asdict, evolve, frozen

import sparseprefill as sp
from lab.bench.clock import Clock
from sparseprefill.kernels.family.chips import capability
from sparseprefill.testing import head_tensors

SHARES = (0.0, 0.5, 0.72, 0.9)
ROUNDS = 18
"""Halvings of the search, in logarithms of c."""


@frozen
class Row:
    """milliseconds: with skipping, and plain: without, of `method`. below: c, in tokens. share: of the mask's pairs.
    density: of what is computed. error: of the output against dense, plain_error: without skipping. kl: in nats."""

    method: str
    values: str
    below: float
    share: float
    density: float
    milliseconds: float
    plain: float
    speedup: float
    error: float
    plain_error: float
    kl: float


@torch.inference_mode()
def measure(call: sp.AttentionCall, clock: Clock, shares: tuple[float, ...]) -> Iterator[Row]:
    """A row for each share of each method."""
    full = sp.build("skip-softmax", skip_below=0)
    dense = full.run(call)
    bounds = [search(call, share) for share in shares]
    for values in ("on demand", "always") if hopper(call) else ("",):
        if values:
            from sparseprefill.kernels.hopper import launch

            launch.DEFER = values == "on demand"
        for name, plain in {
            "full": full,
            "bfla": sp.build("bfla"),
            "anchor-attention": sp.build("anchor-attention"),
        }.items():
            plan = plain.plan(call, sp.Memory())
            before = plain.executor.execute(call, plan)
            for below in bounds:
                skipping = sp.SkipSoftmax(below, grain=None).refine(call, plan, sp.Memory())
                if skipping.skip_below is None:  # nothing is skipped, but the loop that could runs
                    skipping = evolve(plan, skip_below=torch.zeros(1, device=call.q.device))
                found = plain.executor.execute(call, skipping)
                with_skips, without = clock.beside(
                    lambda skipping=skipping, one=plain: one.executor.execute(call, skipping),  # type: ignore[misc]
                    lambda plan=plan, one=plain: one.executor.execute(call, plan),  # type: ignore[misc]
                )
                yield Row(
                    method=name, values=values, below=below, share=found.skipped_share, density=found.density,
                    milliseconds=1e3 * with_skips, plain=1e3 * without, speedup=without / with_skips,
                    error=error(found, dense), plain_error=error(before, dense),
                    kl=float((dense.lse - found.lse).mean()),
                )  # fmt: skip


def hopper(call: sp.AttentionCall) -> bool:
    """Whether the Hopper kernel may serve."""
    return capability(call.q.device) == (9, 0)


def error(result: sp.Result, dense: sp.Result) -> float:
    """Relative norm of the difference, head by head, since float64 of all heads is large."""
    parts = [
        ((a.double() - b.double()).norm() ** 2, b.double().norm() ** 2)
        for a, b in zip(result.out.unbind(1), dense.out.unbind(1), strict=True)
    ]
    lost, whole = (sum(float(part[i]) for part in parts) for i in (0, 1))
    return float((lost / whole) ** 0.5)


def search(call: sp.AttentionCall, share: float) -> float:
    """c at which the full mask skips such a share, as nearly as halving finds it; 0 for none."""
    if share == 0:
        return 0.0
    low, high = torch.tensor(1e-6).log().item(), torch.tensor(call.kv_len * 0.999).log().item()
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        found = sp.build("skip-softmax", skip_below=float(torch.tensor(middle).exp())).run(call).skipped_share
        low, high = (low, middle) if found > share else (middle, high)
    return float(torch.tensor((low + high) / 2).exp())


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072 if gpu else 2048)
    parser.add_argument("--heads", type=int, default=32 if gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if gpu else 2)
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 64)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    device = torch.device("cuda" if gpu else "cpu")
    made: dict[str, Any] = {"heads": given.heads, "kv_heads": given.kv_heads, "head_dim": given.head_dim}
    q, k, v = head_tensors(
        q_len=given.tokens, device=device, dtype=torch.bfloat16 if gpu else torch.float32, seed=1, **made
    )
    for row in measure(sp.AttentionCall(q, k, v), Clock(device, rounds=given.rounds), tuple(given.shares)):
        facts = {key: round(x, 6) if isinstance(x, float) else x for key, x in asdict(row).items()}
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
