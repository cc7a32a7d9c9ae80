"""One run each of the lab's tools that no other test runs, at the smallest size."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.rowmax import RowMaxConfig
from typer.testing import CliRunner

import sparseprefill as sp
from lab import long, overhead, recall_cost, skip_share, tail, wide
from lab.bench.case import parse_mask, random_mask
from lab.bench.clock import Clock
from lab.bench.shape import ModelShape
from lab.frontier import by_layer
from lab.losses.__main__ import weights_of
from lab.mixed import __main__ as mixed
from lab.mixed import heads
from lab.rowmax import bounds, rules
from sparseprefill import AttentionCall, Memory, ParameterError
from sparseprefill.testing import head_tensors


def test_what_a_gated_model_costs() -> None:
    found = overhead.measure(2, 16, 2)
    assert (2, 16, 2) == (found.layers, found.tokens, found.rounds)
    assert "2 layers" in str(found)


def test_what_measuring_recall_costs() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 128, "inner": 64, "heads": 4, "kv_heads": 2, "head_dim": 32}
    shape = ModelShape(**sizes, vocabulary=64, dtype="float32")
    found = recall_cost.measure(shape, 512, "streaming", Clock(torch.device("cpu"), rounds=2))
    assert 0 < found.density <= 1
    assert 0 < found.share


def test_skipping_by_its_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "256", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["skip_share", *sizes, "--shares", "0", "0.2"])
    skip_share.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {0.0} < {row["below"] for row in rows}
    assert all(0 <= row["share"] <= 1 and 0 <= row["error"] for row in rows)


def test_columns_stand_before_their_query_tile() -> None:
    call = AttentionCall(*head_tensors(q_len=1024, heads=2, kv_heads=1, head_dim=32))
    mask = random_mask(call, parse_mask("diagonal+columns:0.3"), 0)
    assert (16, 1, True) == (mask.stripe_width, mask.group, mask.disjoint)
    columns, tiles = mask.stripe_map(16), mask.tile_map()
    assert not (columns & tiles.repeat_interleave(8, -1)).any()
    before = torch.arange(64) < torch.arange(8)[:, None] * 8
    assert 0.2 < float(columns[..., before].float().mean()) < 0.4


def test_each_layer_of_a_model(tmp_path: Any) -> None:
    file = tmp_path / "layers.json"
    config = tmp_path / "columns.toml"
    config.write_text('method = "rowmax"\nparameters = { width = 16 }\n')
    words = ["--config", str(config), "--tokens", "512", "--device", "cpu", "--rounds", "1", "--seconds", "0.01"]
    shown = CliRunner().invoke(by_layer.app, [*words, "--json", str(file)])
    assert 0 == shown.exit_code, shown.output
    ((_, rows),) = json.loads(file.read_text())["layers"].items()
    assert [str(layer) for layer in range(6)] == [row["layer"] for row in rows]
    assert all(0 < row["pairs"] <= row["most"] <= 1 and 0 < row["estimate"] and 0 < row["dense"] for row in rows)
    assert "| mean |" in shown.output


def test_bounds_on_what_is_dropped_hold(tmp_path: Any) -> None:
    file = tmp_path / "bounds.json"
    shown = CliRunner().invoke(
        bounds.app, ["--tokens", "512", "--every-layer", "3", "--device", "cpu", "--json", str(file)]
    )
    assert 0 == shown.exit_code, shown.output
    figures = json.loads(file.read_text())["bounds"]
    assert list(bounds.BOUNDS) == list(figures)
    dropped, *above = figures.values()
    assert all(0 <= mine <= other <= 1 for one in above for mine, other in zip(dropped, one, strict=True))
    torch.manual_seed(0)
    logits = torch.randn(64, 9, 16)
    logits[:, 8, 5:] = -torch.inf  # a row sees a part of its last column
    true, *more = bounds.Columns(logits, torch.rand(64, 9) < 0.5).shares
    assert all(bool((one >= true - 1e-6).all()) for one in more)
    windowed = AttentionCall(*head_tensors(q_len=256, heads=2, kv_heads=1, head_dim=32), window=32, layer=3)
    with pytest.raises(ParameterError, match=r"^layer 3 has a window.*: pass a model without them"):
        next(bounds.columns_of(windowed, RowMaxConfig()))


def test_every_rule_for_columns_runs() -> None:
    call = AttentionCall(*head_tensors(q_len=1000, heads=4, kv_heads=2, head_dim=32))
    found: dict[tuple[str, float], list[float]] = {}
    for one in rules.rules(2):
        pipeline = one.method.pipeline(**{**one.parameters, "eps": 1.0})
        memory = Memory()
        results = [pipeline.run(evolve(call, layer=layer), memory) for layer in range(2)]
        assert all(0 < result.density < 1 and bool(result.out.isfinite().all()) for result in results)
        found.setdefault((one.name, one.parameters["value"]), []).append(results[-1].density)
    assert found["two-passes", 0.5] < found["two-passes", 0.25]
    prices = [found["squared-loss", price] for price in (0.0005, 0.001, 0.002, 0.004)]
    assert prices == sorted(prices, reverse=True)
    wrong = CliRunner().invoke(rules.app, ["--tokens", "3072", "--device", "cpu", "--rule", "none"])
    assert "--rule none: pass one of rule, two-passes" in wrong.output


def test_wide_heads_are_held_against_plain_attention(tmp_path: Any) -> None:
    file = tmp_path / "wide.json"
    words = ["--tokens", "300", "--heads", "2", "--kv-heads", "1", "--device", "cpu", "--rounds", "1"]
    shown = CliRunner().invoke(wide.app, [*words, "--size", "192:128", "--seconds", "0.01", "--json", str(file)])
    assert 0 == shown.exit_code, shown.output
    rows = json.loads(file.read_text())["rows"]
    assert [*wide.MASKS, "rowmax"] == [row["mask"] for row in rows]
    assert all(row["error"] < 1e-5 and 0 < row["milliseconds"] for row in rows)
    wrong = CliRunner().invoke(wide.app, [*words, "--size", "192"])
    assert "--size 192: write the head dimensions" in wrong.output


def test_long_answers_behind_a_sparse_prefill(tmp_path: Any) -> None:
    file = tmp_path / "long.json"
    words = ["--tokens", "300", "--prompts", "1", "--greedy", "8", "--behind", "6", "--turns", "2", "--device", "cpu"]
    streaming = ["--method", "streaming", *(f"--set=streaming.{name}=32" for name in ("sink", "window", "block"))]
    shown = CliRunner().invoke(long.app, [*words, *streaming, "--method", "dense", "--json", str(file)])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["method"], row["turn"]) for row in rows] == [
        (name, turn) for name in ("stock", "streaming", "dense") for turn in range(2)
    ]
    for mine, other in zip(rows[:2], rows[4:], strict=True):
        assert mine["truth"] == pytest.approx(other["truth"], abs=1e-4)
        assert mine["own"] == pytest.approx(other["own"], abs=1e-4)
        assert [mine[name] for name in ("alike", "loops", "names")] == [
            other[name] for name in ("alike", "loops", "names")
        ]
    assert rows[2]["density"] < 1.0
    assert [0.0, 0.25] == [long._loops([*range(40)]), long._loops([*range(24), *range(23)])]
    wrong = CliRunner().invoke(long.app, ["--tokens", "9999999", "--prompts", "1", "--device", "cpu"])
    assert "--tokens 9999999: 1 more of Python's packages would have to be that long; pass less" in wrong.output


def test_a_prompt_in_two_steps(tmp_path: Any) -> None:
    file = tmp_path / "mixed.json"
    words = ["--tokens", "3072", "--device", "cpu", "--threads", "1", "--first", "0.6"]
    shown = CliRunner().invoke(mixed.app, [*words, "--json", str(file)])
    assert 0 == shown.exit_code, shown.output
    dense, sparse, late, early = rows = json.loads(file.read_text())["rows"]
    assert [*mixed.WAYS] == [row["way"] for row in rows]
    assert (0, 1) == (dense["kl"], dense["density"])
    assert all(0 < row["kl"] and 0 < row["density"] < 1 for row in (sparse, late))
    assert sparse["kl"] != late["kl"], "the keys of the first step differ"
    assert 0 < early["kl"] != sparse["kl"]
    assert 1 == early["density"], "of the second step, which is dense"
    wrong = CliRunner().invoke(mixed.app, [*words[:-1], "0.99"])
    assert "restates nothing behind it; pass less" in wrong.output


def test_inside_a_prompt_with_a_dense_beginning(tmp_path: Any) -> None:
    file = tmp_path / "heads.json"
    words = ["--tokens", "3072", "--device", "cpu", "--threads", "1", "--first", "0.6", "--rows", "8", "--apart", "4"]
    shown = CliRunner().invoke(heads.app, [*words, "--json", str(file)])
    assert 0 == shown.exit_code, shown.output
    found = json.loads(file.read_text())
    read = {one["way"]: one for one in found["read"]}
    assert 10 == len(read)
    assert 0 == read[heads.DENSE]["kl"]
    assert all(0 < one["kl"] for way, one in read.items() if way != heads.DENSE)
    assert len({one["nll"] for one in read.values()}) == len(read), "each way changes something"
    looks = {(one["way"], one["layer"]): one for one in found["looks"]}
    assert {(way, layer) for way in heads.INSIDE for layer in range(6)} == set(looks)
    assert all(0 <= x <= 1 for one in looks.values() for x in (*one["far"], *one["front"], *one["front_kept"]))
    assert [0.0] * 4 == looks[heads.DENSE, 3]["shift"]
    assert 0 < sum(looks[heads.DENSE, 3]["rows"]) <= 8
    assert looks[heads.DENSE, 3]["front"] == pytest.approx(looks[heads.DENSE, 3]["front_kept"]), "dense keeps all"
    assert any(looks[heads.MIXED, 3]["shift"])
    assert 12 == len(found["moved"])
    assert all(-1e-6 <= x <= 1 + 1e-6 for one in found["moved"] for x in one["alike"])
    wrong = CliRunner().invoke(heads.app, [*words, "--first", "0.99"])
    assert "restates nothing behind it; pass less" in wrong.output


def test_what_is_seen_of_a_shift_of_all_keys() -> None:
    """Of keys that one vector moves: a row's logits against those of the beginning, and the weight on its source."""
    q, k, v = head_tensors(q_len=512, heads=4, kv_heads=2, head_dim=32)
    vector = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1))
    end = torch.arange(512)[:, None] >= 384
    pipeline, rows = sp.build("dense"), [3, 60]
    watches = []
    for moved in (k, k + vector * end, k + vector):
        call = AttentionCall(q[:, :, 384:], moved, v, layer=2)
        watches.append(heads.Watch("text", "way", 384, {444: 7}, rows, {2: k}))
        watches[-1](call, pipeline.run(call))
    none, behind, alike = (one.found[0] for one in watches)
    assert (1, 0) == none.rows
    raised = torch.einsum("hrd,hrd->hr", q[0, :, [387, 444]], vector.repeat_interleave(2, 0).expand(-1, 2, -1))
    assert behind.shift == pytest.approx((raised.mean(1) * 32**-0.5).tolist(), rel=1e-4)
    assert alike.shift == pytest.approx([0.0] * 4, abs=1e-5)
    assert alike.front == pytest.approx(none.front, rel=1e-4), "what all keys have cancels"
    call = AttentionCall(q[:, :, 384:], k, v)
    assert weights_of(call, torch.tensor([60]))[0, :, 0, 7].tolist() == pytest.approx(none.front, rel=1e-5)
    for head in range(4):
        far, logit = none.far[head], math.log(none.far[head] / (1 - none.far[head]))
        assert 0 < far < 1
        both = (logit + math.log(none.far_copying[head] / (1 - none.far_copying[head]))) / 2
        assert both == pytest.approx(none.odds[head], rel=1e-4)


