"""The benchmark of the vLLM adapter: its parts, `pages` on a CPU, and `equal` and `ttft` in tiny engines."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.vllm.pages import pages_of
from typer.testing import CliRunner, Result

import sparseprefill as sp
from lab.bench.shape import ModelShape
from lab.files import Files
from lab.vllm import engine as bench_engine
from lab.vllm import options, paging, weights
from lab.vllm.app import app
from lab.vllm.compare import Answer, Compared, differ
from lab.vllm.equality import Equality
from lab.vllm.equality import form as equal_form
from lab.vllm.first_token import Contender, FirstToken, Timed
from lab.vllm.first_token_form import form as first_token_form
from lab.vllm.sheet import Sheet
from lab.vllm.structure import Structure
from lab.vllm.ttft import alone
from sparseprefill.executors.auto import AutoExecutor

from . import engine

CPU = torch.device("cpu")
SHAPE = ModelShape(layers=2, hidden=128, inner=192, heads=4, kv_heads=2, head_dim=32, vocabulary=256, dtype="float32")
SETUP = bench_engine.Setup(shape=SHAPE, stock="CPU_ATTN")
TINY = ("--hidden", "128", "--inner", "192", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--vocab", "256")
ENGINE = (*TINY, "--dtype", "float32", "--stock", "CPU_ATTN")
STREAMING = ("--method", "streaming", "--set", "streaming.window=64", "--set", "streaming.sink=32")
SMALL = ("--length", "300", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--rounds", "1", "--seconds", "0.02")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def command(
    commands: engine.Commands, folder: Path, *arguments: str, sizes: Sequence[str] = ENGINE
) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON and the Markdown of a command in the session's process. sizes: of its engine."""
    figures, table = folder / "figures.json", folder / "table.md"
    written = ("--json", str(figures), "--markdown", str(table))
    figures.unlink(missing_ok=True)
    status, said = commands.run(*arguments, *sizes, *written)
    assert figures.exists(), said[-4000:]
    return status, json.loads(figures.read_text()), table.read_text()


def answer(*tokens: int, logprobs: Sequence[dict[int, float]] = ()) -> Answer:
    return Answer(tokens, logprobs or [{token: -1.0} for token in tokens])


def test_answers_are_compared_up_to_the_first_difference() -> None:
    stock = answer(5, 6, 7, logprobs=[{5: -0.5, 9: -1.5}, {6: -0.7, 8: -0.75}, {7: -0.1}])
    ours = answer(5, 8, 7, logprobs=[{5: -0.625, 9: -1.5}, {8: -0.7, 6: -0.8}, {7: -9.0}])
    found = Compared(cache="auto", block=16, **differ(stock, ours))
    assert (1, 3) == (found.first, found.generated)
    assert found.gap == pytest.approx(0.05)
    assert found.logprobs == pytest.approx(0.125), "the last step is one of other texts"
    assert not found.equal
    assert [False, True] == [found.tied(0.01), found.tied(0.1)]


def test_a_token_that_stock_did_not_consider_is_no_tie() -> None:
    found = Compared(cache="auto", block=16, **differ(answer(5, 6), answer(5, 7)))
    assert found.gap is None
    assert not found.tied(math.inf)


def test_answers_that_are_equal() -> None:
    assert Compared(cache="auto", block=None, **differ(answer(1, 2), answer(1, 2))).equal
    nothing = answer(1, 2, logprobs=[{1: math.nan}, {2: -1.0}])
    assert not Compared(cache="auto", block=None, **differ(nothing, nothing)).equal


def test_a_file_is_whole_after_each_row(tmp_path: Path) -> None:
    files = Files(json=tmp_path / "a.json", markdown=tmp_path / "a.md")
    work = Equality(setup=SETUP, sparse={"method": "dense"})
    sheet = Sheet(equal_form(work, 0.0), files, {"command": "equal"}, CPU)
    for done in (1, 2):
        sheet.add(Compared(cache="auto", block=16, tokens=40, first=done, gap=0.5, fallbacks={"too short": 2}))
        found = json.loads((tmp_path / "a.json").read_text())
        assert ["equal", done, False] == [found["command"], found["rows"][-1]["first"], found["rows"][-1]["equal"]]
        assert done == len(found["rows"])
    sheet.finish()
    assert ["a.json", "a.md"] == sorted(path.name for path in tmp_path.iterdir())
    text = (tmp_path / "a.md").read_text()
    assert "| auto | 16 | first | 40 | 0 | no | 2 | 0.5000 | 0 |" in text
    assert 1 == text.count("2 calls ran dense: too short")


