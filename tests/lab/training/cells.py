"""Exact match of a saved checkpoint by task and length, and RULER's tasks by the harness's own scoring.

An answer of the families of `tasks` counts when the most likely token is right at each of its places, full stop
included, which is when greedy generation gives just that answer. RULER's tasks count the share of expected strings in
the greedily generated text, which ends at a line break or at the harness's most tokens.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from sparseprefill.adapters.demo.exam import greedy
from sparseprefill.adapters.demo.tasks import FAMILIES, SELECTION, Family, Task, Wording, make_task

from .network import Network
from .ruler import GENERATED, NAMES, Name, RulerTask, make_ruler, score_ruler

logger = logging.getLogger(__name__)

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""The lengths of the embedded model's table."""

LONG: tuple[Family, ...] = ("single", "multikey")
"""The families that are also asked in 20 to 60 tokens."""

_TOKENS = 262_144
_AHEAD = 8


@frozen
class Cell:
    """One cell of the evaluation table: how many tasks, and the sum of their scores, each from 0 to 1."""

    family: str
    length: int
    tasks: int
    exact: float


def evaluate(
    model: Any,
    tokenizer: Any,
    lines: tuple[str, ...],
    deadline: float,
    lengths: Sequence[int] = LENGTHS,
    tasks: int = 64,
    seed: int = SELECTION,
    long: bool = True,
) -> Iterator[Cell]:
    """Yield as many cells of the families of `tasks` as the deadline allows; `long` asks long questions as well."""
    asked: list[tuple[Family, Wording]] = []
    for family in FAMILIES:
        asked.append((family, "short"))
        if long and family in LONG:
            asked.append((family, "long"))
    for length in lengths:
        for family, wording in asked:
            name = family if wording == "short" else f"{family}, long question"
            if time.monotonic() > deadline:
                logger.warning("no time left to evaluate %s at %d", name, length)
                continue
            made = [
                make_task(tokenizer, family, length, seed + index, wording=wording, lines=lines)
                for index in range(tasks)
            ]
            exact = count_exact(model, tokenizer, made)
            logger.info("%s at %d: %d of %d", name, length, exact, tasks)
            yield Cell(name, length, tasks, exact)


def evaluate_ruler(
    model: Any,
    tokenizer: Any,
    deadline: float,
    lengths: Sequence[int] = LENGTHS,
    tasks: int = 16,
    seed: int = SELECTION,
    names: Sequence[Name] = NAMES,
) -> Iterator[Cell]:
    """Yield as many cells of RULER's tasks as the deadline allows."""
    for length in lengths:
        for name in names:
            if time.monotonic() > deadline:
                logger.warning("no time left to evaluate %s at %d", name, length)
                continue
            scores: list[float] = []
            while len(scores) < tasks and (not scores or time.monotonic() < deadline):
                task = make_ruler(tokenizer, name, length, seed + len(scores))
                scores.append(score_ruler(task, answer_text(model, tokenizer, task)))
            logger.info("%s at %d: %.1f of %d", name, length, sum(scores), len(scores))
            yield Cell(name, length, len(scores), sum(scores))


def answer_text(model: Any, tokenizer: Any, task: RulerTask) -> str:
    """Return what the model generates greedily after a prompt, up to a line break or the harness's most tokens.

    The expected answer is the draft of the decoding: where the model agrees with it, one forward pass checks it all.
    """
    from transformers import DynamicCache

    prompt = tokenizer(task.prompt)["input_ids"]
    draft = tokenizer(task.answer, add_special_tokens=False)["input_ids"][: GENERATED[task.name]]
    stop = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        # All but the last token once; what is generated then goes on from the cache.
        model(torch.tensor([prompt[:-1]], device=model.device), past_key_values=cache, logits_to_keep=1)
    found = greedy(model, cache, prompt[-1:], draft)
    while stop not in found and len(found) < GENERATED[task.name]:
        more = min(_AHEAD, GENERATED[task.name] - len(found))
        found += greedy(model, cache, [prompt[-1], *found], [stop] * more)
    if stop in found:
        found = found[: found.index(stop)]
    text: str = tokenizer.decode(found)
    return text


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
