"""What rowmax guarantees in 16 bits and what 8 bits make of it: the measurement, emulated and by a GPU's kernels."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from sparseprefill.plugins.rowmax import RowMaxConfig
from torch import Tensor
from typer.testing import CliRunner

import sparseprefill as sp
from kernels.device import DEVICE
from lab.rowmax import __main__ as guarantee
from lab.rowmax.__main__ import MARGINS, Row, app, by_kernels, errors, rows_of, shares_of
from oracles.rowmax import Head, Parameters

NEAR = 0.04
"""Share of the tiles due that 8 bits may drop on these heads; by emulation it is half of that."""
RARE: dict[str, Any] = {"every": 16}
"""Rows that are looked at: few, so that tiles are due by one row alone."""


def looked_up(length: int, dtype: torch.dtype, device: str = DEVICE) -> sp.AttentionCall:
    """Heads whose logits are large enough that single keys matter."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 64) for heads in (8, 4, 4))
    return sp.AttentionCall(*(x.to(device, dtype) for x in (6.0 * q, k, v)))


def counted(call: sp.AttentionCall, **parameters: Any) -> list[Row]:
    return list(rows_of([shares_of(call, parameters)], [0.02, 0.1], MARGINS))


def check(rows: list[Row]) -> None:
    """16 bits drop none; 8 bits few, the fewer the lower the threshold, which keeps more."""
    for eps in (0.02, 0.1):
        exact, plain, *widened = (row for row in rows if row.eps == eps)
        assert ("16 bits", 0) == (exact.precision, exact.dropped)
        assert 100 < exact.due == plain.due
        assert plain.dropped <= NEAR * plain.due
        for before, after in zip([plain, *widened], widened, strict=False):
            assert after.dropped <= before.dropped
            assert before.kept <= after.kept <= after.seen
        assert 0 == widened[-1].dropped


def test_16_bits_keep_every_tile_that_is_due_and_8_bits_drop_some() -> None:
    call = looked_up(4096, torch.bfloat16, "cpu")
    rows = counted(call, **RARE)
    check(rows)
    assert 0 < sum(row.dropped for row in rows if row.precision == "8 bits" and row.margin == 0)


@pytest.mark.gpu
def test_kernels_do_what_the_emulation_does() -> None:
    call = looked_up(4096, torch.bfloat16)
    if not by_kernels(call, RARE):
        pytest.skip("no products of e4m3 here")
    measured = shares_of(call, RARE)
    check(list(rows_of([measured], [0.02, 0.1], MARGINS)))
    emulated = guarantee._estimator(RARE, "exact").shares(guarantee._rounded(call, RowMaxConfig(**RARE)))
    near = (emulated > 0.01) & ~measured.always
    # Sums in float16 are what kernels add to rounding.
    assert 0.05 > float((emulated[near].log() - measured.found["8 bits"][near].log()).abs().mean())
    assert 0.01 < errors([measured])["mean"] < 0.4


@pytest.mark.parametrize(("union", "heads"), [("group", 4), ("head", 4), ("group", 2)])
def test_what_is_due_is_what_the_rows_of_the_rule_give_a_key(union: str, heads: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 150, 16, dtype=torch.float64) for n in (heads, 2, 2))
    call = sp.AttentionCall(q[:, :, 43:], k, v, q_offset=43)
    p = Parameters(eps=0.1, every=2, block=16, union=union)
    found = shares_of(call, {"every": 2, "block": 16, "union": union}).due
    expected = torch.zeros(found.shape[1:], dtype=torch.float64)
    for h in range(heads):
        one = Head(q[0, h, 43:], k[0, h // (heads // 2)], 43, 0.25, h, heads // 2)
        into = expected[h if union == "head" else h // (heads // 2)]
        for tile in range(2, 10):
            for row in one.rows(tile, p):
                torch.maximum(into[tile - 2], weights(one, row, 16, into.shape[-1]), out=into[tile - 2])
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-6)


def weights(head: Head, query: int, block: int, tiles: int) -> Tensor:
    """The largest softmax weight of a row in each tile."""
    logits = [head.logit(query, key) for key in range(query + 1)]
    total = sum(map(math.exp, logits))
    best = [0.0] * tiles
    for key, x in enumerate(logits):
        best[key // block] = max(best[key // block], math.exp(x) / total)
    return torch.tensor(best, dtype=torch.float64)


@pytest.mark.usefixtures("_one_tokenizer")
def test_the_command_counts_on_the_embedded_model() -> None:
    done = CliRunner().invoke(
        app, ["--device", "cpu", "--tokens", "2048", "--layer", "5", "--eps", "0.1", "--threads", "1", "--json", "-"]
    )
    assert 0 == done.exit_code, done.output
    found = json.loads(done.stdout)
    assert ([5], "emulation") == (found["layers"], found["by"])
    assert [0.0, *MARGINS] == [row["margin"] for row in found["rows"]]
    assert 0 == found["rows"][0]["dropped"]
    assert {"mean", "99 %", "most"} == set(found["errors"])


def test_a_layer_that_is_not_plainly_causal_is_refused() -> None:
    call = sp.AttentionCall(*(torch.randn(1, 1, 32, 16) for _ in range(3)), window=8)
    with pytest.raises(sp.ParameterError, match="has a window"):
        shares_of(call, {})
