"""Train the embedded model anew: tokenizer, weights, evaluation and model card.

Run as ``python -m sparseprefill.adapters.demo.train --out DIR``. The whole run
ends within ``--seconds``: what is left after training goes to the evaluation,
and the checkpoint is saved before that and at the end of each stage.
"""

import argparse
import logging
import platform
import time
from pathlib import Path
from typing import Any

import torch
from attrs import asdict

from .text import text_lines
from .training.batches import Batches
from .training.card import table, write_card, write_record
from .training.checkpoint import POSITIONS, save_network, save_tokenizer
from .training.evaluate import LENGTHS, Cell, count_generated, evaluate, logits_gap
from .training.loop import Point, Settings, train
from .training.network import Network, Shape
from .training.plan import SMOKE_STAGES, STAGES, TOKENS, Stage
from .training.templates import Words
from .training.tokenizer import START, train_tokenizer

logger = logging.getLogger("sparseprefill.demo.train")


def main(arguments: list[str] | None = None) -> None:
    """Run the training from the command line."""
    began = time.monotonic()
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lines = text_lines()
    split = len(lines) * 9 // 10
    tokenizer = train_tokenizer(lines)
    save_tokenizer(tokenizer, folder)
    encoded = tokenizer.encode_batch([f"{line}\n" for line in lines], add_special_tokens=False)
    ids = [row.ids for row in encoded]
    logger.info("%d lines, %d tokens", len(lines), sum(map(len, ids)))
    shape = Shape(hidden=64, inner=128, layers=2) if options.smoke else Shape(layers=options.layers)
    network = Network(shape).to(device)
    tokens = 4096 if options.smoke else TOKENS
    settings = Settings(seed=options.seed, peak=options.rate, tokens=tokens)
    start = tokenizer.token_to_id(START)
    stages = SMOKE_STAGES if options.smoke else STAGES
    batches = Batches(Words(tokenizer, device), ids[:split], start, options.seed)
    curve, steps = train(
        network,
        batches,
        stages,
        settings,
        began + options.seconds - options.reserve,
        lambda: save_network(network, tokenizer, folder),
    )
    save_network(network, tokenizer, folder)
    trained = time.monotonic() - began
    facts = _facts(network, options.seed, trained, steps, device)
    write_card(folder, facts, [])
    record = _record(facts, shape, settings, stages, curve)
    write_record(folder, record)
    logger.info("trained for %.0f s, %d steps", trained, steps)
    cells: list[Cell] = []
    try:
        deadline = began + options.seconds - 10
        _evaluate(folder, lines[split:], deadline, options.smoke, record, cells)
        sample = [start, *(token for row in ids[:40] for token in row)][:512]
        record["logits_gap"] = logits_gap(network, folder, sample)
    except Exception:
        logger.exception("the evaluation failed; the checkpoint is saved")
    record["evaluation"] = [asdict(cell) for cell in cells]
    record["total_seconds"] = time.monotonic() - began
    write_card(folder, facts, cells)
    write_record(folder, record)
    if cells:
        logger.info("exact match\n%s", table(cells))
    logger.info("done after %.0f s", time.monotonic() - began)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=500, help="of the whole run")
    parser.add_argument("--reserve", type=float, default=60, help="seconds kept for evaluation")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    return parser.parse_args(arguments)


def _evaluate(
    folder: Path,
    lines: tuple[str, ...],
    deadline: float,
    smoke: bool,
    record: dict[str, Any],
    cells: list[Cell],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .tasks import make_task

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(device).eval()
    lengths, tasks = ((1024,), 4) if smoke else (LENGTHS, 64)
    for cell in evaluate(model, tokenizer, lines, deadline, lengths, tasks):
        cells.append(cell)
    if time.monotonic() < deadline:
        made = [make_task(tokenizer, "multiquery", 1024, 9 + i, lines=lines) for i in range(4)]
        record["generated"] = {"tasks": 4, "exact": count_generated(model, tokenizer, made)}


def _facts(network: Network, seed: int, seconds: float, steps: int, device: torch.device) -> dict[str, Any]:
    import transformers

    cuda = device.type == "cuda"
    return {
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "positions": POSITIONS,
        "seed": seed,
        "seconds": seconds,
        "steps": steps,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": "bfloat16",
    }


def _record(
    facts: dict[str, Any],
    shape: Shape,
    settings: Settings,
    stages: tuple[Stage, ...],
    curve: list[Point],
) -> dict[str, Any]:
    return {
        **facts,
        "shape": shape.as_dict(),
        "settings": asdict(settings),
        "stages": [asdict(stage) for stage in stages],
        "curve": [asdict(point) for point in curve],
    }


if __name__ == "__main__":
    main()
