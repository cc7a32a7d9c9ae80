"""The command line: what is installed, and how it fails."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from sparseprefill.adapters.cli import app as start
from sparseprefill.adapters.cli import options
from sparseprefill.adapters.cli.commands import app
from typer.main import get_command
from typer.testing import CliRunner, Result

from helpers.correctors import Blend, blending
from helpers.harness_tasks import need_harness
from sparseprefill import Method, MethodCollisionError, ParameterError, Pipeline, RecallFloor, Registry, Sink, hookimpl
from sparseprefill import registry as registries
from sparseprefill.executors.auto import AutoExecutor


def invoke(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), terminal_width=columns)


def refused(result: Result, *words: str, status: int = 1) -> None:
    """One line on standard error, nothing on standard output, no traceback."""
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


@frozen(kw_only=True)
class _Config:
    """width: tokens that a query sees. must: has no default. shape: made anew."""

    must: int
    width: int = 3
    shape: list[int] = field(factory=list)


class _Plugin:
    @hookimpl
    def sparseprefill_methods(self) -> list[Method]:
        return [Method(name="odd", summary="a test", config=_Config, build=lambda config: None)]  # type: ignore[arg-type,return-value]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    fresh = Registry()
    fresh.register(_Plugin(), "mine", "my-distribution", "1.2")
    monkeypatch.setattr(registries, "default_registry", lambda: fresh)
    return fresh


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, version("sparseprefill"))


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    for command in ("demo", "methods", "show", "plugins", "new", "--install-completion"):
        assert command in result.stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_says_each_summary_whole(columns: int) -> None:
    """No summary ends in dots, and no line where the source's does: words go on as far as the terminal does."""
    group: Any = get_command(app)
    text = _letters(invoke("--help", columns=columns).stdout)
    for name in group.list_commands(None):
        summary, *paragraphs = (inspect.getdoc(group.get_command(None, name).callback) or "").split("\n\n")
        assert _letters(f"{name} {summary}") in text
        shown = invoke(name, "--help", columns=columns).stdout
        assert max(map(len, shown.splitlines())) <= columns
        for paragraph in paragraphs:
            lines = _paragraph(shown, paragraph.split()[:2])
            assert _letters("".join(lines)) == _letters(paragraph)
            for line, after in pairwise(lines):  # full lines: the next word would not have fitted
                assert len(f"  {line} {after.split()[0]}") > columns


def _letters(text: str) -> str:
    """The text without its spaces: lines end behind hyphens too."""
    return "".join(text.split())


def _paragraph(text: str, beginning: list[str]) -> list[str]:
    """The lines of the indented paragraph that begins with these words."""
    (found,) = [part for part in text.split("\n\n") if part.split()[:2] == beginning]
    return [line.strip() for line in found.splitlines()]


LOADED = "a model was loaded"


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody loads a model's weights; in a folder with a broken file of prompts, and one that is no model."""
    import transformers
    from sparseprefill.adapters.demo import model

    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError(LOADED)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model, "load_model", loaded)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}')
    (tmp_path / "short.txt").write_text("two words")
    (tmp_path / "empty").mkdir()


HUGE = "99999999999"
MODELS = ("compare", "fit", "evaluate --method bfla", "cluster", "anchors")


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize("command", MODELS)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nope", ("--model /nope: there is no such folder", "pass the folder")),
        ("no/such/folder", ("--model no/such/folder: there is no such folder", "pass the folder")),
        ("./nope", ("--model ./nope: there is no such folder",)),
        ("", ("--model ''", "pass the folder")),
        ("empty", ("--model empty: the folder holds no config.json",)),
        ("short.txt", ("--model short.txt: that is a file",)),
    ],
)
def test_a_folder_that_holds_no_model(command: str, path: str, words: tuple[str, ...]) -> None:
    result = invoke(*command.split(), "--model", path)
    refused(result, *words)
    assert "repo" not in result.stderr.lower()


@pytest.mark.usefixtures("_no_model")
def test_a_name_that_is_no_folder_here_is_told_so() -> None:
    refused(invoke("compare", "--model", "nowhere"), "--model nowhere: there is no such folder, and by that name:")


