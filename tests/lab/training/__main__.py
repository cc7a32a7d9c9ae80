"""Train a model anew, the embedded one or one for 128K tokens: tokenizer, weights, evaluation and model card.

Run as ``python -m lab.training --out DIR``, with ``--size long`` for the larger one. A run ends
within ``--seconds``; where that is less than the training needs (``--total-seconds``), ``--resume`` goes on from
``DIR/training.pt``. The last run evaluates the checkpoint. ``--compare DIR DIR`` prints the results of several seeds.
"""

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen
from sparseprefill.adapters.demo.tasks import SELECTION, make_task
from sparseprefill.adapters.demo.text import text_lines

from .batches import Batches
from .card import RECORD, compare, table, write_card, write_record
from .cells import Cell, count_generated, evaluate, evaluate_ruler, logits_gap
from .checkpoint import save_network, save_tokenizer
from .loop import STATE, Budget, Trainer
from .network import Network
from .plan import SIZES, Size
from .pools import Pools
from .schedule import Settings
from .tokenizer import START, train_tokenizer

logger = logging.getLogger("lab.training")

_MARGIN = 20.0
"""Seconds at the end of a run that is cut, for the step under way and for saving."""


def main(arguments: list[str] | None = None) -> None:
    """Run the training from the command line."""
    began = time.monotonic()
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(given)
    if options.compare:
        _compare(parser, options.compare)
        return
    if options.out is None:
        parser.error("--out DIR is missing: name the folder of the checkpoint")
    if options.resume and not (options.out / STATE).is_file():
        parser.error(f"--resume finds no {options.out / STATE}: run without it first")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        _run(options, given, began)
    except ValueError as error:
        parser.error(str(error))


@frozen(eq=False)
class _Made:
    """What a run works with: text, its tokens, the tokenizer and the trainer."""

    lines: tuple[str, ...]
    ids: Sequence[Sequence[int]]
    tokenizer: Any
    network: Network
    trainer: Trainer

    @property
    def split(self) -> int:
        """The lines before it are trained on, those behind it are for evaluation."""
        return _split(self.lines)


