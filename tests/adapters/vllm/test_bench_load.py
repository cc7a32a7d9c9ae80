"""The commands `load`, `decode` and `answers`: their parts, and each in tiny engines on a CPU."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.cli.group import CommandError

import sparseprefill as sp
from lab.vllm import answering
from lab.vllm.answering import Answered
from lab.vllm.answering_form import form as answering_form
from lab.vllm.decoding import DECODE, MIXED, Decoding, Steps
from lab.vllm.decoding_form import form as decoding_form
from lab.vllm.positions import Positions
from lab.vllm.pretrained import stretched
from lab.vllm.shapes import Shape
from lab.vllm.traffic import Desk, Life, arrivals, percentile
from lab.vllm.under_load import Loaded, Times, UnderLoad
from lab.vllm.under_load_form import form as load_form

from . import engine
from .test_bench import CPU, ENGINE, SETUP, SHAPE, STREAMING, Attention, command, invoke


def test_shapes_of_requests() -> None:
    whole, prefix, mix = map(Shape.parse, ("whole:64", "prefix:128+32", "mix:16,64,32"))
    assert [(0, (64,)), (128, (32,)), (0, (16, 64, 32))] == [(one.prefix, one.lengths) for one in (whole, prefix, mix)]
    assert [64, 160, 64] == [one.longest for one in (whole, prefix, mix)]
    assert [3 * 68, 128 + 3 * 36, 112 + 12] == [one.kept(3, 4) for one in (whole, prefix, mix)]
    assert [16, 64, 32, 16] == [len(ids) for ids in mix.prompts(4, 256, 0, 0)]


def test_prompts_share_the_prefix_alone() -> None:
    shape = Shape.parse("prefix:128+32")
    made = [*shape.prompts(3, 256, 0, 0), *shape.prompts(3, 256, 0, 1)]
    assert all(ids[:128] == shape.shared(256, 0) for ids in made)
    assert 6 == len({tuple(ids[128:]) for ids in made})
    assert made[:3] == shape.prompts(3, 256, 0, 0)


@pytest.mark.parametrize(
    "text", ["whole", "whole:", "whole:a", "whole:-64", "whole:64,64", "prefix:128", "prefix:1+2+3", "mix:64", "all:64"]
)
def test_a_shape_that_is_none(text: str) -> None:
    with pytest.raises(CommandError, match=r"no such shape; write whole:32768, prefix:131072\+8192 or mix:"):
        Shape.parse(text)
    result = invoke("load", "--shape", text, *ENGINE)
    assert 1 == result.exit_code
    assert f"--shape {text}: no such shape" in " ".join(result.output.split())


def test_a_shape_of_too_few_tokens() -> None:
    with pytest.raises(CommandError, match="15 tokens are too few; write 16 or more"):
        Shape.parse("mix:64,15")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("load", "--rate", "-1"), "--rate"),
        (("load", "--requests", "0"), "--requests"),
        (("decode", "--rows", "1"), "--rows"),
        (("decode", "--tokens", "2"), "--tokens"),
        (("answers", "--rate", "-1"), "--rate"),
    ],
)
def test_numbers_that_cannot_be(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert 2 == result.exit_code
    assert said in result.output


def test_a_step_without_room_for_a_prompt() -> None:
    result = invoke("decode", "--rows", "64", "--budget", "64")
    assert 1 == result.exit_code
    assert "--budget 64: a step of 64 rows has no room for a prompt; raise it" in " ".join(result.output.split())


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = invoke("answers", "--model", str(tmp_path))
    assert 1 == result.exit_code
    assert "no config.json in this folder" in " ".join(result.output.split())


def test_arrivals_of_a_poisson_process() -> None:
    slow, fast = ([*islice(arrivals(rate, 0), 2001)] for rate in (2.0, 8.0))
    assert 0.0 == slow[0] == fast[0]
    assert slow == sorted(slow)
    assert slow == pytest.approx([4 * at for at in fast])
    assert slow[-1] / 2000 == pytest.approx(0.5, rel=0.1)
    assert [0.0] * 5 == [*islice(arrivals(0.0, 0), 5)]
    assert slow[:9] != [*islice(arrivals(2.0, 1), 9)]


def test_percentiles() -> None:
    assert [1.0, 2.5, 4.0] == [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 1.0)]
    assert 7.0 == percentile([7.0], 0.99)


class Fake:
    """An engine that computes one prompt a step, and a token of every other request; a step takes a second."""

    def __init__(self) -> None:
        self.now, self.running = 0.0, dict[str, list[int]]()
        self.wanted: dict[str, int] = {}
        self.llm = SimpleNamespace(llm_engine=self)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        self.running[name], self.wanted[name] = [], sampling.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.now += 1.0
        read = next((name for name, ids in self.running.items() if not ids), None)
        found = []
        for name, ids in list(self.running.items()):
            if ids or name == read:
                ids.append(7)
                done = len(ids) == self.wanted[name]
                one = SimpleNamespace(token_ids=list(ids))
                found.append(SimpleNamespace(request_id=name, outputs=[one], num_cached_tokens=3, finished=done))
                if done:
                    del self.running[name]
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Desk]:
    """Makes a desk at such an engine."""
    module = SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)

    def make(answer: int) -> Desk:
        made: Any = Fake()
        monkeypatch.setattr("time.sleep", made.sleep)
        return Desk(made, answer, made.clock)

    return make


def test_times_begin_when_a_request_should_have_come(fake: Callable[[int], Desk]) -> None:
    lives = [Life([1] * 8), Life([2] * 8, at=0.5), Life([3] * 8, at=100.0)]
    seconds = fake(3).serve(lives)
    assert all(life.finished and [7, 7, 7] == life.tokens and 3 == life.cached for life in lives)
    assert [1.0, 1.5] == [life.waited for life in lives[:2]], "it waited for the step that ran when it came"
    assert [1.0] * 3 == [life.pace for life in lives]
    assert lives[2].waited == pytest.approx(1.0, abs=0.01), "the engine was idle"
    assert seconds == lives[2].last == pytest.approx(103.0, abs=0.01)
    times = Times.of(lives, seconds)
    assert (1.0, seconds) == (times.token_p50, times.seconds)
    assert times.first_p50 <= times.first_p99


def test_one_token_has_no_pace(fake: Callable[[int], Desk]) -> None:
    life = Life([1] * 8)
    assert Times.of([life], fake(1).serve([life])).token_p50 is None


def test_an_answer_that_ends_early(fake: Callable[[int], Desk]) -> None:
    desk, life = fake(3), Life([1] * 8)

    class Less(dict[str, int]):
        def __getitem__(self, _: str) -> int:
            return 2

    desk.engine.llm.llm_engine.wanted = Less()
    with pytest.raises(sp.SparsePrefillError, match="1 of 1 requests got fewer than 3 tokens"):
        desk.serve([life])


class Model(torch.nn.Module):
    """What the hooks know a model by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention("layers.0"), Attention("layers.1")])

    def forward(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        own = [torch.zeros(len(positions), heads * SHAPE.head_dim) for heads in (4, 2, 2)]
        return [layer(*own) for layer in self.layers]


def test_made_up_heads_by_position() -> None:
    model, structure = Model(), Positions(SHAPE, CPU, 300)
    structure.fit(model)
    q, k = structure.tensors()
    rows = torch.tensor([0, 1, 2, 77, 40, 41, 299, 301])  # chunks of two prompts, rows that decode, and padding
    for outs in (model(positions=rows), model(positions=rows)):
        for out in outs:
            torch.testing.assert_close(out[0][:7], q[rows[:7]], rtol=0, atol=0)
            torch.testing.assert_close(out[1][:7], k[rows[:7]], rtol=0, atol=0)
            assert not out[2].any(), "values are the model's own"
    plain = Model()
    Positions(SHAPE, CPU, 300, heads=False).fit(plain)
    assert not plain(positions=rows)[0][0].any()


def times(first: float, seconds: float) -> Times:
    return Times(first_p50=first, first_p99=2 * first, token_p50=None, seconds=seconds)


def test_speedups_are_over_the_baseline() -> None:
    structure = Positions(SHAPE, CPU, 300)
    form = load_form(UnderLoad(setup=SETUP, structure=structure, shapes=[Shape.parse("whole:64")], rate=2.0))
    more: dict[str, Any] = {"shape": "whole:64", "requests": 4, "prompts": 256, "cached": 56}
    slower = {"portable (no Gluon)": 5}
    rows = [
        Loaded(
            backend="bfla",
            times=times(0.5, 2.0),
            baseline=times(1.0, 3.0),
            fallbacks={"x": 3, "y": 4},
            slower=slower,
            extra=2 << 30,
            **more,
        ),
        Loaded(backend="TRITON_ATTN", times=times(4.0, 8.0), **more),
        Loaded(backend="streaming", error="RuntimeError: gone"),
    ]
    text = form.markdown(rows)
    assert "| bfla | whole:64 | 500.0 | 1000.0 |  | 2.00 | 2.00 |  | 100 | 2.00 | 1.50 |  |  | 7 | 2.00 |" in text
    assert "| TRITON_ATTN | whole:64 | 4000.0 | 8000.0 |  |  |  |  | 25 | 0.50 |  |  |  | 0 |  |" in text
    assert "| streaming | failed |" in text
    assert text.index("4 calls ran dense: y") < text.index("3 calls ran dense: x"), "the commonest reason first"
    assert "bfla, whole:64: 5 calls on a slower kernel: portable (no Gluon)" in text
    facts = [form.fact(row) for row in rows]
    assert {"first": 2.0, "first_p99": 2.0, "token": None, "throughput": 1.5} == facts[0]["over_baseline"]
    assert (200, 100.0, 2.0) == tuple(
        facts[0][name] for name in ("computed", "tokens_per_second", "requests_per_second")
    )
    assert not any(facts[1]["over_baseline"].values())
    assert "RuntimeError: gone" == facts[2]["error"]


def test_steps_are_compared_round_by_round() -> None:
    form = decoding_form(Decoding(setup=SETUP, structure=Positions(SHAPE, CPU, 300), prefill=64))
    stock = Steps(backend="TRITON_ATTN", kind=DECODE, rows=8, rounds=[[0.001, 0.002, 0.003], [0.004] * 3])
    ours = Steps(backend="bfla", kind=DECODE, rows=8, rounds=[[0.003] * 3, [0.004] * 3], stock=stock.rounds)
    slower = {"portable (no Gluon)": 5}
    mixed = Steps(backend="bfla", kind=MIXED, rows=7, rounds=[[0.5, 0.25], [0.25, 0.25]], slower=slower)
    text = form.markdown([stock, ours, mixed, Steps(backend="engines", error="RuntimeError: gone")])
    assert "| TRITON_ATTN | decode | 8 | 6 | 3.500 | 4.000 |  |  |  |  |" in text
    assert "| bfla | decode | 8 | 6 | 3.500 | 4.000 |  | 1.250 | 1.000 | 1.500 |" in text
    assert "| bfla | with prefill | 7 | 4 | 250.000 |" in text
    assert "| engines | failed |" in text
    assert "bfla, with prefill: 5 calls on a slower kernel: portable (no Gluon)" in text
    assert {"ratio": 1.25, "steps": 6}.items() <= form.fact(ours).items()
    assert form.fact(mixed)["ratio"] is None


def test_answers_are_told_beside_stock() -> None:
    form = answering_form(answering.Answering(setup=SETUP, tokenizer=None, tasks=[]), "embedded", CPU)
    row = Answered(
        backend="bfla",
        right=9,
        asked=10,
        stock=10,
        same=3,
        times=times(0.5, 2.0),
        fallbacks={"x": 2},
        slower={"portable (no Gluon)": 5},
    )
    text = form.markdown([row])
    assert "| bfla | 9 of 10 | 10 | 3 | 500.0 | 1000.0 |  | 2 |" in text
    assert "- bfla: 2 calls ran dense: x" in text
    assert "- bfla: 5 calls on a slower kernel: portable (no Gluon)" in text


@engine.NEEDED
@pytest.mark.slow
def test_requests_over_time(commands: engine.Commands, tmp_path: Path) -> None:
    shapes = ("whole:300", "mix:140,300", "prefix:512+300")
    asked = ("load", *(word for text in shapes for word in ("--shape", text)), "--rate", "50", "--requests", "3")
    more = ("--tokens", "4", "--budget", "256", "--warm", "1")
    status, found, table = command(commands, tmp_path, *asked, *more, *STREAMING)
    assert 0 == status, table
    rows = {(row["backend"], row["shape"]): row for row in found["rows"]}
    assert ["CPU_ATTN"] * 3 + ["dense"] * 3 + ["streaming"] * 3 == [row["backend"] for row in found["rows"]]
    for text, prompts, cached in zip(shapes, (900, 580, 3 * 812), (0, 0, 3 * 512), strict=True):
        dense, ours, stock = (rows[name, text] for name in ("dense", "streaming", "CPU_ATTN"))
        for row in (dense, ours, stock):
            assert (3, prompts, cached, 12) == tuple(
                row[name] for name in ("requests", "prompts", "cached", "generated")
            )
            assert prompts == row["computed"] + row["cached"]
            assert 0 < row["times"]["first_p50"] <= row["times"]["first_p99"] < row["times"]["seconds"]
            assert row["times"]["token_p50"] > 0
            assert row["tokens_per_second"] == pytest.approx(row["computed"] / row["times"]["seconds"])
            assert not row["fallbacks"]
        for row in (dense, ours):
            assert 0.5 < row["sparse"] <= 1, "chunks of fewer than 128 tokens run dense"
        assert {1.0} == set(stock["over_baseline"].values())
        ratio = stock["times"]["first_p50"] / ours["times"]["first_p50"]
        assert ours["over_baseline"]["first"] == pytest.approx(ratio)
        assert (1.0, None, None) == (dense["density"], stock["sparse"], stock["density"])
    assert 0 < rows["streaming", "prefix:512+300"]["density"] < 1


@engine.NEEDED
@pytest.mark.slow
def test_steps_that_decode(commands: engine.Commands, tmp_path: Path) -> None:
    asked = ("decode", "--rows", "4", "--length", "20", "--tokens", "12", "--budget", "256", "--rounds", "2")
    status, found, table = command(commands, tmp_path, *asked, "--with-prefill", "--prompt", "500", *STREAMING)
    assert 0 == status, table
    wanted = [(name, kind, rows) for kind, rows in ((DECODE, 4), (MIXED, 3)) for name in ("CPU_ATTN", "streaming")]
    assert wanted == [(row["backend"], row["kind"], row["rows"]) for row in found["rows"]]
    for row in found["rows"]:
        assert row["steps"] == sum(map(len, row["rounds"])) > 0
        assert 0 < row["median"] <= row["p99"]
        assert row["kind"] == DECODE or all(len(times) == 2 for times in row["rounds"]), "chunks of 253 and 247"
    stock, ours, *mixed = found["rows"]
    assert [True, False] == [row["ratio"] is None for row in (stock, ours)]
    assert ours["low"] <= ours["ratio"] <= ours["high"]
    assert all(row["ratio"] is None for row in mixed)


@engine.NEEDED
@pytest.mark.slow
def test_answers_under_load(commands: engine.Commands, tmp_path: Path) -> None:
    asked = ("answers", "--requests", "4", "--length", "1024", "--rate", "20", "--method", "sample-attention")
    status, found, table = command(commands, tmp_path, *asked, sizes=("--stock", "CPU_ATTN", "--dtype", "float32"))
    assert 0 == status, table
    stock, dense, ours = found["rows"]
    assert ["CPU_ATTN", "dense", "sample-attention"] == [row["backend"] for row in found["rows"]]
    assert {"single": 1, "multikey": 1, "multivalue": 1, "multiquery": 1} == found["questions"]
    assert all((4, 10) == (row["requests"], row["asked"]) and not row["fallbacks"] for row in found["rows"])
    assert 0 < stock["right"] == dense["stock"] == ours["stock"]
    assert (4, stock["right"]) == (dense["same"], dense["right"])
    assert all(row["sparse"] == 1.0 for row in (dense, ours))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--measure", "speed"), "--measure speed: write some of first, fresh, behind, load, inside, end"),
        (("--behind", "1024"), "--behind 1024: write tokens as CACHED+NEW"),
        (("--behind", "1024+8"), "--behind: '8' is no number of tokens; write 16 or more"),
        (("--mix", "64,x"), "--mix: 'x' is no number of tokens"),
        (("--method", "rowmax", "--method", "rowmax"), "'rowmax' stands for two contenders"),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[str, ...], said: str) -> None:
    result = invoke("pretrained", "--model", "embedded", *arguments)
    assert 1 == result.exit_code
    assert said in " ".join(result.output.split())