def test_times_are_told_with_their_ratio_and_kernel() -> None:
    form = first_token_form(FirstToken(setup=SETUP, structure=Structure(SHAPE, CPU)))
    times: dict[str, Any] = {
        "seconds": 0.5,
        "stock": 2.0,
        "attention": 0.25,
        "kernel": "cuDNN",
        "density": 0.1,
        "extra": 1 << 30,
    }
    slower = {"portable (no Gluon)": 3}
    rows = [
        Timed(backend="streaming", tokens=64, chunk=32, **times, fallbacks={"no memory": 2}, slower=slower),
        Timed(backend="bfla", error="RuntimeError: gone"),
    ]
    text = form.markdown(rows)
    assert "| streaming | 64 | 32 | 0.5000 | 4.00 | 0.2500 | 0.1000 | 1.00 |" in text
    assert "| bfla | failed |" in text
    assert "by cuDNN" in text
    assert "streaming, 64 tokens in steps of 32: 2 calls ran dense: no memory" in text
    assert "streaming, 64 tokens in steps of 32: 3 calls on a slower kernel: portable (no Gluon)" in text
    assert (4.0, "RuntimeError: gone") == (form.fact(rows[0])["speedup"], form.fact(rows[1])["error"])


def test_lengths_and_steps_without_repetition() -> None:
    work = FirstToken(setup=SETUP, structure=Structure(SHAPE, CPU), lengths=(64, 256), chunks=(None, 64))
    assert [(64, 64), (256, 256), (256, 64)] == work.cases()


