"""The command `try`: from a model to a verdict and a line to paste, within its time."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.calibration.candidates import Candidate, candidates
from sparseprefill.adapters.calibration.search import Search, Target, Trial
from sparseprefill.adapters.cli import attempt
from sparseprefill.adapters.cli.attempt import Verdict
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.progress import Bars
from sparseprefill.adapters.cli.searched import Run
from sparseprefill.adapters.cli.setup import Place
from sparseprefill.adapters.demo.text import text_lines
from sparseprefill.adapters.evaluation import clock
from sparseprefill.adapters.evaluation.clock import SideBySide, side_by_side
from sparseprefill.adapters.evaluation.comparison import Comparison
from sparseprefill.adapters.evaluation.outcome import (
    Contender,
    Copies,
    Divergence,
    Fidelity,
    Layer,
    Outcome,
    starved,
    unsteady,
)
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.huggingface import attach, dry_run
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import sparseprefill as sp
from helpers.hf_models import build
from sparseprefill.breakeven.gate import TABLE
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import Profile

from .test_cli import refused

STREAMING = sp.default_registry().get("streaming")
SMALL = ("--method", "streaming", "--tokens", "512", "--kl", "9", "--seconds", "60")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["try", *arguments, "--device", "cpu", "--threads", "1"])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("mine.txt").write_text(" ".join(text_lines()[:90]), encoding="utf-8")
    Path("short.txt").write_text("A short text.", encoding="utf-8")


def clocked(monkeypatch: pytest.MonkeyPatch, dense_wins_at: int) -> None:
    """From now on a prefill takes 2 s, and an attached one 1 s; 3 s of so many tokens or fewer."""

    def timed(self: Reader, ids: torch.Tensor) -> tuple[float, None]:
        attached = "sparseprefill" in self.model.config._attn_implementation
        return (2.0 if not attached else 1.0 if ids.shape[1] > dense_wins_at else 3.0), None

    monkeypatch.setattr(Reader, "timed", timed)
    monkeypatch.setattr(Reader, "clock", lambda self, ids, sizes, seconds: self.timed(ids))


@pytest.mark.usefixtures("_one_tokenizer")
def test_a_gain_ends_in_a_profile_that_serves_and_stays_dense_below_what_gained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, dense_wins_at=256)
    result = run(str(folder), *SMALL, "--json")
    assert 0 == result.exit_code, result.output
    facts = json.loads(result.stdout)
    assert (False, 512, [512, 256]) == (facts["dense"], facts["dense_below"], [one["tokens"] for one in facts["times"]])
    assert [2.0, 2 / 3] == pytest.approx([one["speed_up"] for one in facts["times"]])
    assert 'attach(model, profile="model.profile.json")' == facts["line"]
    profile = Profile.load("model.profile.json")
    assert [(0, None), (512, "streaming")] == [(one.least, one.method) for one in profile.ranges]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad(), attach(model, profile="model.profile.json", gate=None) as handle:
        model(torch.arange(400)[None])
        assert {"dense"} == {one.mode for one in handle.report().layers}
        model(torch.arange(600)[None])
        assert "sparse" in {one.mode for one in handle.report().layers}


@pytest.mark.usefixtures("_one_tokenizer")
def test_the_verdict_in_words_and_what_to_paste(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, dense_wins_at=0)
    result = run(str(folder), *SMALL, "--text", "mine.txt", "-o", "mine.json")
    assert 0 == result.exit_code, result.output
    said = " ".join(result.stdout.split())
    assert "Take streaming (" in said
    assert "Its whole prefill is 2.00 times as fast as dense attention's at 512 tokens (3 prefills of each" in said
    assert "Stay dense below 256 tokens (shorter ones were not timed)" in said
    assert "texts of 512 tokens are too short to restate passages in, so that only KL counted" in said
    assert 'attach(model, profile="mine.json")' in result.stdout.splitlines()
    (server,) = [line for line in result.stdout.splitlines() if line.startswith("--attention-backend CUSTOM")]
    table = json.loads(server.partition("'")[2].rstrip("'"))
    assert {"sparseprefill": {"profile": str(Path("mine.json").absolute())}} == table
    assert "1 text of 512 tokens, 1 method; about 60 s" in result.stderr
    assert re.search(
        r"dense attention: 2\.00 s a prefill; there is time for about \d readings of a text", result.stderr
    )
    assert 1 == result.stderr.count("streaming (")


@pytest.mark.usefixtures("_one_tokenizer")
def test_where_dense_wins_nothing_is_written_and_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, dense_wins_at=512)
    monkeypatch.setattr(Reader, "clock", lambda self, ids, sizes, seconds: (2.0 if _stock(self) else 1.0, None))
    result = run(str(folder), *SMALL)
    assert 0 == result.exit_code, result.output
    said = " ".join(result.stdout.split())
    assert "Stay dense up to 512 tokens: streaming (" in said
    assert "but its whole prefill is 0.67 times as fast" in said
    assert "attach(" not in said
    assert not Path("model.profile.json").exists()


@pytest.mark.usefixtures("_one_tokenizer")
def test_where_windows_gain_by_themselves_every_key_is_the_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with sliding windows a method must be faster than every key of its other layers; here none is."""
    clocked(monkeypatch, dense_wins_at=256)
    monkeypatch.setattr(dry_run, "windows", lambda model: (0,))
    result = run(str(folder), *SMALL, "--json")
    assert 0 == result.exit_code, result.output
    facts = json.loads(result.stdout)
    assert (False, 512, "") == (facts["dense"], facts["dense_below"], facts["server"])
    assert [512, 256] == [one["tokens"] for one in facts["times"]]
    assert facts["windows"] == facts["times"][0]
    profile = Profile.load("model.profile.json")
    assert [(0, None), (512, "dense")] == [(one.least, one.method) for one in profile.ranges]
    said = " ".join(facts["said"])
    assert "times as fast as the model's own attention at 512 tokens" in said
    assert "No method is 1.05 times as fast as that. A server has it anyway." in said
    assert "Keep the model's own below 512 tokens (0.67 times at 256)" in said
    shown = run(str(folder), *SMALL).stdout
    assert "In transformers:" in shown
    assert "vllm serve" not in shown