def test_a_model_is_stretched_once(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ).save_pretrained(tmp_path)
    assert {} == stretched(tmp_path, 1.0)
    made = stretched(tmp_path, 4.0)["hf_overrides"]
    assert 131072 == made["max_position_embeddings"]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    assert rope == made["rope_parameters"]
    LlamaConfig(**made).save_pretrained(tmp_path)
    with pytest.raises(CommandError, match=r"--yarn 2: .* has rope_type 'yarn' already"):
        stretched(tmp_path, 2.0)


@engine.NEEDED
@pytest.mark.slow
def test_a_trained_model_profile_by_profile(commands: engine.Commands, tmp_path: Path) -> None:
    (tmp_path / "narrow.toml").write_text('method = "streaming"\nparameters = { sink = 32, window = 64 }\n')
    asked = ("pretrained", "--model", "embedded", "--method", "dense", "--config", str(tmp_path / "narrow.toml"))
    sizes = ("--length", "3072", "--behind", "512+256", "--mix", "128,256", "--requests", "3", "--rate", "50")
    more = ("--texts", "1", "--rounds", "1", "--tokens", "3", "--engine", '{"enforce_eager": true}')
    status, found, table = command(
        commands, tmp_path, *asked, *sizes, *more, sizes=("--stock", "CPU_ATTN", "--dtype", "float32")
    )
    assert 0 == status, table
    names = ["CPU_ATTN", "off", "dense", "narrow"]
    rows = {name: [row for row in found["rows"] if row["backend"] == name and row["tokens"]] for name in names}
    for name, ours in rows.items():
        first, _, behind, load, inside, end = ours
        assert ["first", "fresh", "behind", "load", "inside, code 0", "end"] == [row["what"] for row in ours], name
        assert (3072, 0, 768, 512) == (first["tokens"], first["cached"], behind["tokens"], behind["cached"])
        assert (3, 512) == (load["figures"]["requests"], load["tokens"])
        assert 0 < inside["figures"]["of_copies"]
        assert 0 < end["figures"]["of_facts"] == inside["figures"]["of_facts"]
        assert not any(row["fallbacks"] for row in ours)
    same = {name: ours[4]["figures"]["same"] for name, ours in rows.items()}
    assert 1.0 == same["CPU_ATTN"] == same["off"]
    assert 0.99 < same["dense"]
    assert same["narrow"] < 0.9
    density = {name: ours[0]["figures"]["density"] for name, ours in rows.items()}
    assert (None, None, 1.0) == (density["CPU_ATTN"], density["off"], density["dense"])
    assert density["narrow"] < 0.5
