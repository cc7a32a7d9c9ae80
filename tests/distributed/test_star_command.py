"""The command line, started by torchrun and alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sparseprefill.adapters.demo.model import CHECKPOINT
from sparseprefill.adapters.star.__main__ import main, parser

from distributed.models import lines
from helpers.patience import patient

RUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.thorough
def test_two_processes_answer_questions_about_a_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    filler = "The sky is blue and the grass is green.\n" * 30
    text.write_text(f"{filler}The special magic number for tall castle is 7654321.\n{filler}", encoding="utf-8")
    question = "What is the special magic number for tall castle? The special magic number for tall castle is "
    command = [*RUN, "-m", "sparseprefill.adapters.star", "ask", "--model", str(CHECKPOINT), "--context", str(text)]
    command += ["--question", question, "--block-size", "256", "--max-new-tokens", "12", "--device", "cpu"]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=patient(300))
    assert done.returncode == 0, done.stderr
    assert "2 ranks holding " in done.stdout
    assert "7654321" in done.stdout
    assert done.stdout.count("phase 1:") == 1


def test_one_process_needs_no_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseprefill.adapters.demo.text.text_lines", lines)
    arguments = [
        "demo",
        "--tokens",
        "900",
        "--questions",
        "1",
        "--block-size",
        "256",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    main(arguments)
    shown = capsys.readouterr().out
    assert "1 rank holding" in shown
    assert "single        1 of 1" in shown


def test_help_names_the_commands() -> None:
    assert {"ask", "demo"} <= set(parser().format_help().replace(",", " ").replace("{", " ").replace("}", " ").split())
