"""Fitting: how the search halves, stops, and spares layers; what the command writes, and what attach makes of it."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, evolve, field
from sparseprefill.adapters.calibration.candidates import Candidate, candidates
from sparseprefill.adapters.calibration.fit import break_even, ranges
from sparseprefill.adapters.calibration.search import FEWEST, Searcher, Target, halving
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.demo.text import text_lines
from sparseprefill.adapters.evaluation.comparison import Comparison
from sparseprefill.adapters.evaluation.outcome import Contender, Divergence, Fidelity, Layer, Outcome
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.reading import Sizes
from sparseprefill.adapters.huggingface import attach
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import sparseprefill as sp
from lab.bench.clock import Clock
from sparseprefill.errors import ParameterError
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile

from .test_cli import refused

STREAMING = sp.default_registry().get("streaming")
TARGET = Target(kl=0.1)


def outcome(kl: float, density: float, seconds: float = 1.0, recalls: tuple[float, ...] = (1.0,)) -> Outcome:
    near = Divergence(torch.full((10,), kl, dtype=torch.float64), 1.0 - kl)
    layers = tuple(Layer(i, density, (one,), (one,)) for i, one in enumerate(recalls))
    return Outcome(Contender("x"), "p", 64, Fidelity(near, near, near, near, None), seconds, layers=layers)


@define
class Made:
    """Made-up figures by the window of a candidate: KL (which may differ by prompt), and density = window / 100."""

    kl: Callable[[Candidate, int], float]
    count: int = 4
    recalls: tuple[float, ...] = (1.0,)
    read: list[tuple[int, int]] = field(factory=list)
    stop_at: int = 10**9
    failing: frozenset[int] = frozenset()

    def stock(self, prompt: int) -> Outcome:
        return Outcome(Contender("stock"), "p", 64, None, 1.0, layers=(Layer(0, 1.0, (1.0,)),))

    def run(self, candidate: Candidate, prompt: int) -> Outcome:
        window = candidate.parameters["window"]
        if len(self.read) == self.stop_at:
            raise KeyboardInterrupt
        self.read.append((window, prompt))
        if window in self.failing:
            return Outcome(Contender("x"), "p", error="broken")
        spared = len(candidate.dense_layers) / max(1, len(self.recalls))
        density = window / 100 * (1.0 - spared) + spared
        return outcome(self.kl(candidate, prompt), density, density, self.recalls)


def windows(*given: int) -> list[Candidate]:
    return [Candidate(STREAMING, {"window": one}) for one in given]


def by_window(kl: dict[int, float]) -> Callable[[Candidate, int], float]:
    return lambda one, prompt: kl[one.parameters["window"]]


def test_rungs_double_until_all_prompts_are_read() -> None:
    assert [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 5), (1, 2, 4, 8)] == [halving(n) for n in (1, 2, 3, 4, 5, 8)]
    with pytest.raises(sp.ParameterError, match="prompts is 0"):
        halving(0)


def test_the_cheapest_that_reaches_the_target_is_chosen_and_the_rest_reads_little() -> None:
    made = Made(by_window({n: 1.0 / n for n in range(1, 61)}))
    found = Searcher(64, windows(*range(1, 61)), made, TARGET).run()
    assert found.chosen is not None
    assert {"window": 10} == found.chosen.candidate.parameters
    assert 4 == len(found.chosen.outcomes)
    assert len(made.read) < 60 + 20 + 2 * 7 + 10  # all read one prompt, a third of them another, ...
    assert sorted(set(range(1, 61))) == sorted({window for window, prompt in made.read if prompt == 0})
    assert found.untried == 0
    costs = [one.density for one in found.frontier]
    assert costs == sorted(costs)
    assert [one.shortfall for one in found.frontier] == sorted((one.shortfall for one in found.frontier), reverse=True)


def test_what_only_the_first_prompt_liked_is_not_chosen() -> None:
    made = Made(lambda one, prompt: 0.0 if prompt == 0 or one.parameters["window"] >= 50 else 1.0)
    found = Searcher(64, windows(*range(1, 61)), made, TARGET).run()
    assert found.chosen is not None
    assert {"window": 50} == found.chosen.candidate.parameters, "those that fell out read on, cheapest first"
    assert 4 == len(found.chosen.outcomes)


def test_where_nothing_reaches_the_target_the_nearest_is_named() -> None:
    found = Searcher(64, windows(10, 20, 120), Made(by_window({10: 0.5, 20: 0.2, 120: 0.0})), TARGET).run()
    assert found.chosen is None
    assert "KL of at most 0.1: the settings that reach it cost no less than dense" == found.reason
    assert found.nearest is not None
    assert {"window": 20} == found.nearest.candidate.parameters
    found = Searcher(64, windows(10), Made(by_window({10: 0.5})), TARGET).run()
    assert "no setting reaches it" in found.reason
    (one,) = ranges([found])
    assert (None, None, 0.5) == (one.method, one.parameters, one.measured["nearest"]["inside"]["kl"])


def test_settings_that_fail_read_no_more_and_are_never_chosen() -> None:
    made = Made(by_window({10: 0.0, 20: 0.0}), failing=frozenset({10}))
    found = Searcher(64, windows(10, 20), made, TARGET).run()
    assert found.chosen is not None
    assert {"window": 20} == found.chosen.candidate.parameters
    assert [(10, 0)] == [one for one in made.read if one[0] == 10]


def test_layers_that_keep_too_little_stay_dense_and_no_others() -> None:
    worst = {1, 3, 4}

    def kl(one: Candidate, prompt: int) -> float:
        return 0.5 * len(worst - set(one.dense_layers))

    recalls = tuple(0.2 if layer in worst else 0.9 + layer / 100 for layer in range(8))
    made = Made(kl, recalls=recalls)
    found = Searcher(64, windows(10, 20), made, TARGET).run()
    assert found.chosen is not None
    assert (1, 3, 4) == found.chosen.candidate.dense_layers
    assert {"window": 10} == found.chosen.candidate.parameters
    assert found.chosen.density == pytest.approx(0.1 * 5 / 8 + 3 / 8)
    (one,) = ranges([found])
    assert (1, 3, 4) == one.dense_layers


def test_the_search_ends_when_the_time_is_up_and_says_what_it_did_not_try() -> None:
    made = Made(by_window(dict.fromkeys(range(1, 100), 0.0)))
    found = Searcher(64, windows(*range(1, 100)), made, TARGET, until=40.0, now=lambda: float(len(made.read))).run()
    assert 30 <= len(made.read) <= 42
    assert 99 - len({window for window, _ in made.read}) == found.untried
    assert found.chosen is not None
    assert 4 == len(found.chosen.outcomes), "the time is shared out, so that some read all"


def test_a_search_that_is_stopped_keeps_what_it_has() -> None:
    made = Made(by_window({n: 1.0 / n for n in range(1, 61)}), stop_at=30)
    searcher = Searcher(64, windows(*range(1, 61)), made, TARGET)
    with pytest.raises(KeyboardInterrupt):
        searcher.run()
    found = searcher.result()
    assert found.chosen is not None
    assert {"window": 10} == found.chosen.candidate.parameters
    assert (1, 4, 30) == (len(found.chosen.outcomes), found.prompts, found.untried)


def test_survivors_are_a_few_at_least() -> None:
    made = Made(by_window(dict.fromkeys(range(1, 6), 0.0)))
    Searcher(64, windows(*range(1, 6)), made, TARGET).run()
    assert FEWEST == len({window for window, prompt in made.read if prompt == 3})


def test_what_is_lost_counts_by_what_may_be_lost() -> None:
    def shortfall(lost: float, **limits: Any) -> float:
        recalls = (1.0 - lost, 1.0)
        return Target(**limits).shortfall([outcome(lost, 0.5, recalls=recalls)])

    assert 2.0 == pytest.approx(shortfall(0.2, kl=0.1))
    assert 1.0 == pytest.approx(shortfall(0.1, agreement=0.9))
    assert 2.5 == pytest.approx(shortfall(0.2, recall=0.96))  # the mean over two layers
    assert 2.0 == pytest.approx(shortfall(0.2, kl=0.1, agreement=0.5))
    assert 0.0 == shortfall(0.0, kl=0.0)
    assert math.inf == shortfall(0.1, kl=0.0)
    assert math.inf == Target(kl=1.0).shortfall([Outcome(Contender("x"), "p", error="broken")])
    for target in (Target(kl=1.0), Target(agreement=0.5)):
        assert math.inf == target.shortfall([outcome(math.nan, 0.5)]), "NaN is no small loss"


def test_a_target_holds_inside_the_prompt_unless_it_is_for_the_end_alone() -> None:
    near, far = (Divergence(torch.full((4,), kl, dtype=torch.float64), 1.0 - kl) for kl in (0.0, 0.5))
    layers = (Layer(0, 0.5, (0.5,), (1.0,)),)
    found = [Outcome(Contender("x"), "p", 64, Fidelity(far, near, near, near, None), 1.0, layers=layers)]
    limits: list[dict[str, Any]] = [{"kl": 0.25}, {"agreement": 0.75}, {"recall": 0.75}]
    for limit in limits:
        assert Target(**limit).shortfall(found) >= 2.0
        assert Target(**limit, rows="end").shortfall(found) == 0.0
    assert str(Target(kl=1, rows="end")) == "KL of at most 1 at the prompt's end"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "target is empty: pass agreement, kl, copies or recall"),
        ({"agreement": 1.5}, "agreement is 1.5: pass a number from 0 to 1"),
        ({"kl": -1}, "kl is -1: pass a number from 0"),
        ({"kl": math.nan}, "kl is nan"),
        ({"recall": True}, "recall is True"),
        ({"kl": 1, "rows": "last"}, "rows is 'last': pass 'all' or 'end'"),
    ],
)
def test_a_target_that_cannot_be_is_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(sp.ParameterError, match=re.escape(words)):
        Target(**limits)


def test_methods_take_turns_and_begin_with_their_defaults() -> None:
    methods = [sp.default_registry().get(name) for name in ("anchor-attention", "streaming", "vertical-slash")]
    made = candidates(methods, {"anchor-attention": {"step": 2}, "streaming": {"window": 64}})
    assert ["vertical-slash", "anchor-attention", "streaming"] == [one.name for one in made[:3]], "what promises most"
    assert [{}, {"step": 2}, {"window": 64}] == [one.parameters for one in made[:3]]
    assert ["vertical-slash", "anchor-attention"] == [one.name for one in made[3:5]]
    assert 1 + 8 == sum(one.name == "anchor-attention" for one in made)
    assert made == candidates(methods, {"anchor-attention": {"step": 2}, "streaming": {"window": 64}})
    assert len(made) == len(set(made))
    tried = candidates(
        methods[1:2], {"streaming": {"sink": 4}}, values={"streaming": {"window": [8, 16], "block": [8]}}
    )
    assert {"sink": 4} == tried[0].parameters
    assert [(8, 8), (8, 16)] == sorted((one.parameters["block"], one.parameters["window"]) for one in tried[1:])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fit", "--device", "cpu", "--threads", "1", *arguments])


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = text_lines()
    rows = [{"prompt": " ".join(lines[first : first + 60])} for first in (100, 300, 500)]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


TWO = ("--method", "streaming", "--method", "vertical-slash", "--set", "vertical-slash.block=32")
SMALL = (*TWO, "--set", "streaming.window=64", "--set", "streaming.sink=16", "--set", "streaming.block=16")


@pytest.mark.usefixtures("_elsewhere", "_one_tokenizer")
def test_restated_passages_are_within_the_tokens_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Prompt] = []

    def of(model: Any, prompt: Prompt, sizes: Sizes, **more: Any) -> Comparison:
        read.append(prompt)
        return given(model, prompt, sizes, **more)

    given = Comparison.of
    monkeypatch.setattr(Comparison, "of", of)
    Path("mine.txt").write_text(" ".join(text_lines()[:1500]), encoding="utf-8")
    chosen = ("--tokens", "3200", "--count", "1", "--minutes", "0.02")
    result = run("--prompts", "mine.txt", *SMALL, *chosen)
    assert result.exit_code == 0, result.output
    assert read
    assert all(2400 <= len(one.ids) <= 3200 for one in read)
    assert any(one.copies for one in read)


@pytest.mark.usefixtures("_elsewhere", "_one_tokenizer")
def test_the_profile_of_a_model_of_the_users_own_serves_attach(folder: Path) -> None:
    chosen = ("--tokens", "400", "--tokens", "800", "--count", "2", "--kl", "0.5", "--minutes", "3")
    result = run("--model", str(folder), "--prompts", "mine.jsonl", *SMALL, *chosen, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert "KL of at most 0.5 and copies of at least 0.99" == facts["target"]
    assert [400, 800] == [one["tokens"] for one in facts["searches"]]
    profile = Profile.load("model.profile.json")
    assert ("streaming", "vertical-slash") == profile.methods
    assert [0, 600] == [one.least for one in profile.ranges]
    for search, one in zip(facts["searches"], profile.ranges, strict=True):
        assert search["trials"]
        assert search["untried"] == 0
        for each in search["trials"]:
            assert each["row_lowest"] <= each["row_p1"] <= each["recall"], each
        assert any(each["row_p1"] < each["recall"] for each in search["trials"])
        tried = [each for each in search["trials"] if each["prompts"] == 2]
        good = [each for each in tried if each["inside"]["kl"] <= 0.5 and each["density"] < 1.0]
        least = min(each["density"] for each in good) if good else None
        assert least == (search["chosen"] or {}).get("density")
        assert one.method == (search["chosen"] or {}).get("method")
    assert any(one.method for one in profile.ranges), "nothing was within reach: the test shows nothing"
    model = AutoModelForCausalLM.from_pretrained(folder)
    served = next(one for one in profile.ranges if one.method)
    ids = torch.randint(0, 2048, (1, served.tokens), generator=torch.Generator().manual_seed(1))
    assert served.method is not None
    assert served.parameters is not None
    layers = [i for i in range(2) if i not in served.dense_layers]
    with torch.no_grad():
        with attach(model, served.method, layers=layers, gate=None, **served.parameters):
            expected = model(ids).logits
        with attach(model, profile="model.profile.json", gate=None) as handle:
            assert torch.equal(expected, model(ids).logits)
    assert {one.mode for one in handle.report().layers if one.layer in layers} == {"sparse"}


@pytest.mark.usefixtures("_elsewhere", "_one_tokenizer")
def test_nothing_within_reach_gives_a_profile_that_runs_dense(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    result = run("--model", str(folder), "--tokens", "300", "--count", "1", *SMALL, "--kl", "0", "-o", "none.json")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "KL 99 % NLL same recall rows density prefill" in said
    # With every key computed, the sparse way through a CPU is dense attention to the bit: nothing is gained by it.
    reason = "the settings that reach it cost no less than dense; calls of this length run dense; the nearest was"
    assert f"300 tokens: KL of at most 0 and copies of at least 0.99: {reason}" in said
    assert Profile.load("none.json").ranges[0].method is None
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(300)[None]
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, profile="none.json") as handle:
            assert torch.equal(expected, model(ids).logits)
    assert any("may never run" in note for note in handle.report().notes)
    # The profile's word is told, whatever a gate thinks: to take the gate off would change nothing.
    with attach(model, profile="none.json", gate="auto", min_query=16) as handle, torch.no_grad():
        model(ids)
    said = str(handle.report())
    assert "that is accurate enough at 300 keys" in said
    assert "gate=None" not in said
    with pytest.raises(ParameterError, match=r"it is 'sparseprefill\.profile' and no configuration: pass a profile as"):
        sp.from_config("none.json")


@pytest.mark.usefixtures("_elsewhere", "_one_tokenizer")
def test_ctrl_c_writes_what_was_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.adapters.calibration import fit

    whole, done = fit.ModelReadings.run, list[int]()

    def stops(self: Any, candidate: Candidate, prompt: int) -> Outcome:
        done.append(len(self.prompts[prompt].ids))
        if done.count(600) == 2:
            raise KeyboardInterrupt
        found: Outcome = whole(self, candidate, prompt)
        return found

    monkeypatch.setattr(fit.ModelReadings, "run", stops)
    small = (*SMALL, "--set", "vertical-slash.gamma=0.5")  # by the default this model has all pairs, or nearly all
    result = run("--model", str(folder), "--tokens", "300", "--tokens", "600", "--count", "1", *small, "--kl", "9")
    assert result.exit_code == 130, result.output
    assert "stopped after 2 of 2 lengths; written: model.profile.json" in " ".join(result.stderr.split())
    first, second = Profile.load("model.profile.json").ranges
    assert first.method is not None
    assert ("vertical-slash", 1) == (second.method, second.measured["prompts"])  # the only one that had read anything


@pytest.mark.usefixtures("_elsewhere", "_one_tokenizer")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "sample"), ("no method is named 'sample'",)),
        (("--model", "/no/such/folder"), ("--model /no/such/folder",)),
        (("-o", "no/such.json"), ("--output no/such.json", "no folder")),
        (("-o", "."), ("--output .", "name a file")),
        (("--prompts", "none.txt"), ("there is no file or folder none.txt",)),
        (("--prompts", "mine.jsonl", "--tokens", "30000"), ("--tokens 30000: the longest prompt of mine.jsonl has",)),
        (("--prompts", "short.txt"), ("no prompt has 256 tokens or more",)),
        (("--tokens", "99999"), ("--tokens 99999", "reads at most", "pass --tokens 40944 or less")),
        (("--set", "bfla.group=2", "--method", "streaming"), ("'bfla' is not among the methods of this run",)),
        (("--method", "streaming", "--set", "streaming.window=0"), ("window is 0",)),
        (("--method", "anchor-attention", "--try", "theta"), ("--try theta", "parameter=value")),
        (("--method", "anchor-attention", "--try", "teta=1"), ("no parameter 'teta'",)),
        (("--method", "anchor-attention", "--set", "theta=1", "--try", "theta=1,2"), ("--set theta", "--try")),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    Path("short.txt").write_text("A short text.", encoding="utf-8")
    refused(run(*arguments), *words)


def test_by_seconds_the_profile_holds_its_own_break_even_and_says_what_was_not_timed() -> None:
    shape = ModelIdentity(name="m", architecture="M", layers=2, heads=4, kv_heads=2, head_dim=32, digest="0")
    good = LengthRange(least=0, tokens=512, method="streaming", parameters={"sink": 16, "window": 64, "block": 16})
    lost = LengthRange(least=700, tokens=1024, method="share-prefill", parameters={})  # it needs a table
    dense = LengthRange(least=5000, tokens=8192, method=None, parameters=None)
    clock = Clock(torch.device("cpu"), 2, 0.1)
    table, failed = break_even([good, lost, dense], shape, "float32", clock, sp.default_registry())
    assert table is not None
    assert [(128, 128), (256, 256), (512, 512)] == [(one.queries, one.keys) for one in table.shapes[0].points]
    assert all(list(one.methods) == ["streaming"] for one in table.shapes[0].points)
    assert ["share-prefill"] == list(failed)
    assert "clusters" in failed["share-prefill"]
    none, failed = break_even([lost], shape, "float32", clock, sp.default_registry())
    assert none is None
    assert failed
    none, failed = break_even([good], evolve(shape, head_dim=16), "float32", clock, sp.default_registry())
    assert none is None
    assert {"streaming": "512 tokens: head_dim is 16: pass an even number >= 32"} == failed
