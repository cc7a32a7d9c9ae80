"""Exact match of a saved checkpoint, by family and length.

An answer counts when the most likely token is right at each of its places,
full stop included, which is when greedy generation gives just that answer.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from ..tasks import FAMILIES, Family, Task, make_task
from .network import Network

logger = logging.getLogger(__name__)

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""The lengths of the table."""

_TOKENS = 262_144


@frozen
class Cell:
    """One cell of the evaluation table."""

    family: Family
    length: int
    tasks: int
    exact: int


def evaluate(
    model: Any,
    tokenizer: Any,
    lines: tuple[str, ...],
    deadline: float,
    lengths: Sequence[int] = LENGTHS,
    tasks: int = 64,
    seed: int = 1_000_000,
) -> Iterator[Cell]:
    """Yield as many cells of the table as the deadline allows."""
    for length in lengths:
        for family in FAMILIES:
            if time.monotonic() > deadline:
                logger.warning("no time left to evaluate %s at %d", family, length)
                continue
            made = [make_task(tokenizer, family, length, seed + index, lines=lines) for index in range(tasks)]
            exact = count_exact(model, tokenizer, made)
            logger.info("%s at %d: %d of %d", family, length, exact, tasks)
            yield Cell(family, length, tasks, exact)


@torch.inference_mode()
def count_exact(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> int:
    """Count the tasks whose first question is answered exactly."""
    rows = max(1, min(16, _TOKENS // max(task.length for task in tasks)))
    return sum(_count(model, tokenizer, tasks[start : start + rows]) for start in range(0, len(tasks), rows))


def _count(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> int:
    prompts = tokenizer([task.prompt() for task in tasks])["input_ids"]
    answers = tokenizer([task.questions[0].answer for task in tasks], add_special_tokens=False)
    wanted = answers["input_ids"]
    longest = max(len(a) + len(b) for a, b in zip(prompts, wanted, strict=True))
    ids = torch.zeros(len(tasks), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, wanted, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    hidden = model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    exact = 0
    for row, (prompt, answer) in enumerate(zip(prompts, wanted, strict=True)):
        part = hidden[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
        exact += model.lm_head(part).argmax(-1).tolist() == answer
    return exact


@torch.inference_mode()
def count_generated(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> int:
    """Count the tasks whose first question is answered exactly by ``generate``."""
    exact = 0
    for task in tasks:
        inputs = tokenizer(task.prompt(), return_tensors="pt").to(model.device)
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=96,
            do_sample=False,
        )
        text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        exact += text.strip() == task.questions[0].answer
    return exact


@torch.inference_mode()
def logits_gap(network: Network, folder: Path, ids: list[int]) -> float:
    """Return the largest gap, in float32, between the network's logits and the checkpoint's."""
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = Network(network.shape)
    own.load_state_dict({k: v.detach().cpu() for k, v in network.state_dict().items()})
    own.to(torch.bfloat16).float()
    tokens = torch.tensor([ids])
    return float((own(tokens) - saved(input_ids=tokens).logits).abs().max())