@pytest.mark.usefixtures("_no_model", "_one_tokenizer")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compare --prompts /nope", ("there is no file or folder /nope",)),
        ("compare --prompts bad.jsonl", ("bad.jsonl:1: prompt is 3: pass a string",)),
        ("compare --prompts short.txt", ("'short.txt' has", "pass one of more than 64")),
        ("compare --layer 9", ("--layer 9: the model has 6; pass 0 to 5",)),
        (f"compare --tokens {HUGE}", (HUGE, "pass --tokens 40896 or less")),
        (f"compare --greedy {HUGE}", (f"--greedy {HUGE}", "reads at most 40960")),
        (f"compare --held-back {HUGE}", (HUGE, "pass one of more than")),
        ("fit --prompts /nope", ("there is no file or folder /nope",)),
        ("fit --prompts short.txt", ("no prompt has 256 tokens",)),
        (f"fit --tokens {HUGE}", (f"--tokens {HUGE}", "pass --tokens 40944 or less")),
        ("fit --set bfla.blok=3", ("no parameter 'blok'",)),
        (f"demo --tokens {HUGE}", (f"--tokens {HUGE}", "at most 40960; pass that or less")),
        ("demo --tokens 256", ("--tokens 256 --questions 2", "more tokens")),
        ("demo --tokens 1024 --head 7", ("--head 7: the model has 4; pass 0 to 3",)),
        (f"cluster --tokens {HUGE}", (f"--tokens {HUGE}", "at most 40960; pass that or less")),
        (f"anchors --tokens {HUGE}", (f"--tokens {HUGE}", "at most 40960; pass that or less")),
        ("anchors --tokens 256", ("--tokens 256", "pass longer ones than 256")),
        ("anchors --tokens 200", ("--tokens 200", "pass longer ones than 256")),
        (f"evaluate --method bfla --tokens {HUGE}", (f"--tokens {HUGE}", "at most 40960; pass that or less")),
        ("evaluate --method bfla --chat-template", ("the tokenizer has no chat template",)),
        (f"calibrate --tokens {HUGE}", (f"--tokens {HUGE}", "or less")),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(command: str, words: tuple[str, ...]) -> None:
    if command.startswith("evaluate"):
        need_harness()
    refused(invoke(*command.split(), "--device", "cpu"), *words)


@pytest.mark.usefixtures("_no_model", "_one_tokenizer")
def test_a_model_that_says_no_length_reads_what_its_device_has_room_for(folder: Path, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    facts = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps({**facts, "max_position_embeddings": 0}))
    refused(invoke("anchors", "--model", str(endless), "--tokens", HUGE * 2, "--device", "cpu"), "GB, and cpu has")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 9 GiB\nmore"),
    ],
)
def test_too_little_memory_is_no_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("sparseprefill.adapters.cli.render.write_json", fail)
    refused(invoke("methods", "--json"), "memory", "pass shorter lengths or smaller sizes")
    error.args = ("anything else",)
    if not isinstance(error, MemoryError):
        assert isinstance(invoke("methods", "--json").exception, RuntimeError)


