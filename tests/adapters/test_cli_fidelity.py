"""The command `compare`, on the embedded model and on a random one, as a new user would try it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.results import _looked_at
from sparseprefill.adapters.demo.text import text_lines
from sparseprefill.adapters.evaluation import comparison
from sparseprefill.adapters.evaluation.outcome import Contender, Outcome, Summary
from sparseprefill.adapters.evaluation.reading import Sizes
from typer.testing import CliRunner, Result

from helpers.hf_models import SLIDING_LAYERS, build
from sparseprefill.profiles.profile import Profile

SMALL = ("--tokens", "256", "--count", "1", "--greedy", "6", "--device", "cpu", "--method", "streaming")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", "--threads", "1", *arguments])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # asking it for a model takes 20 seconds


def test_without_a_table_of_the_model_a_method_is_left_out_by_name(folder: Path) -> None:
    small = ("--model", str(folder), *SMALL[:-2])
    result = run(*small, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert "share-prefill" not in [one["method"] for one in facts["methods"]]
    assert len(facts["methods"]) > 5
    assert "sparseprefill cluster --model" in facts["left_out"]["share-prefill"]
    assert "share-prefill is left out: it needs a table" in " ".join(result.stderr.split())
    assert "sparseprefill anchors --model" in facts["left_out"]["kascade"]
    given = run(*small, "--json", "--set", "share-prefill.clusters=single", "--set", "kascade.anchors=[0]")
    assert given.exit_code == 0, given.output
    facts = json.loads(given.stdout)
    assert {"share-prefill", "kascade"} <= {one["method"] for one in facts["methods"]}
    assert facts["left_out"] == {}


def test_a_model_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    texts = [" ".join(text_lines()[first : first + 30]) for first in (100, 200)]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    arguments = (
        "--model",
        str(folder),
        "--prompts",
        "mine.jsonl",
        "--tokens",
        "600",
        "--greedy",
        "6",
        "--device",
        "cpu",
        "--json",
    )
    method = ("--method", "streaming", "--set", "streaming.window=16", "--set", "streaming.sink=1")
    result = run(*arguments, *method, "--tail", "0")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tail"] == 0
    assert [prompt["name"] for prompt in facts["prompts"]] == ["mine.jsonl:1", "mine.jsonl:2"]
    stock, sparse = facts["methods"]
    assert (stock["method"], stock["prompts"], stock["inside"]) == ("stock", 2, {})
    assert sparse["prompts"] == 2
    assert sparse["end"]["kl"] > 1e-4
    assert sparse["inside"]["kl"] < 1e-6, "rows before the last 160 of so short a prompt see every key"
    assert sparse["inside"]["kl"] <= sparse["inside"]["high"] <= sparse["inside"]["worst"]
    assert sparse["inside"]["rows"] == sum(len(range(one["tokens"] - 160)) for one in facts["outcomes"][1::2])
    layers = [one for outcome in facts["outcomes"][1::2] for one in outcome["layers"]]
    assert min(head for one in layers for head in one["row_lowest"]) == sparse["recall"]["row_lowest"]
    assert all(len(one["row_lowest"]) == len(one["recalls"]) for one in layers)
    assert sparse["recall"]["row_lowest"] <= sparse["recall"]["row_p1"] <= sparse["recall"]["lowest"]
    assert sparse["density"] < 0.95
    assert sparse["last_rows_recall"]["mean"] < 0.999
    assert facts["stopped"] is False
    assert len(facts["outcomes"]) == 4
    result = run(*arguments, *method)
    assert result.exit_code == 0, result.output
    tailed = json.loads(result.stdout)
    assert tailed["tail"] == 128
    assert tailed["methods"][1]["last_rows_recall"]["mean"] > 0.9999
    assert tailed["methods"][1]["density"] > sparse["density"]


def test_the_table_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    assert "the embedded model: 1 prompt of 256 tokens, cpu (1 thread), float32" in " ".join(result.stdout.split())
    head = next(line for line in result.stdout.splitlines() if line.strip().startswith("method"))
    assert head.split() == [
        *("method", "setting", "KL", "99", "%", "NLL", "same", "end", "KL", "recall", "rows", "lowest"),
        *("density", "prefill", "speed-up"),
    ]
    row = next(line for line in result.stdout.splitlines() if line.strip().startswith("streaming"))
    assert re.fullmatch(r" streaming +sink=128,( +[\d.]+){3} +[\d.]+% +[\d.]+( +[\d.]+%){4} +[\d.]+ s +[\d.]+ *", row)


def test_the_page_holds_everything(folder: Path) -> None:
    result = run(
        *SMALL, "--model", str(folder), "--html", "page.html", "--picture", "p.png", "--set", "streaming.window=16"
    )
    assert result.exit_code == 0, result.output
    text = Path("page.html").read_text()
    assert "streaming" in text
    assert "window=16" in text
    assert "<th" in text
    assert text.count("data:image/svg+xml;base64,") == 1  # the frontier; no picture of a recall of 100 %
    assert "Every head keeps 100.0% of its attention" in text
    assert text.count("data:image/png;base64,") == 2  # masks
    assert not re.search(r"(src|href)=.https?:", text)
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = comparison.outcomes

    def stops(*arguments: Any, **more: Any) -> Iterator[Any]:
        for done, outcome in enumerate(whole(*arguments, **more)):
            if done == 2:
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(comparison, "outcomes", stops)
    result = run(*SMALL, "--method", "bfla", "--json")
    assert result.exit_code == 130
    facts = json.loads(result.stdout)
    assert facts["stopped"] is True
    assert [one["method"] for one in facts["methods"]] == ["stock", "streaming"]
    assert "stopped after 2 of 3 readings" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere"), "--model nowhere"),
        (("--prompts", "gone.txt"), "there is no file or folder gone.txt"),
        (("--prompts", "bad.jsonl"), "bad.jsonl:1 is not JSON"),
        (("--prompts", "long.txt"), "the model reads at most 40960: pass --tokens 40896 or less"),
        (("--tokens", "50000"), "pass --tokens 40896 or less"),
        (("--layer", "9"), "--layer 9: the model has 6; pass 0 to 5"),
        (("--html", "nowhere/p.html"), "--html nowhere/p.html: there is no folder"),
        (("--method", "anchor"), "no method is named 'anchor'"),
    ],
)
def test_refused(arguments: tuple[str, ...], words: str) -> None:
    Path("bad.jsonl").write_text("{")
    Path("long.txt").write_text("apple " * 60_000)
    Path("nowhere.weights").mkdir()
    result = run("--device", "cpu", "--count", "1", *arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert words in " ".join(result.stderr.split())


def test_a_model_without_weights(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    result = run("--model", str(bare), "--device", "cpu")
    assert result.exit_code == 1
    assert f"--model {bare}" in " ".join(result.stderr.split())


@pytest.mark.parametrize("kind", ["qwen2", "gemma2-sdpa", "phi3", "gpt-oss"])
def test_models_of_other_types(kind: str, tmp_path: Path, embedded_tokenizer: Any) -> None:
    """`compare` and `fit`, as a new user would: layers with a sliding window run dense, and are said to."""
    path = tmp_path / kind
    build(kind, vocab_size=2048, max_position_embeddings=1024).save_pretrained(path)
    embedded_tokenizer.save_pretrained(path)
    own = ("--model", str(path), "--device", "cpu", "--threads", "1", "--count", "1", "--tokens", "300")
    settings = [f"streaming.{name}={value}" for name, value in (("window", 64), ("sink", 16), ("block", 16))]
    small = ("--method", "streaming", *(part for one in settings for part in ("--set", one)))
    result = CliRunner().invoke(app, ["compare", *own, *small, "--greedy", "4", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    sparse = facts["methods"][1]
    assert sparse["inside"]["kl"] > 0.0
    reasons = [layer["reason"] for layer in facts["outcomes"][1]["layers"]]
    assert SLIDING_LAYERS.get(kind, 0) == sum(bool(reason) for reason in reasons)
    result = CliRunner().invoke(app, ["fit", *own, *small, "--kl", "9", "-o", str(tmp_path / "p.json")])
    assert result.exit_code == 0, result.output
    assert Profile.load(tmp_path / "p.json").ranges[0].method == "streaming"


@pytest.mark.parametrize("tokens", ["256", "512"])
def test_notes_say_how_many_rows_there_were(tokens: str) -> None:
    given = ("--tokens", tokens, *SMALL[2:])
    facts = json.loads(run(*given, "--json").stdout)
    rows = facts["methods"][1]["inside"]["rows"]
    assert rows < int(tokens)
    text = " ".join(run(*given).stdout.split())
    assert f"over the {rows} rows of the whole prompt but its last 160" in text


def test_restated_passages_are_within_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(" ".join(text_lines()[:1500]))
    result = run("--prompts", "mine.txt", "--tokens", "3200", *SMALL[2:], "--json")
    assert result.exit_code == 0, result.output
    (prompt,) = json.loads(result.stdout)["prompts"]
    assert prompt["tokens"] <= 3200


def test_notes_of_several_prompts_and_of_ones_without_an_inside() -> None:
    def looked_at(*lengths: int) -> str:
        each = tuple(Outcome(Contender("x"), tokens=one) for one in lengths)
        return _looked_at([Summary(Contender("x"), len(lengths), each=each)], Sizes())["inside"]

    assert looked_at(4096, 512) == "the 4288 rows of 2 prompts, of the whole prompt but its last 160"
    assert looked_at(130) == "the 130 rows of the whole prompt"
    mixed = looked_at(4096, 130)
    assert mixed == "the 4066 rows of 2 prompts, of the whole prompt but its last 160, and over all of shorter ones"