class Attention(torch.nn.Module):
    """What the hooks know a layer by."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name, self.impl = name, None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return q, k, v


def test_processes_of_torchrun_run_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = Contender("CPU_ATTN"), Contender("dense", {"method": "dense"})
    alone([stock, ours])
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone([ours])
    with pytest.raises(CommandError, match="not for CPU_ATTN, dense: start torchrun once for each"):
        alone([stock, ours])
    with pytest.raises(CommandError, match="name a --method"):
        alone([])


def test_made_up_heads_come_chunk_by_chunk() -> None:
    model = torch.nn.ModuleList([Attention("layers.0"), Attention("layers.1")])
    structure = Structure(SHAPE, CPU)
    structure.fit(model)
    structure.begin(300)
    q, k = structure.tensors(300)
    seen = []
    for rows in (128, 128, 44, 1):
        own = [torch.zeros(rows, heads * SHAPE.head_dim) for heads in (4, 2, 2)]
        outs = [layer(*own) for layer in model]
        assert all(out[2] is own[2] for out in outs)
        assert torch.equal(outs[0][0], outs[1][0])
        seen.append(outs[0])
    assert 4 == structure.steps
    assert torch.equal(torch.cat([one[0] for one in seen[:3]]), q[0].transpose(0, 1).flatten(1))
    assert torch.equal(torch.cat([one[1] for one in seen[:3]]), k[0].transpose(0, 1).flatten(1))
    assert not seen[3][0].any(), "a row behind the prompt is the model's own"


def test_each_process_gets_its_own_of_the_made_up_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, structure = Attention("layers.0"), Structure(SHAPE, CPU)
    structure.fit(layer)
    q, k = (x[0].transpose(0, 1) for x in structure.tensors(100))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        structure.begin(100)
        own = [torch.zeros(100, heads * SHAPE.head_dim) for heads in (2, 1, 1)]
        found = layer(*own)
        assert torch.equal(found[0], q[:, 2 * rank : 2 * rank + 2].flatten(1))
        assert torch.equal(found[1], k[:, rank : rank + 1].flatten(1))


def test_weights_are_the_same_for_a_seed() -> None:
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(64), "qkv_proj": torch.nn.Linear(64, 96)})
    weights.fill(model, 3)
    first = {name: value.clone() for name, value in model.named_parameters()}
    assert bool((first["norm.weight"] == 1).all())
    assert first["qkv_proj.weight"].std().item() == pytest.approx(2 / 8, rel=0.1)
    weights.fill(model, 4)
    assert not torch.equal(first["qkv_proj.weight"], model.get_parameter("qkv_proj.weight"))
    weights.fill(model, 3)
    assert all(torch.equal(first[name], value) for name, value in model.named_parameters())


def test_methods_become_tables_of_the_adapter() -> None:
    streaming, share = options.contenders(["streaming", "share-prefill"], ["streaming.window=64"], gate=False)
    assert {"method": "streaming", "parameters": {"window": 64}, "gate": False} == streaming.sparse
    assert {"clusters": "single"} == share.parameters
    (gated,) = options.contenders(["streaming"], [], gate=True)
    assert gated.sparse is not None
    assert "gate" not in gated.sparse
    with pytest.raises(CommandError, match="'bfla' is not a method of this run"):
        options.contenders(["streaming"], ["bfla.group=8"], gate=False)
    with pytest.raises(sp.ParameterError, match="sinc"):
        options.contenders(["streaming"], ["streaming.sinc=64"], gate=False)
    with pytest.raises(CommandError, match="--engine"):
        options.more("[1]")


@pytest.mark.parametrize("layout", paging.LAYOUTS)
@pytest.mark.parametrize("fp8", [None, paging.FP8])
def test_a_cache_of_pages_holds_what_was_put_in(layout: str, fp8: torch.dtype | None) -> None:
    k, v = torch.randn(2, 2, 100, 32).unbind(0)
    cache, table = paging.filled(k, v, 16, layout, fp8, seed=0)
    assert (8, 2, 16, 64) == tuple(cache.shape)
    assert (layout == "LBHNC") == cache.is_contiguous()
    scale = torch.full((1,), paging.SCALE)
    scales = None if fp8 is None else (scale, scale)
    pages = pages_of(cache, 32, table, 100, dtype=torch.float32, fp8=fp8, scales=scales)
    for kept, given in ((pages.keys()[0], k), (pages.values()[0], v)):
        torch.testing.assert_close(kept, given, rtol=0 if fp8 is None else 0.07, atol=0 if fp8 is None else 1e-3)


def test_pages_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("pages", *SMALL, "--json", str(tmp_path / "a.json"))
    assert 0 == result.exit_code, result.output
    assert "say nothing about a GPU" in " ".join(result.stdout.split())
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert 24 == len({(row["work"], row["page"], row["cache"], row["layout"]) for row in rows})
    assert all(row["difference"] == 0.0 and row["error"] is None for row in rows), "the same numbers, computed alike"
    assert all(min(row["contiguous"], row["paged"], row["gather"]) > 0 for row in rows)
    assert {"full": 1.0}.items() <= {row["work"]: row["density"] for row in rows}.items()


def test_pages_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ("--new", "32", "--layout", "LBNHC", "--page", "16", "--mask", "full")
    result = invoke("pages", *SMALL, *asked, "--json", str(tmp_path / "a.json"))
    assert 0 == result.exit_code, result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert 32 == found["shape"]["new"]
    assert [("model", "LBNHC"), ("fp8", "LBNHC")] == [(row["cache"], row["layout"]) for row in found["rows"]]
    assert all(row["difference"] == 0.0 and row["error"] is None for row in found["rows"])


def test_pages_in_place_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen: list[tuple[bool, bool]] = []
    real = AutoExecutor.execute

    def execute(self: AutoExecutor, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
        seen.append((call.pages is not None, call.pages is not None and call.pages.copies))
        return real(self, call, plan)

    monkeypatch.setattr(AutoExecutor, "execute", execute)
    asked = ("--layout", "LBNHC", "--page", "16", "--mask", "full")
    for how, there in (("never", {(True, False)}), ("always", set()), ("auto", {(True, True)})):
        seen.clear()
        result = invoke("pages", *SMALL, *asked, "--copies", how, "--json", str(tmp_path / "a.json"))
        assert 0 == result.exit_code, result.output
        assert {(False, False)} | there == set(seen), "contiguous tensors, and pages if they are read"
        rows = json.loads((tmp_path / "a.json").read_text())["rows"]
        assert [how, how] == [row["copies"] for row in rows]
        assert all(row["difference"] == 0.0 and row["error"] is None for row in rows)


@pytest.mark.parametrize("how", ["never", "always"])
def test_estimates_in_place_and_copied(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ("--method", "streaming", "--layout", "LBNHC", "--page", "16", "--copies", how)
    result = invoke("pages", *SMALL, *asked, "--json", str(tmp_path / "a.json"))
    assert 0 == result.exit_code, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert ["k" if how == "always" else ""] * 2 == [row["copied"] for row in rows], "streaming looks at no key"


@pytest.mark.parametrize(
    ("asked", "said"),
    [(("--layout", "NHD"), "LBHNC"), (("--copies", "no"), "never"), (("--new", "100000"), "at most")],
)
def test_pages_refuses_what_there_is_not(asked: tuple[str, str], said: str) -> None:
    result = invoke("pages", *SMALL, *asked)
    assert 0 != result.exit_code
    assert said in " ".join(result.output.split()) + str(result.exception)


def test_estimates_over_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ("--method", "bfla", "--method", "share-prefill", "--set", "bfla.group=8", "--page", "16")
    result = invoke("pages", *SMALL, *asked, "--json", str(tmp_path / "a.json"))
    assert 0 == result.exit_code, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [("bfla", {"group": 8}), ("share-prefill", {"clusters": "single"})] == [
        (row["work"], row["parameters"]) for row in rows[::4]
    ]
    assert all(row["difference"] == 0.0 and row["error"] is None for row in rows), "the same keys, chosen alike"
    assert all(0 < row["density"] <= 1 and row["method"] for row in rows)


def test_requests_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = ("--requests", "2", "--requests", "3", "--new", "40", "--cached", "0", "--cached", "70")
    heads = ("--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--seconds", "0.01", "--rounds", "2")
    works = ("--mask", "tiles:0.5", "--method", "streaming", "--set", "streaming.block=16")
    result = invoke("requests", *sizes, *heads, *works, "--json", str(tmp_path / "a.json"))
    assert 0 == result.exit_code, result.output
    assert "say nothing about a GPU" in " ".join(result.stdout.split())
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert 8 == len({(row["work"], row["requests"], row["cached"]) for row in rows})
    for row in rows:
        assert row["error"] is None
        assert 0.0 == row["difference"]
        assert row["requests"] == row["launches"], "a CPU computes them one by one"
        assert min(row["together"], row["apart"]) > 0
        assert row["method"] == (row["estimate"] > 0)


def test_a_mask_that_is_none() -> None:
    result = invoke("pages", *SMALL, "--mask", "tile:1")
    assert 1 == result.exit_code
    assert "tiles:SHARE" in " ".join(result.output.split())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("name", ["equal", "ttft", "load", "decode", "answers"])
def test_without_vllm(name: str) -> None:
    result = invoke(name)
    assert 1 == result.exit_code
    assert "this needs vLLM" in result.output


@engine.NEEDED
@pytest.mark.slow
def test_tokens_equal_and_not(commands: engine.Commands, tmp_path: Path) -> None:
    asked = ("equal", "--length", "500", "--length", "300", "--length", "20", "--chunk", "256", "--tokens", "4")
    status, found, table = command(
        commands, tmp_path, *asked, "--block-size", "32", "--cache-dtype", "auto", "--cache-dtype", "fp8"
    )
    refused = "FP8 KV cache on CPU requires" in table  # by vLLM's own attention, on this processor
    assert int(refused) == status, table
    rows = [row for row in found["rows"] if row["cache"] == "auto" or not refused]
    assert ["auto"] * 6 + ["fp8"] * (0 if refused else 6) == [row["cache"] for row in rows]
    assert all(row["equal"] and row["generated"] == 4 and row["sparse_calls"] > 0 for row in rows)
    assert [0, 0, 0, 224, 128, 0] == [row["cached"] for row in rows[:6]]
    assert all(row["logprobs"] < 1e-3 for row in rows)
    status, found, table = command(commands, tmp_path, *asked, *STREAMING, "--set", "streaming.block=16")
    assert 1 == status
    assert any(row["first"] is not None for row in found["rows"])
    assert "| no |" in table


@engine.NEEDED
@pytest.mark.slow
def test_first_tokens(commands: engine.Commands, tmp_path: Path) -> None:
    asked = ("ttft", "--length", "768", "--length", "256", "--chunk", "0", "--chunk", "256", "--rounds", "1")
    status, found, table = command(commands, tmp_path, *asked, *STREAMING)
    assert 0 == status, table
    rows = found["rows"]
    cases = [(256, 256, 1), (768, 768, 1), (768, 256, 3)]
    assert [(name, *case) for name in ("CPU_ATTN", "dense", "streaming") for case in cases] == [
        (row["backend"], row["tokens"], row["chunk"], row["steps"]) for row in rows
    ]
    assert all(row["seconds"] > 0 and row["attention"] > 0 and not row["fallbacks"] for row in rows)
    assert all(row["speedup"] == pytest.approx(row["stock"] / row["seconds"]) for row in rows)
    assert [None] * 3 + [1.0] * 3 == [row["density"] for row in rows[:6]]
    # Rows 384 to 639 lie before the dense tail and have a tile between the sink's and the window's.
    assert all(0 < row["density"] < 1 for row in rows[7:])
    assert 9 == table.count("| 256 |") + table.count("| 768 | 768 |")