def test_questions_at_the_end_with_and_without_the_tail(tmp_path: Any) -> None:
    file = tmp_path / "tail.json"
    words = ["--tokens", "1536", "--device", "cpu", "--threads", "1", "--questions", "2"]
    everything = ["--method", "streaming", *(f"--set=streaming.{name}=64" for name in ("sink", "window", "block"))]
    shown = CliRunner().invoke(
        tail.app, [*words, *everything, "--closer", "streaming.window=4096", "--json", str(file)]
    )
    assert 0 == shown.exit_code, shown.output
    found = json.loads(file.read_text())
    dense, with_tail, without, closer = (found["questions"][index : index + 2] for index in range(0, 8, 2))
    assert 0 < found["density"] < 1
    assert all(0 == one["kl"] and 1 == one["density"] for one in dense)
    for one, two, three in zip(with_tail, without, closer, strict=True):
        assert two["density"] < one["density"] <= three["density"] == 1
        assert one["last_kl"] == pytest.approx(three["last_kl"], abs=1e-5), "every key, either way"
        assert one["kl"] < two["kl"]
    assert "| streaming, tail=0, streaming.window=4096 in the last rows | 100.0% |" in shown.output
    asked = CliRunner().invoke(tail.app, [*words, "--task", "requests", "--closer", "every=4", "--json", str(file)])
    assert 0 == asked.exit_code, asked.output
    assert 4 * 2 == len(json.loads(file.read_text())["questions"])
    wrong = CliRunner().invoke(tail.app, ["--tokens", "1024", "--device", "cpu"])
    assert "--tokens 1024: tokens is" in wrong.output
