"""The example program, started by torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sparseprefill.adapters.demo.model import CHECKPOINT

from helpers.patience import patient

RUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "star" / "ask.py"


@pytest.mark.thorough
def test_two_processes_answer_questions_about_a_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    filler = "The sky is blue and the grass is green.\n" * 30
    text.write_text(f"{filler}The special magic number for tall castle is 7654321.\n{filler}", encoding="utf-8")
    question = "What is the special magic number for tall castle? The special magic number for tall castle is "
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [*RUN, str(PROGRAM), str(CHECKPOINT), str(text), question]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=patient(300))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(question) == 1
    assert "7654321" in done.stdout
