"""RULER's tasks in the wording of lm-evaluation-harness: the texts below are written out from what it makes."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from sparseprefill.adapters.demo.text import text_lines

from lab.training import ruler
from lab.training.lexicon import text_words
from lab.training.ruler import GENERATED, NAMES, Name, RulerTask, make_ruler, score_ruler

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
WORDS = r"[a-z]+-[a-z]+"


@pytest.fixture(scope="module")
def tokenizer(embedded_tokenizer: Any) -> Any:
    return embedded_tokenizer


@pytest.mark.parametrize("length", [1024, 4096, 16384])
@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_kept(tokenizer: Any, name: Name, length: int) -> None:
    for seed in range(3):
        task = make_ruler(tokenizer, name, length, seed)
        tokens = len(tokenizer(task.prompt)["input_ids"]) + GENERATED[name]
        assert 0.95 * length - 120 < tokens <= length
        assert all(output in task.prompt for output in task.outputs)
        answer = len(tokenizer(task.answer, add_special_tokens=False)["input_ids"])
        assert answer <= GENERATED[name] + 6  # the shipped tokenizer has no token for a letter with its space


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_makes_the_same_task(tokenizer: Any, name: Name) -> None:
    assert make_ruler(tokenizer, name, 1024, 3) == make_ruler(tokenizer, name, 1024, 3)
    assert make_ruler(tokenizer, name, 1024, 3) != make_ruler(tokenizer, name, 1024, 4)


@pytest.mark.parametrize(
    ("name", "what", "key", "value"),
    [
        ("niah_single_1", "number", WORDS, r"\d{7}"),
        ("niah_multikey_2", "number", WORDS, r"\d{7}"),
        ("niah_multikey_3", "uuid", UUID, UUID),
    ],
)
def test_niah_reads_as_the_harness_writes_it(tokenizer: Any, name: Name, what: str, key: str, value: str) -> None:
    task = make_ruler(tokenizer, name, 2048, 0)
    head, *lines, question = task.prompt.split("\n")
    assert head == (
        f"A special magic {what} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {what} afterwards."
    )
    needle = re.compile(rf"One of the special magic {what}s for ({key}) is: ({value})\.")
    needles = {found[1]: found[2] for line in lines if (found := needle.fullmatch(line))}
    asked = re.fullmatch(
        rf"What is the special magic {what} for ({key}) mentioned in the provided text\? "
        rf"The special magic {what} for ({key}) mentioned in the provided text is",
        question,
    )
    assert asked is not None
    assert asked[1] == asked[2]
    assert task.outputs == (needles[asked[1]],)
    assert task.answer == f" {needles[asked[1]]}.\n"
    others = [line for line in lines if not needle.fullmatch(line)]
    assert set(others) == ({NOISE} if name == "niah_single_1" else set())
    assert (len(needles) == 1) == (name == "niah_single_1")
    if what == "number":
        assert set(asked[1].split("-")) <= set(text_words(text_lines())[1])


def test_variables_read_as_the_harness_writes_them() -> None:
    units = ruler.vt_units(["ABCDE", "FGHIJ", "KLMNO"], "12345")
    assert units == ["VAR ABCDE = 12345", "VAR FGHIJ = VAR ABCDE ", "VAR KLMNO = VAR FGHIJ "]
    context = ruler.vt_context(units, 4, [1, 2, 3])
    assert ruler.vt_prompt(context, "12345", 3) == (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{NOISE}\n VAR ABCDE = 12345 {NOISE}\n VAR FGHIJ = VAR ABCDE  {NOISE}\n VAR KLMNO = VAR FGHIJ  {NOISE}\n\n"
        "Question: Find all variables that are assigned the value 12345 in the text above. "
        "Answer: According to the chain(s) of variable assignment in the text above, "
        "3 variables are assgined the value 12345, they are:"
    )
    assert ruler.vt_shot("x", "1", ["ABC", "DEF"]).endswith("they are:  ABC DEF\n\n\n\n")


def test_a_chain_stands_behind_a_worked_example(tokenizer: Any) -> None:
    task = make_ruler(tokenizer, "ruler_vt", 2048, 1)
    shot, prompt = task.prompt.split("\n\n\n\n")
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    assert shot.startswith(head)
    assert prompt.startswith(head)
    assert re.search(r"5 variables are assgined the value \d{5}, they are:  [A-Z]{3}( [A-Z]{3}){4}$", shot)
    assert prompt.endswith(", they are:")
    assert tuple(re.findall(r"VAR ([A-Z]{5}) =", prompt)) == task.outputs
    assert task.answer == f" {' '.join(task.outputs)}\n"
    assert 500 < len(tokenizer(shot)["input_ids"]) + 150 < 700


def test_coded_words_read_as_the_harness_writes_them(tokenizer: Any) -> None:
    task = make_ruler(tokenizer, "ruler_fwe", 4096, 0)
    start = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. "
    )
    end = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text? "
        "Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    assert task.prompt.startswith(start)
    assert task.prompt.endswith(end)
    words = task.prompt.removeprefix(start).removesuffix(end).split(" ")
    counts = sorted({word: words.count(word) for word in words}.items(), key=lambda pair: -pair[1])
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == task.outputs
    assert counts[3][1] > counts[4][1]
    assert counts[1][1] / len(words) == pytest.approx(0.25 / 1.6449 / 0.99, rel=0.05)
    assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in counts[1:])


def test_the_score_is_the_harness_s() -> None:
    task = RulerTask("ruler_vt", 1024, 0, "", ("ABCDE", "FGHIJ"))
    assert score_ruler(task, " fghij and then ABCDE.") == 1.0
    assert score_ruler(task, "ABCDE FGHI") == 0.5
    assert score_ruler(task, "") == 0.0


def test_too_few_tokens_are_refused(tokenizer: Any) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match="token"):
            make_ruler(tokenizer, name, 256 if name == "ruler_vt" else 128, 0)
