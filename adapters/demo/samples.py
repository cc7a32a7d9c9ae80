"""Prompts to look at a model's attention on: many keys in a long text, as in the paper's Retr.KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .tasks import make_task

_MORE = 512


def key_value_prompts(tokenizer: Callable[..., Any], tokens: int, count: int, seed: int) -> list[list[int]]:
    """Token ids of `count` contexts of the task `multikey`, each of exactly `tokens` tokens.

    Any tokenizer of transformers will do. Raises ValueError where the needles alone need more tokens.
    """
    prompts: list[list[int]] = []
    length = tokens + _MORE
    while len(prompts) < count:
        task = make_task(tokenizer, "multikey", length, seed + len(prompts))
        ids = list(tokenizer(task.context)["input_ids"])[:tokens]
        if len(ids) == tokens:
            prompts.append(ids)
        else:  # a tokenizer that merges across line breaks needs more text
            length += tokens - len(ids) + _MORE
    return prompts