@pytest.mark.usefixtures("_no_model", "_one_tokenizer")
@pytest.mark.parametrize("command", [*MODELS, "demo"])
def test_ctrl_c_while_a_model_loads(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.startswith("evaluate"):
        need_harness()
        command += " --tasks niah_single_1 --tokens 1024 --limit 1"
    elif not command.startswith("compare"):
        command += " --tokens 1024"

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparseprefill.adapters.demo.model.load_model", interrupted)
    refused(invoke(*command.split(), "--device", "cpu"), "stopped: nothing was written", status=130)


@pytest.mark.parametrize("command", ["demo", "cluster", "anchors"])
def test_a_seed_that_no_generator_takes(command: str) -> None:
    for seed in ("9" * 25, "-1"):
        refused(invoke(*command.split(), "--seed", seed), "--seed", status=2)


def test_completion_takes_no_offence_at_a_model() -> None:
    command: Any = get_command(app)
    context = command.commands["compare"].make_context("compare", ["--model", "/nope"], resilient_parsing=True)
    assert context.params["model"] == "/nope"


def test_methods() -> None:
    result = invoke("methods")
    assert result.exit_code == 0
    for name in ("anchor-attention", "streaming", "vertical-slash", "dense"):
        assert name in result.stdout
    rows = json.loads(invoke("methods", "--json").stdout)
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    assert all(set(row) == {"name", "summary", "paper"} for row in rows)


@pytest.mark.parametrize("name", [row["name"] for row in json.loads(invoke("methods", "--json").stdout)])
def test_show_every_method(name: str) -> None:
    assert invoke("show", name).exit_code == 0
    facts = json.loads(invoke("show", name, "--json").stdout)
    assert set(facts) == {"name", "summary", "paper", "grain", "stages", "parameters"}
    assert facts["stages"][0]["role"] == "estimator"
    assert "executor" in [stage["role"] for stage in facts["stages"]]
    for parameter in facts["parameters"]:
        assert set(parameter) == {"name", "type", "default", "bounds", "doc", "required"}
        assert parameter["bounds"], parameter
        assert parameter["doc"], parameter


def test_show_anchor_attention() -> None:
    facts = json.loads(invoke("show", "anchor-attention", "--json").stdout)
    step = next(one for one in facts["parameters"] if one["name"] == "step")
    assert step["default"] == 16
    assert step["bounds"] == "integer >= 1"
    assert step["doc"] == "query blocks per group; the group shares its stripes."
    assert facts["grain"] == 2048
    text = " ".join(invoke("show", "anchor-attention").stdout.split())
    assert "integer >= 1" in text
    assert "AnchorEstimator" in text
    assert "2048 tokens" in text


def test_show_a_method_with_a_required_parameter(registry: Registry) -> None:
    facts = json.loads(invoke("show", "odd", "--json").stdout)
    must, width, shape = facts["parameters"]
    assert (must["required"], must["default"], must["doc"]) == (True, None, "has no default.")
    assert (width["required"], width["default"], width["bounds"]) == (False, 3, "")
    assert shape["default"] == []
    assert facts["stages"] == []
    assert "required" in invoke("show", "odd").stdout


PARTS = [*(("refiner", name) for name in registries.default_registry().refiners()), ("corrector", "blend")]


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=[name for _, name in PARTS])
def test_show_every_refiner_and_a_corrector(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries, "default_registry", blending)
    facts = json.loads(invoke("show", name, "--kind", kind, "--json").stdout)
    assert set(facts) == {"name", "kind", "summary", "class", "from", "parameters"}
    assert (facts["name"], facts["kind"]) == (name, kind)
    assert facts["summary"]
    assert facts["from"].startswith("plugin '")
    assert all(parameter["bounds"] for parameter in facts["parameters"])
    text = invoke("show", name, "--kind", kind).stdout
    assert f"{kind}: {facts['class']}, from plugin" in text


def test_show_says_what_else_has_the_name() -> None:
    text = " ".join(invoke("show", "skip-softmax").stdout.split())
    assert "There is a refiner of this name too: sparseprefill show skip-softmax --kind refiner" in text
    assert "of this name too" not in invoke("show", "sink").stdout


def test_show_of_a_kind_that_is_none() -> None:
    refused(invoke("show", "sink", "--kind", "refinr"), "--kind refinr: it is none; did you mean 'refiner'?")
    refused(invoke("show", "sink", "--kind", "method"), "no method is named 'sink'")
    refused(invoke("show", "sinc"), "no method, refiner or corrector is named 'sinc'; did you mean 'sink'?")


def test_set_takes_refiners_and_a_corrector() -> None:
    known = blending()
    texts = ["streaming.sink=64", 'streaming.refiners=[{"name": "sink", "tiles": 2}]', "streaming.corrector=blend"]
    texts += ['streaming.executor={"precision": "int8"}']
    (made,) = options.contenders(known, ["streaming"], texts, floor=0.9)
    pipeline = made.pipeline
    assert isinstance(pipeline, Pipeline)
    assert pipeline.refiners == (Sink(2), RecallFloor(target=0.9))  # the floor stands behind all of them
    assert pipeline.corrector == Blend()
    assert pipeline.executor == AutoExecutor(precision="int8")
    for text, message in {
        'streaming.refiners=[{"name": "sinc"}]': r"streaming\.refiners\[0\]\.name: no refiner is named 'sinc'",
        "streaming.corrector=blond": r"streaming\.corrector: no corrector is named 'blond'; did you mean 'blend'",
        "streaming.refinres=[]": "streaming has no parameter 'refinres'",
    }.items():
        with pytest.raises(ParameterError, match=message):
            options.contenders(known, ["streaming"], [text])


