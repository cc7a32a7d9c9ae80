"""Where a method loses copies: the weights that are looked at, and the command."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.evaluation.prompts import Prompt, Span
from typer.testing import CliRunner

import sparseprefill as sp
from lab.losses import __main__ as losses
from lab.losses.__main__ import Watch, app, groups_of, places_of, weights_of
from sparseprefill.testing import tensors

from .test_cli import refused

pytestmark = pytest.mark.usefixtures("_one_tokenizer")


def call(**options: Any) -> sp.AttentionCall:
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=90, kv_len=90, head_dim=16, dtype=torch.float32)
    return sp.AttentionCall(2 * q, k, v, **options)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"window": 20}, {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])}]
)
def test_weights_are_those_of_the_softmax(options: dict[str, Any]) -> None:
    one = call(**options)
    found = weights_of(one, torch.tensor([0, 50, 89]))
    for head in range(4):
        for n, row in enumerate((0, 50, 89)):
            seen = range(max(0, row - options.get("window", 99) + 1), row + 1)
            logits = [float(one.q[0, head, row] @ one.k[0, head // 2, key]) * one.softmax_scale for key in seen]
            if "softcap" in options:
                logits = [3.0 * math.tanh(x / 3.0) for x in logits]
            total = sum(map(math.exp, logits)) + (math.exp(float(options["sinks"][head])) if "sinks" in options else 0)
            expected = torch.zeros(90)
            expected[seen.start : seen.stop] = torch.tensor([math.exp(x) / total for x in logits])
            torch.testing.assert_close(expected, found[0, head, n], rtol=1e-4, atol=1e-6)


def test_what_is_dropped_and_what_is_kept_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, from a mask that keeps the last two tiles; some rows at a time change nothing."""
    one, places = call(), {40: 3, 70: 60, 89: 5}
    result = sp.build("streaming", sink=0, window=16, block=16).run(one)
    weights, mask = weights_of(one, torch.tensor(list(places)))[0], result.mask.to_dense(list(places))[0]
    watches = []
    for rows in (64, 2):
        monkeypatch.setattr(losses, "ROWS", rows)
        watches.append(Watch(places))
        watches[-1](evolve(one, layer=7), result)
    for (found,) in (one.found for one in watches):
        assert (7, result.density) == (found.layer, found.pairs)
        dropped = (weights * ~mask).sum((1, 2)) / 3
        assert pytest.approx(dropped.tolist(), abs=1e-6) == list(found.dropped)
        assert min(found.dropped) > 0.1
        own = [weights[:, n, key] for n, key in enumerate(places.values())]
        assert pytest.approx(sum(float(x.sum()) for x in own), rel=1e-5) == found.source
        assert pytest.approx(float(own[1].sum()), rel=1e-5) == found.kept  # the others lie outside


def test_places_of_what_is_restated() -> None:
    ids = (9, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 0)
    prompt = Prompt("one", ids, (), (Span("copies", 10, 12),))
    assert {9: 3, 10: 4} == places_of(prompt)  # row 9 predicts token 10, a 3, which stood at 3


def test_layers_in_runs() -> None:
    assert [range(3), range(3, 7)] == groups_of(7, 2)
    assert [range(1), range(1, 2)] == groups_of(2, 5)


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "lost.json"
    made = ["--tokens", "3072", "--kind", "code", "--groups", "2", "--set", "rowmax.eps=0", "--json", str(file)]
    done = CliRunner().invoke(app, [*made, "--dtype", "float32"])
    assert 0 == done.exit_code, done.output
    found = json.loads(file.read_text())
    (layers,) = found["layers"]
    assert all(max(one["dropped"]) < 1e-6 and one["kept"] == one["source"] and one["pairs"] == 1 for one in layers)
    assert ["all", "0 to 2", "3 to 5"] == [one["layers"] for one in found["sparse"]]
    assert all(one["copies"]["right"] == one["copies"]["dense_right"] and one["kl"] < 1e-6 for one in found["sparse"])
    assert "rowmax" == found["method"]
    assert "weight on source" in done.output


def test_one_method_at_a_time() -> None:
    both = CliRunner().invoke(app, ["--method", "rowmax", "--method", "bfla"])
    refused(both, "--method rowmax, bfla: pass one method")
