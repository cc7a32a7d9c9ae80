"""Evaluate a checkpoint, by default the shipped one: exact match by family and length, as in the model card.

Run as ``python -m lab.training.evaluate --tasks 256``; a GPU does it in two minutes. A model that was
trained with them also answers long questions and RULER's tasks: ``--model DIR --ruler 64``.
"""

import argparse
import logging
import math
import time
from pathlib import Path

import torch
from sparseprefill.adapters.demo.model import CHECKPOINT, load_model, load_tokenizer
from sparseprefill.adapters.demo.tasks import TABLES
from sparseprefill.adapters.demo.text import text_lines

from .card import table
from .cells import LENGTHS, evaluate, evaluate_ruler

logger = logging.getLogger("lab.training.evaluate")


def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation from the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the embedded model.")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of a trained checkpoint")
    parser.add_argument("--tasks", type=int, default=64, help="tasks of each family and length")
    parser.add_argument(
        "--ruler", type=int, default=0, help="tasks of each kind of RULER's; if any, also ask long questions"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the prompts")
    parser.add_argument("--seed", type=int, default=TABLES)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about this long")
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no checkpoint in this folder")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = text_lines()
    held_out = lines[len(lines) * 9 // 10 :]
    model = load_model(dtype=torch.bfloat16, device=device, folder=options.model)
    tokenizer = load_tokenizer(options.model)
    deadline = time.monotonic() + options.seconds
    lengths, seed = options.lengths, options.seed
    cells = list(evaluate(model, tokenizer, held_out, deadline, lengths, options.tasks, seed, options.ruler > 0))
    if options.ruler > 0:
        cells += evaluate_ruler(model, tokenizer, deadline, lengths, options.ruler, seed)
    logger.info("results\n%s", table(cells))


if __name__ == "__main__":
    main()