@pytest.mark.usefixtures("_one_tokenizer")
def test_where_every_key_fails_it_says_that_the_windows_gain_is_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, dense_wins_at=256)
    monkeypatch.setattr(dry_run, "windows", lambda model: (0,))
    whole = Comparison.run

    def fails(self: Comparison, contender: Contender, *more: Any) -> Outcome:
        failed = contender.label == "dense"
        return Outcome(contender, "p", error="out of memory") if failed else whole(self, contender, *more)

    monkeypatch.setattr(Comparison, "run", fails)
    result = run(str(folder), *SMALL)
    assert 0 == result.exit_code, result.output
    words = "dense is left out: it failed, so that what windows gain by themselves is not known: out of memory"
    assert words in " ".join(result.stdout.split())
    assert "Take streaming (" in result.stdout


@pytest.mark.usefixtures("_one_tokenizer")
def test_a_reading_that_outlasts_the_time_is_told_before_it_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, dense_wins_at=0)
    result = run(str(folder), *SMALL[:-2], "--seconds", "3")
    assert 0 == result.exit_code, result.output
    _, dense, method = result.stderr.splitlines()
    assert re.fullmatch(
        r"dense attention: 2\.00 s for its first prefill, which warms up; a reading of a text with a method takes "
        r"about 6\.0 s, and outlasts the [0-2]\.\d s that are left: one is made in any case; pass more --seconds, "
        r"or fewer --tokens",
        dense,
    )
    assert method.startswith("streaming (")


@pytest.mark.usefixtures("_one_tokenizer")
def test_dense_attention_is_timed_again_where_there_is_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "clock", lambda self, ids, sizes, seconds: (3.0, None))
    times: Iterator[float] = iter([1.0])
    monkeypatch.setattr(Reader, "timed", lambda self, ids: (next(times, 2.0), None))
    result = run(str(folder), *SMALL, "--json")
    assert "dense attention: 1.00 s a prefill; there is time for about 1" in result.stderr
    assert 1.0 == json.loads(result.stdout)["search"]["dense"]["seconds"] * 4 - 9.0, "of four texts one"


@pytest.mark.usefixtures("_one_tokenizer")
def test_a_reading_shows_its_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Bars, "doing", lambda self, *step: seen.append(step))
    run(str(folder), *SMALL)
    layers = [(0, 2), (1, 2), (2, 2)]
    assert [("dense", *one) for one in layers] == seen[:3]
    assert [("streaming: prefill", *one) for one in layers] == [one for one in seen if "prefill" in one[0]][:3]


