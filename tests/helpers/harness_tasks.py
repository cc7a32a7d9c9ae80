"""What tests of the harness share: a task of the embedded model's own questions, and a network that is out of reach."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

LENGTH = 1536
"""Tokens in which all of RULER's offline tasks find room with the embedded tokenizer."""

YAML = """
task: needles
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/needles.jsonl}}, cache_dir: {folder}/cache}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}]
"""


def need_harness() -> None:
    """Skips a module where the extra is not installed; never in CI, where it has to be."""
    if not os.environ.get("CI"):
        pytest.importorskip("lm_eval")


def write_task(folder: Path, pairs: Iterable[tuple[str, str]]) -> Path:
    """A task file of the harness that asks texts and scores exact answers."""
    lines = [json.dumps({"text": text, "answer": answer}) for text, answer in pairs]
    (folder / "needles.jsonl").write_text("\n".join(lines))
    path = folder / "needles.yaml"
    path.write_text(YAML.format(folder=folder))
    return path


def needles(count: int) -> list[tuple[str, str]]:
    """Prompts with one needle each in text of their own, as the embedded model knows them, and the answers."""
    from sparseprefill.adapters.demo.formats import ADJECTIVES, NOUNS, answer, needle, one_question
    from sparseprefill.adapters.demo.text import text_lines

    made = []
    for i in range(count):
        lines = list(text_lines()[100 * i : 100 * i + 40])
        key, value = (ADJECTIVES[7 * i], NOUNS[5 * i]), str(3141592 + 271828 * i)
        lines.insert(5 + 3 * i, needle(key, value))
        made.append(("\n".join([*lines, one_question(key)]), answer([key], [value])))
    return made


def few_words(patch: pytest.MonkeyPatch) -> None:
    """RULER's module sorts 10 million pairs of words when it is imported, for ten seconds; now a hundredth of them."""
    import wonderwords

    whole = wonderwords.RandomWord

    def few() -> Any:
        made: Any = whole()
        made._categories = {name: list(words)[::10] for name, words in made._categories.items()}
        return made

    patch.setattr(wonderwords, "RandomWord", few)


def cut_off(patch: pytest.MonkeyPatch) -> list[Any]:
    """No name resolves and no address answers, and Hugging Face's libraries are told so; gives what was tried.

    With few words to draw from.
    """
    few_words(patch)
    tried: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        tried.append(arguments)
        raise OSError("the test has no network")

    for name in ("getaddrinfo", "create_connection"):
        patch.setattr(socket, name, refuse)
    patch.setattr(socket.socket, "connect", refuse)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        patch.setenv(name, "1")
    return tried