def test_plugins() -> None:
    rows = json.loads(invoke("plugins", "--json").stdout)
    keys = {"name", "distribution", "version", "methods", "refiners", "correctors", "kernels", "error"}
    assert all(set(row) == keys for row in rows)
    stem = next(row for row in rows if row["name"] == "stem")
    assert (stem["methods"], stem["refiners"]) == ([], ["position-decay", "value-weights"])
    classic = next(row for row in rows if row["name"] == "classic")
    assert classic["distribution"] == "sparseprefill"
    assert classic["methods"] == ["dense", "streaming", "vertical-slash"]
    assert classic["error"] is None


def test_plugins_shows_what_broke(registry: Registry) -> None:
    class Point:
        name, dist = "broken", None

        def load(self) -> Any:
            raise ImportError("no module named 'gone'")

    registry.load_entry_points([Point()])  # type: ignore[list-item]
    row = next(row for row in json.loads(invoke("plugins", "--json").stdout) if row["name"] == "broken")
    assert row["error"] == "ImportError: no module named 'gone'"
    assert row["methods"] == []
    text = " ".join(invoke("plugins").stdout.split())
    assert "ImportError" in text
    assert "my-distribution" in text


def test_unknown_method_lists_the_nearest() -> None:
    refused(invoke("show", "anchor-atention"), "'anchor-atention'", "did you mean 'anchor-attention'")


def test_an_error_of_the_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def collide() -> Registry:
        raise MethodCollisionError("method 'a' is offered\nby two")

    monkeypatch.setattr(registries, "default_registry", collide)
    for command in ("methods", "plugins"):
        refused(invoke(command), "method 'a' is offered by two")


def test_usage_errors_are_one_line() -> None:
    refused(invoke("shwo"), "there is no command 'shwo'; did you mean 'show'?", status=2)
    refused(invoke("xyzzy"), "there is no command 'xyzzy'. Known: anchors, calibrate, ", status=2)
    refused(invoke("show"), "Missing argument", status=2)
    refused(invoke("methods", "--yaml"), "--yaml", status=2)


def test_what_is_missing_comes_with_a_whole_line() -> None:
    """In every command that needs an argument or an option; and the line itself is understood."""
    group: Any = get_command(app)
    seen = []
    for name in group.list_commands(None):
        needed = [one for one in group.get_command(None, name).params if one.required]
        if not needed:
            continue
        seen.append(name)
        result = invoke(name)
        refused(result, "Missing argument", f" Such as: sparseprefill {name} ", status=2)
        line = shlex.split(result.stderr.partition("Such as: sparseprefill ")[2])
        context = group.get_command(None, name).make_context(name, line[1:], resilient_parsing=True)
        assert all(context.params[one.name] for one in needed)
    assert {"try", "show", "new", "replay", "vllm-check", "vllm-report", "sglang-report"} == set(seen)
    refused(invoke("vllm-check", "{}"), "Missing option '--model'. Such as: ", "--model ./my-model", status=2)


def test_missing_extra() -> None:
    """A fresh Python with nothing of it, and then with one part missing at a time."""
    code = f"""
import os, sys
sys.modules.update(dict.fromkeys({start.NEEDED!r}))
from sparseprefill.adapters.cli.app import main
for lacking in {start.NEEDED!r}:
    if not os.fork():
        for name in set({start.NEEDED!r}) - {{lacking}}:
            del sys.modules[name]
        main()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    missing = (*start.NEEDED, ", ".join(start.NEEDED))
    lines = [
        f'error: the command line needs {name}: pip install -e ".[cli]" in a clone of sparseprefill' for name in missing
    ]
    assert done.stderr.splitlines() == lines


@pytest.mark.parametrize("command", start.LIGHT)
def test_commands_for_servers_do_without_what_draws(command: str) -> None:
    """Their servers bring the other two."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "jinja2")))
sys.modules.update(dict.fromkeys({{lacking!r}}))
from sparseprefill.adapters.cli.app import main
sys.argv = ["sparseprefill", {command!r}, "--help"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code.format(lacking=())], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert command in done.stdout
    lacking = code.format(lacking=("rich",))
    done = subprocess.run([sys.executable, "-c", lacking], capture_output=True, text=True, check=False)
    extra = start.LIGHT[command]
    assert (
        done.stderr == f'error: the command line needs rich: pip install -e ".[{extra}]" in a clone of sparseprefill\n'
    )
