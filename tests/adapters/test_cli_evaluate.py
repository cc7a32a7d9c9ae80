"""The command `evaluate`, as a new user would try it without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.demo.model import load_tokenizer
from sparseprefill.adapters.evaluation import harness
from sparseprefill.adapters.huggingface import api
from sparseprefill.adapters.huggingface.identity import identity
from sparseprefill.adapters.huggingface.inspection import find_decoder
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from helpers.harness_tasks import cut_off, need_harness
from sparseprefill.profiles.profile import LengthRange, Profile

need_harness()

SMALL = ("--tasks", "niah_single_1", "--tokens", "1024", "--limit", "1", "--device", "cpu")
PROFILE = Path(__file__).parent / "vllm" / "embedded.profile.json"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["evaluate", "--threads", "1", *arguments])


def said(result: Result) -> str:
    return " ".join(result.stderr.split())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    tried = cut_off(monkeypatch)
    yield
    assert tried == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with the embedded tokenizer, and a profile whose short lengths run dense."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    load_tokenizer().save_pretrained(path)
    profile = Profile(
        methods=("streaming",),
        model=identity(find_decoder(model)),
        ranges=(
            LengthRange(least=0, tokens=1024, method=None, parameters=None),
            LengthRange(least=1500, tokens=2048, method="streaming", parameters={"sink": 1, "window": 32}),
        ),
    )
    (path / "its.profile.json").write_text(profile.to_json())
    return path


def test_the_table_of_the_embedded_model() -> None:
    result = run(*SMALL, "--method", "streaming", "--set", "window=64", "--method", "streaming", "--output", "all.json")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "the embedded model: cpu (1 thread), float32" in text
    head = next(line for line in result.stdout.splitlines() if line.strip().startswith("task"))
    # The harness gives no standard error of these scores: a column without values is left out.
    assert head.split() == ["task", "method", "score", "lost", "won", "density", "items", "tokens", "time"]
    stock, sparse = (line.split() for line in result.stdout.splitlines() if line.split()[-1:] == ["s"])
    assert stock[:2] == ["niah_single_1", "1,024"]
    assert "dense" in stock
    assert sparse[0] == "streaming"
    assert sparse[-5].endswith("%")
    assert "written: all.json" in text
    facts = json.loads(Path("all.json").read_text())
    assert [one["method"] for one in facts["runs"]] == ["stock", "streaming"]
    # Its own parameters are those that suit this model, but for the one that was set.
    assert facts["runs"][1]["parameters"] == {"sink": 128, "window": 64}
    assert facts["runs"][1]["service"]["sparse_calls"] == 6
    assert facts["stopped"] is False


def test_a_profile_names_its_method_and_what_it_leaves_dense_is_told(folder: Path) -> None:
    profile = ("--model", str(folder), "--profile", str(folder / "its.profile.json"))
    result = run(*SMALL, *profile, "--no-stock", "--json")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["runs"]
    assert one["method"] == "its.profile.json"
    assert (one["service"]["sparse_calls"], one["service"]["dense_calls"]) == (0, 2)
    result = run(*SMALL, *profile, "--tokens", "1024", "--tokens", "2048")
    text = " ".join(result.stdout.split())
    assert "niah_single_1 1,024: its.profile.json never ran sparse; its score is that of dense attention:" in text
    assert "niah_single_1 2,048: its.profile.json never" not in text
    assert "niah_single_1 1,024, niah_single_1 2,048: dense (stock) scores 0, so a method has nothing" in text
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("its.profile")]
    assert rows[0][-5] == "dense"
    assert rows[1][-5].endswith("%")


def test_ctrl_c_keeps_what_is_finished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attach, count = api.attach, 0
    kept: list[dict[str, Any]] = []

    def stops(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:  # two looks before the start, the first method, the second
            kept.append(json.loads(Path("kept.json").read_text()))  # what there would be if it were killed now
            raise KeyboardInterrupt
        return attach(*given, **named)

    monkeypatch.setattr(harness, "attach", stops)
    methods = ("--method", "streaming", "--method", "bfla")
    result = run(*SMALL, "--model", str(folder), *methods, "--json", "--output", "kept.json")
    assert result.exit_code == 130
    facts = json.loads(result.stdout)
    assert facts["stopped"] is True
    assert [one["method"] for one in facts["runs"]] == ["stock", "streaming"]
    assert kept == [facts] == [json.loads(Path("kept.json").read_text())]
    assert "stopped after 2 of 3 runs" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (),
            "nothing to compare with the stock model: pass --method, --config or --profile. Methods: anchor-attention",
        ),
        (("--method", "anchor"), "no method is named 'anchor'; did you mean 'anchor-attention'?"),
        (("--method", "streaming", "--set", "windov=3"), "streaming has no parameter 'windov'; did you mean 'window'?"),
        (("--config", "c.toml", "--set", "window=3"), "--set window=3: it changes a parameter of a method"),
        (
            ("--method", "streaming", "--tokens", "50000"),
            "--tokens 50000: the model reads at most 40960; pass that or less",
        ),
        (("--method", "streaming", "--output", "no/x.json"), "--output no/x.json: there is no folder"),
        (("--method", "streaming", "--profile", "none.json"), "profile is 'none.json'"),
        (("--method", "streaming", "--chat-template"), "the tokenizer has no chat template"),
    ],
)
def test_refused(arguments: tuple[str, ...], words: str) -> None:
    Path("c.toml").write_text('[estimator]\nstage = "streaming"\n')
    result = run(*SMALL, *arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert words in said(result)


def test_a_profile_of_another_model(folder: Path) -> None:
    result = run(*SMALL, "--model", str(folder), "--profile", str(PROFILE))
    assert result.exit_code == 1
    assert "was made for another model" in said(result)


@pytest.fixture
def _two_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The harness's index of all tasks finds those of two folders: it reads 13,000 files."""
    from lm_eval.tasks._index import TaskIndex

    whole = TaskIndex._iter_yaml_files

    def few(root: Path) -> Iterator[Path]:
        return (path for path in whole(root) if path.parent.name in ("ruler", "arc"))

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(few))
    harness._all_tasks.cache_clear()
    yield
    harness._all_tasks.cache_clear()


@pytest.mark.usefixtures("_two_folders")
def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    for name, nearest in (("ruler_tv", "ruler_vt"), ("arc_chalenge", "arc_challenge")):
        result = run("--method", "streaming", "--tasks", f"niah_single_1,{name}", "--device", "cpu")
        assert result.exit_code == 1
        assert f"tasks: the harness has no task, group or tag {name!r}; did you mean {nearest!r}" in said(result)
        assert len(said(result)) < 400


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None if name == "lm_eval" else object())
    result = run(*SMALL, "--method", "streaming")
    assert result.exit_code == 1
    assert said(result) == 'error: tasks need lm_eval: pip install -e ".[eval]" in a clone of sparseprefill'
