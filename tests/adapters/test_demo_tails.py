"""Dense last rows and the ways of asking: what is asked, what is counted, and the command."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparseprefill.adapters.demo.model import load_model
from sparseprefill.adapters.demo.tasks import make_task

import sparseprefill as sp
from lab.bench.clock import Clock
from lab.training.tails import WAYS, Row, main, parted, prompts, rows, table


@pytest.fixture(scope="module")
def tokenizer(embedded_tokenizer: Any) -> Any:
    return embedded_tokenizer


def test_a_question_is_asked_in_three_ways_of_the_same_text(tokenizer: Any) -> None:
    short, long, before = prompts(tokenizer, 512, 1)[::2]
    task = make_task(tokenizer, "single", 512, 2_000_000)
    question, lead = parted(task.questions[0].text)
    assert ("short", "long", "before") == (short.way, long.way, before.way) == WAYS
    assert task.prompt() == tokenizer.decode(short.prompt, skip_special_tokens=True)
    assert f"{question}\n{task.context}{lead}" == tokenizer.decode(before.prompt, skip_special_tokens=True)
    assert f"{question} {lead}" == task.questions[0].text
    assert before.beside < short.beside < long.beside
    assert all(len(one.prompt) + len(one.answer) <= 514 for one in (short, long, before))
    assert task.questions[0].answer == tokenizer.decode(before.answer)


@pytest.mark.thorough
def test_what_a_method_loses_is_counted_and_dense_rows_bring_it_back(tokenizer: Any) -> None:
    model = load_model(dtype=torch.float32)
    asked = prompts(tokenizer, 1024, 1)
    blind = sp.build("streaming", sink=16, window=16, block=16)
    clock = Clock(torch.device("cpu"), 1, 0.01)
    dense, without, within = rows(model, asked, {"streaming": blind}, (0, 64), clock)
    assert ("dense", dict.fromkeys(WAYS, 2), 1.0) == (dense.method, dense.right, dense.density)
    assert sum(without.right.values()) < sum(dense.right.values())
    assert sum(without.right.values()) <= sum(within.right.values())
    assert without.density < within.density < 1
    assert without.time is not None
    assert "SDPA" == without.time.baseline


def test_the_table_tells_times_where_there_are_some() -> None:
    found = [Row("dense", 0, dict.fromkeys(WAYS, 2)), Row("bfla", 16, dict.fromkeys(WAYS, 1), 0.25)]
    lines = table(found, 2).splitlines()
    assert "| method | tail | short of 2 | long of 2 | before of 2 | density |" == lines[0]
    assert "| dense |  | 2 | 2 | 2 | 1.0000 |" == lines[2]
    assert "| bfla | 16 | 1 | 1 | 1 | 0.2500 |" == lines[3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nowhere"], "nowhere: no checkpoint"),
        (["--method", "nothing"], "nothing: no such method"),
        (["--tokens", "64"], "--tokens 64"),
        (["--tails", "-1"], "tails of 0 or more"),
        (["--tasks", "0"], "at least 1 task"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert said in capsys.readouterr().err


@pytest.mark.thorough
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tokens", "512", "--tasks", "1", "--tails", "16", "--method", "streaming"])
    printed = capsys.readouterr().out
    assert "| streaming | 16 | " in printed
    assert "Tokens after the text: short " in printed