def _run(options: argparse.Namespace, given: Sequence[str], began: float) -> None:
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    size = SIZES["smoke" if options.smoke else options.size]
    settings = Settings(seed=options.seed, peak=options.rate or size.peak)
    commands = [_command(given)]
    if options.resume:
        commands = json.loads((folder / RECORD).read_text(encoding="utf-8"))["commands"] + commands
    made = _make(options, size, settings, folder)
    trainer, network, tokenizer = made.trainer, made.network, made.tokenizer
    budget = _budget(options, size, trainer.course.seconds, began)
    finished = trainer.train(budget, folder)
    save_network(network, tokenizer, folder, size.positions)
    facts = _facts(made, size, settings, commands)
    record = {
        **facts,
        "shape": size.shape.as_dict(),
        "settings": asdict(settings),
        "stages": [asdict(stage) for stage in size.stages],
        "changes": [asdict(change) for change in trainer.course.schedule.changes],
        "finished": finished,
        "curve": [asdict(point) for point in trainer.course.curve],
    }
    write_card(folder, facts, [])
    write_record(folder, record)
    done = (facts["seconds"], facts["steps"], _since(began))
    logger.info("trained for %.0f s, %d steps; this run has taken %.0f s", *done)
    if not finished:
        logger.info("the training is not finished: continue with --resume")
        return
    cells: list[Cell] = []
    try:
        _evaluate(folder, made, size, began + options.seconds - 10, record, cells)
        sample = [tokenizer.token_to_id(START), *(token for row in made.ids[:40] for token in row)][:512]
        record["logits_gap"] = logits_gap(network, folder, sample)
    except Exception:
        logger.exception("the evaluation failed; the checkpoint is saved")
    record["evaluation"] = [asdict(cell) for cell in cells]
    record["run_seconds"] = _since(began)
    write_card(folder, facts, cells)
    write_record(folder, record)
    if cells:
        logger.info("results\n%s", table(cells))
    logger.info("done after %.0f s", _since(began))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lab.training", description="Train a model that finds facts in long texts.")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--size", choices=[name for name in SIZES if name != "smoke"], default="embedded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=_positive, default=580, help="time limit of this run, from start to end")
    parser.add_argument("--total-seconds", type=_positive, help="training time over all runs; by default what fits")
    parser.add_argument("--steps", type=_whole, help="steps over all runs, instead of a time; repeats exactly")
    parser.add_argument("--reserve", type=float, help="seconds kept for the evaluation")
    parser.add_argument("--resume", action="store_true", help=f"continue from {STATE} in the folder")
    parser.add_argument("--rate", type=_positive, help="highest learning rate")
    parser.add_argument(
        "--attention", choices=("cudnn", "flash"), default="cudnn", help="dense attention to try first on a GPU"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers: takes half a minute, steps are faster"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="DIR", help="print results of runs side by side")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _compare(parser: argparse.ArgumentParser, folders: Sequence[Path]) -> None:
    try:
        sys.stdout.write(f"{compare(folders)}\n")
    except (FileNotFoundError, ValueError) as error:
        parser.error(f"--compare: {error}")


def _make(options: argparse.Namespace, size: Size, settings: Settings, folder: Path) -> _Made:
    from tokenizers import Tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.steps:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lines = text_lines()
    tokenizer: Any
    if options.resume:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(lines, size.shape.vocabulary)
        save_tokenizer(tokenizer, folder, size.positions)
    ids = [row.ids for row in tokenizer.encode_batch([f"{line}\n" for line in lines], add_special_tokens=False)]
    logger.info("%d lines, %d tokens", len(lines), sum(map(len, ids)))
    pools = Pools(tokenizer, lines, device, options.seed)
    batches = Batches(pools, ids[: _split(lines)], tokenizer.token_to_id(START))
    network = Network(size.shape).to(device)
    trainer = Trainer(network, batches, size.stages, settings, options.attention)
    if options.resume:
        trainer.load(folder)
    if options.compile:
        for layer in network.model.layers:
            layer.compile(dynamic=True)
    return _Made(lines, ids, tokenizer, network, trainer)


def _budget(options: argparse.Namespace, size: Size, used: float, began: float) -> Budget:
    """How long to train: to the end if that fits into this run with its evaluation, else to the end of the run."""
    reserve = size.reserve if options.reserve is None else options.reserve
    ready = time.monotonic()
    last = began + options.seconds - reserve
    total = options.total_seconds or used + max(0.0, last - ready)
    if total <= used and not options.steps:
        raise ValueError(f"--total-seconds {total:.0f}: {used:.0f} s of training are already done")
    fits = options.steps is not None or ready + total - used <= last + 1
    return Budget(total, last if fits else began + options.seconds - _MARGIN, options.steps)


def _evaluate(
    folder: Path, made: _Made, size: Size, deadline: float, record: dict[str, Any], cells: list[Cell]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(device).eval()
    held_out = made.lines[made.split :]
    for cell in evaluate(model, tokenizer, held_out, deadline, size.lengths, size.tasks):
        cells.append(cell)
    for cell in evaluate_ruler(model, tokenizer, deadline, size.lengths, size.ruler_tasks):
        cells.append(cell)
    if time.monotonic() < deadline:
        tasks = [make_task(tokenizer, "multiquery", 1024, SELECTION + index, lines=held_out) for index in range(4)]
        record["generated"] = {"tasks": 4, "exact": count_generated(model, tokenizer, tasks)}


def _facts(made: _Made, size: Size, settings: Settings, commands: Sequence[str]) -> dict[str, Any]:
    import transformers

    course = made.trainer.course
    cuda = torch.cuda.is_available()
    return {
        "title": "The embedded model" if size is SIZES["embedded"] else "A needle model",
        "commands": list(commands),
        "command": "\n    ".join(commands),
        "parameters": sum(weight.numel() for weight in made.network.parameters()),
        "positions": size.positions,
        "longest": max(stage.length for stage in size.stages),
        "seed": settings.seed,
        "evaluation_seed": SELECTION,
        "seconds": course.seconds,
        "steps": course.step,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": "bfloat16",
    }


def _command(given: Sequence[str]) -> str:
    """The command of a run without the name of its folder."""
    words = list(given)
    if "--out" in words:
        words[words.index("--out") + 1] = "DIR"
    words = ["--out=DIR" if word.startswith("--out=") else word for word in words]
    return " ".join(["python -m lab.training", *words])


def _split(lines: Sequence[str]) -> int:
    return len(lines) * 9 // 10


def _since(began: float) -> float:
    return time.monotonic() - began


if __name__ == "__main__":
    main()
