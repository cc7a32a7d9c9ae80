"""Evaluate the shipped checkpoint: exact match by family and length, as in the model card.

Run as ``python -m sparseprefill.adapters.demo.evaluate --tasks 256``; a GPU does it in two minutes.
"""

import argparse
import logging
import math
import time

import torch

from .model import load_model, load_tokenizer
from .text import text_lines
from .training.card import table
from .training.evaluate import LENGTHS, evaluate

logger = logging.getLogger("sparseprefill.demo.evaluate")


def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation from the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the embedded model.")
    parser.add_argument("--tasks", type=int, default=64, help="tasks of each family and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the prompts")
    parser.add_argument("--seed", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about this long")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = text_lines()
    held_out = lines[len(lines) * 9 // 10 :]
    cells = evaluate(
        load_model(dtype=torch.bfloat16, device=device),
        load_tokenizer(),
        held_out,
        time.monotonic() + options.seconds,
        options.lengths,
        options.tasks,
        options.seed,
    )
    logger.info("exact match\n%s", table(list(cells)))


if __name__ == "__main__":
    main()