@pytest.mark.usefixtures("_one_tokenizer")
@pytest.mark.parametrize(
    "given",
    [
        ("try", "{}", *SMALL[:2], "--kl", "9", "--seconds", "1"),
        ("fit", "--model", "{}", "--method", "streaming", "--count", "1", "--kl", "9", "--minutes", "0.01"),
        ("compare", "--model", "{}", "--method", "streaming", "--count", "1", "--greedy", "16"),
    ],
)
def test_texts_of_the_models_own_length_leave_room_for_what_follows(given: tuple[str, ...], folder: Path) -> None:
    options = ["--tokens", "1024", "--device", "cpu", "--threads", "1"]
    result = CliRunner().invoke(app, [one.format(folder) for one in given] + options)
    assert 0 == result.exit_code, result.output
    said = " ".join(result.stderr.split())
    assert "--tokens 1,024: texts have 1,008, as the model reads 1,024, and 16 more follow a text" in said
    assert "1,008 tokens" in result.stdout


def test_windows_are_found() -> None:
    assert ((0,), ()) == (dry_run.windows(build("gemma3")), dry_run.windows(build("llama")))


def _stock(reader: Reader) -> bool:
    return "sparseprefill" not in reader.model.config._attn_implementation


@pytest.mark.usefixtures("_one_tokenizer")
def test_it_ends_with_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of methods that all reach the target one is tried before the time is up, and timed once."""
    clocked(monkeypatch, dense_wins_at=0)
    now = iter(range(0, 10**6, 100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    result = run(str(folder), "--tokens", "512", "--kl", "9", "--seconds", "60", "--json")
    assert 0 == result.exit_code, result.output
    facts = json.loads(result.stdout)
    assert ["rowmax"] == [one["method"] for one in facts["search"]["trials"]], "the most promising comes first"
    assert [512] == [one["tokens"] for one in facts["times"]]
    assert [1] == [len(one["seconds"]) for one in facts["times"]]
    assert any("There was no time for" in text for text in facts["said"])
    assert {"kascade", "share-prefill"} == set(facts["left_out"])


@pytest.mark.usefixtures("_one_tokenizer")
def test_ctrl_c_while_it_times_keeps_the_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, dense_wins_at=0)
    whole = side_by_side

    def stops(model: Any, ids: Any, *more: Any) -> SideBySide:
        if len(ids) < 512:
            raise KeyboardInterrupt
        return whole(model, ids, *more)

    monkeypatch.setattr(clock, "side_by_side", stops)
    result = run(str(folder), *SMALL)
    assert 130 == result.exit_code, result.output
    assert "written: model.profile.json" in " ".join(result.stderr.split())
    assert [0, 512] == [one.least for one in Profile.load("model.profile.json").ranges]


@pytest.mark.usefixtures("_one_tokenizer")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--text", "none.txt"), "--text: there is no file or folder none.txt"),
        (("--text", "short.txt"), "below 256 there is nothing to gain"),
        (("--text", "mine.txt", "--tokens", "900000"), "the model reads at most 1024"),
        (("--tokens", "1025"), "the model reads at most 1024: pass --tokens 1008 or less"),
        (("--method", "kascade"), "--method kascade: it needs a table of this model's layers"),
        (("--method", "sample"), "no method is named 'sample'"),
        (("-o", "no/such.json"), "--output no/such.json: there is no folder"),
    ],
)
def test_it_refuses(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    refused(run(str(folder), *arguments), words)


def test_it_refuses_what_is_no_model() -> None:
    refused(run("short.txt"), "MODEL short.txt: that is a file")
    refused(run("./nowhere"), "MODEL ./nowhere: there is no such folder")


def test_the_longest_text_is_one_that_every_method_has_time_for() -> None:
    def length(longest: int, seconds: float) -> int:
        return attempt._length(lambda tokens: 1.0, longest, 10, seconds)

    assert (4096, 4096, 8192) == (length(30000, 10.0), length(30000, 239.0), length(30000, 240.0))
    assert (30000, 3000, 65536) == (length(30000, 1e6), length(3000, 1e6), length(65536, 1e6))


def kept(copies: Copies, kl: float = 0.01) -> tuple[Outcome, ...]:
    near = Divergence(torch.full((10,), kl, dtype=torch.float64), 1.0 - kl)
    layers = (Layer(0, 0.25, (1.0,), (1.0,)),)
    made = Outcome(Contender("x"), "p", 4096, Fidelity(near, near, near, near, None), 1.0, layers=layers)
    return (evolve(made, copies=copies),)


def verdict(*times: SideBySide, copies: Copies, stock: Copies, shortfall: float = 2.0) -> Verdict:
    identity = ModelIdentity(name="m", architecture="M", layers=2, heads=4, kv_heads=2, head_dim=32, digest="0")
    place = Place(torch.device("cpu"), torch.float32, 1)
    of = Run(
        target=Target(kl=0.1), by="seconds", methods=["streaming"], identity=identity, output=Path("p.json"),
        place=place, how={},
    )  # fmt: skip
    trial = Trial(Candidate(STREAMING, {}), kept(copies), 0.5 if times else shortfall)
    dense = Outcome(Contender("stock"), "p", 4096, seconds=2.0, copies=stock)
    chosen, reason = (trial, "") if times else (None, "KL of at most 0.001: no setting reaches it")
    return Verdict(of, Search(4096, 1, "seconds", (dense,), (trial,), chosen, reason, 0), times, 12.0)


GOOD, DENSE = Copies(90, 100, 1.0, 95), Copies(95, 100, 1.0, 95)
WON, LOST = SideBySide(4096, (2.0, 2.2), (1.0, 1.1)), SideBySide(1024, (0.2,), (0.3,))


def test_what_is_said_of_a_model_that_copies() -> None:
    one = verdict(WON, evolve(WON, tokens=2048), LOST, copies=GOOD, stock=DENSE)
    assert one.below == 2048
    assert one.said[0] == (
        "Take streaming (defaults). It copies 90 tokens, dense attention 95, its next tokens are "
        "0.0100 nats (KL) from dense attention's, inside the prompt, and it computes 25% of the pairs."
    )
    assert one.said[1:] == [
        "Its whole prefill is 2.00 times as fast as dense attention's at 4,096 tokens (2 prefills of each, in turns).",
        "Stay dense below 2,048 tokens (0.67 times at 1,024); the profile does.",
    ]


def test_what_windows_gain_is_told_of_a_method_that_gains_more() -> None:
    alone = SideBySide(4096, (2.0,), (1.6,))
    one = evolve(verdict(WON, LOST, copies=GOOD, stock=DENSE), windows=alone)
    assert one.said[2] == (
        "Layers with a sliding window compute their window alone, where the model's own attention in transformers "
        "computes every key. That alone is 1.25 times as fast. A server has it anyway."
    )
    assert one.server
    assert [False, True, True] == [attempt.enough(alone, times) for times in ([WON], [alone], [])]
    assert not attempt.enough(SideBySide(4096, (2.0,), (1.95,)), []), "that is noise"


def test_every_key_of_a_model_without_windows_is_no_word_about_windows() -> None:
    one = verdict(WON, LOST, copies=GOOD, stock=DENSE)
    (trial,) = one.found.trials
    every = evolve(trial, candidate=Candidate(sp.default_registry().get("dense"), {}))
    said = " ".join(evolve(one, found=evolve(one.found, chosen=every, trials=(every,))).said)
    assert "That is every key by this library, whose kernels are faster here than the model's own attention." in said
    assert "window" not in said
    assert "No method" not in said


def test_where_nothing_keeps_enough_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    one = verdict(copies=GOOD, stock=DENSE)
    assert (False, "", "", None) == (one.gains, one.line, one.server, one.facts["profile"])
    assert one.said[0] == "Stay dense: KL of at most 0.001: no setting reaches it."
    assert one.said[1].startswith("The nearest was streaming (defaults): it copies 90 tokens, dense attention 95")
    one.show("m")
    assert "attach(" not in capsys.readouterr().out


def test_what_keeps_enough_and_is_slower_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TABLE)
    one = verdict(copies=GOOD, stock=DENSE, shortfall=0.5)
    assert one.said[0].startswith(
        "Stay dense up to 4,096 tokens: streaming (defaults) keeps enough (it copies 90 tokens"
    )
    assert one.said[0].endswith("but a prefill takes 1.00 s, and 2.00 s dense.")
    assert one.said[1] == "Longer prompts may gain: pass --tokens 8192."
    later = evolve(one.found.trials[0].candidate, method=sp.default_registry().get("anchor-attention"))
    found = evolve(one.found, trials=(evolve(one.found.trials[0], candidate=later),))
    cpu = attempt.Expected.of(Place(torch.device("cpu"), torch.float32, 2), one.run.identity)
    least = cpu.least("anchor-attention")
    assert least is not None
    assert 8192 < least < 32768
    assert evolve(one, found=found, expected=cpu).said[1] == (
        f"Longer prompts may gain (by the device's break-even table anchor-attention from {least:,} on): pass --tokens "
        f"{16384 if least <= 16384 else 32768}."
    )
    assert evolve(one, longest=6000).said[1] == "Its longest text has 6,000 tokens, so nothing is left to try."


def test_on_a_cpu_methods_that_cannot_pay_there_are_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelIdentity(name="m", architecture="M", layers=2, heads=9, kv_heads=3, head_dim=64, digest="0" * 16)
    place = Place(torch.device("cpu"), torch.float32, 2)
    assert attempt.Expected.of(place, model).at("skip-softmax", 8192), "no table, no preference"
    monkeypatch.delenv(TABLE)
    cpu = attempt.Expected.of(place, model)
    assert cpu.at("rowmax", 8192)
    assert not any(cpu.at(name, 8192) for name in ("skip-softmax", "sample-attention"))
    methods = [sp.default_registry().get(name) for name in ("skip-softmax", "streaming", "rowmax")]
    last = [one.name for one in methods if not cpu.at(one.name, 8192)]
    assert [one.name for one in candidates(methods, last=last)[:3]][::2] == ["rowmax", "streaming"]
    assert [one.name for one in candidates(methods, last=["rowmax"])[:3]] == ["skip-softmax", "streaming", "rowmax"]


def test_methods_that_there_was_no_time_for_are_named_with_the_time_for_all() -> None:
    one = verdict(copies=GOOD, stock=DENSE, shortfall=0.5)
    run, found = evolve(one.run, methods=["rowmax", "streaming"]), evolve(one.found, untried=9)
    said = Verdict(run, found, (), 150.0).said
    assert "There was no time for rowmax: pass about --seconds 420 for all methods." in said
    assert "There was no time for 9 more settings; --seconds gives it." in evolve(one, found=found).said


def test_a_model_that_cannot_copy_is_named() -> None:
    poor = Copies(3, 100, 1.0, 3)
    one = verdict(WON, LOST, copies=poor, stock=poor)
    assert any("the model cannot copy: its own attention goes on rightly with 3 of 100" in text for text in one.said)
    assert "it copies" not in one.said[0].lower()


def test_times_that_lie_apart_are_named() -> None:
    one = verdict(SideBySide(4096, (2.0, 9.0), (1.0, 1.0)), LOST, copies=GOOD, stock=DENSE)
    assert any("took 2.00 to 9.00 s for the same prefill" in text for text in one.said)
    assert "" == unsteady((2.0, 2.9)) == unsteady((1.0,)) == unsteady(())


def test_a_process_that_waits_for_a_processor_says_that_its_times_mean_little() -> None:
    one = evolve(verdict(WON, LOST, copies=GOOD, stock=DENSE), doubt=starved(30.0, 100.0))
    assert any("this process had 30% of one processor" in text for text in one.said)
    assert "" == starved(90.0, 100.0) == starved(190.0, 100.0)


@pytest.mark.usefixtures("_one_tokenizer")
def test_turns_alternate_and_leave_the_model_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen: list[bool] = []

    def timed(self: Reader, ids: torch.Tensor) -> tuple[float, None]:
        seen.append(_stock(self))
        return float(len(seen)), None

    monkeypatch.setattr(Reader, "timed", timed)
    contender = Contender("streaming", sp.build("streaming"))
    found = side_by_side(model, range(300), contender, 3, until=1.0, now=lambda: 0.0)
    assert [True, False] * 3 == seen
    assert ((1.0, 3.0, 5.0), (2.0, 4.0, 6.0)) == (found.stock, found.own)
    assert pytest.approx(3 / 4) == found.speed_up
    assert _stock(Reader(model))
    assert 1 == len(side_by_side(model, range(300), contender, 3, until=0.0, now=lambda: 0.0).own)
