"""The retrieval tasks of the embedded model."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from sparseprefill.adapters.demo import formats, model
from sparseprefill.adapters.demo.formats import ADJECTIVES, NOUNS
from sparseprefill.adapters.demo.tasks import FAMILIES, Family, Task, make_task, score
from sparseprefill.adapters.demo.text import haystack_of, text_lines

DISTRACTORS = {"single": 0, "multikey": 15, "multivalue": 4, "multiquery": 4}
LENGTHS = (512, 1024, 4096)


@pytest.fixture(scope="session")
def raw_tokenizer() -> Any:
    from tokenizers import Tokenizer

    from lab.training.tokenizer import train_tokenizer

    shipped = model.CHECKPOINT / "tokenizer.json"
    return Tokenizer.from_file(str(shipped)) if shipped.is_file() else train_tokenizer(text_lines())


@pytest.fixture(scope="session")
def tokenizer(raw_tokenizer: Any) -> Any:
    import transformers

    make: Any = transformers.PreTrainedTokenizerFast

    return make(tokenizer_object=raw_tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def answers(task: Task) -> list[str]:
    return [question.answer for question in task.questions]


def test_text_is_stable_and_clean() -> None:
    lines = text_lines()
    assert lines is text_lines()
    assert len(lines) > 10_000
    for line in lines:
        assert line == " ".join(line.split())
        assert line.isascii()
        assert "magic number" not in line


def test_words_are_distinct_single_tokens(tokenizer: Any) -> None:
    words = (*ADJECTIVES, *NOUNS)
    assert len(ADJECTIVES) == len(NOUNS) == 64
    assert len(set(words)) == len(words)
    ids = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    assert {len(row) for row in ids} == {1}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_length_is_kept(tokenizer: Any, family: Family, length: int) -> None:
    for seed in range(8):
        task = make_task(tokenizer, family, length, seed)
        whole = count(tokenizer, task.prompt() + task.questions[0].answer)
        assert length - 16 < whole <= length


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_tokenize_as_the_whole(tokenizer: Any, family: Family) -> None:
    task = make_task(tokenizer, family, 2048, 5)
    question = task.questions[0]
    parts = tokenizer(task.context)["input_ids"]
    for text in (question.text, question.answer):
        parts += tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = task.prompt() + question.answer
    assert tokenizer(whole)["input_ids"] == parts
    assert tokenizer.decode(parts, skip_special_tokens=True) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_task(tokenizer: Any, family: Family) -> None:
    task = make_task(tokenizer, family, 1024, 7)
    assert make_task(tokenizer, family, 1024, 7) == task
    assert make_task(tokenizer, family, 1024, 8) != task


@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_is_in_the_context_once(tokenizer: Any, family: Family) -> None:
    for seed in range(8):
        task = make_task(tokenizer, family, 2048, seed)
        lines = task.context.splitlines()
        assert task.context.endswith("\n")
        asked = sum(len(question.values) for question in task.questions)
        assert len(task.needles) == asked + DISTRACTORS[family]
        assert [line for line in lines if "magic number" in line] == list(task.needles)
        for question in task.questions:
            for value in question.values:
                assert len(value) == formats.DIGITS
                assert value[0] != "0"
                assert sum(f" is {value}." in line for line in lines) == 1


def test_values_of_one_key_ascend_and_differ_at_once(tokenizer: Any) -> None:
    question = make_task(tokenizer, "multivalue", 1024, 3).questions[0]
    heads = [value[0] for value in question.values]
    assert heads == sorted(set(heads))
    assert "4 special magic numbers" in question.text


def test_several_questions_ask_different_keys(tokenizer: Any) -> None:
    for family in FAMILIES[1:]:
        task = make_task(tokenizer, family, 4096, 1, questions=5)
        assert len({question.text for question in task.questions}) == 5
        assert score(task, answers(task)) == (sum(len(q.values) for q in task.questions),) * 2
        longest = max(
            count(tokenizer, task.prompt(index) + question.answer) for index, question in enumerate(task.questions)
        )
        assert longest <= 4096


def test_score_counts_values_in_their_place(tokenizer: Any) -> None:
    task = make_task(tokenizer, "multiquery", 1024, 4)
    one, two, three, four = task.questions[0].values
    assert score(task, answers(task)) == (4, 4)
    assert score(task, [f"{one}, for x is {three}, for y is {two}.\n"]) == (1, 4)
    assert score(task, [f"{one}. {two} {three} {four}"]) == (1, 4)
    assert score(task, [f"{one}\n{two}"]) == (1, 4)
    assert score(task, [f"{one}0, {two}, {three}, {four}."]) == (3, 4)
    assert score(task, [""]) == (0, 4)


def test_bad_arguments_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="questions"):
        make_task(tokenizer, "single", 1024, 0, questions=2)
    with pytest.raises(ValueError, match="keys"):
        make_task(tokenizer, "multikey", 1024, 0, distractors=5000)
    with pytest.raises(ValueError, match="more tokens"):
        make_task(tokenizer, "multikey", 128, 0)


def test_own_lines_are_used(tokenizer: Any) -> None:
    lines = ("one line of filler text", "another line of filler text")
    task = make_task(tokenizer, "single", 256, 0, lines=lines)
    assert set(task.context.splitlines()) == {*lines, *task.needles}
    assert haystack_of(tokenizer, lines) is haystack_of(tokenizer, lines)


def test_what_no_text_reaches_is_not_measured(tokenizer: Any) -> None:
    """A new tokenizer at each command: all lines would take longer than the rest of a short one."""
    read: list[int] = []

    def counting(text: Any, **options: Any) -> Any:
        read.append(1 if isinstance(text, str) else len(text))
        return tokenizer(text, **options)

    wanted = make_task(tokenizer, "multikey", 1024, 2)
    assert make_task(counting, "multikey", 1024, 2) == wanted
    assert 0 < sum(read) < len(text_lines()) / 4


@pytest.mark.parametrize("family", ["single", "multikey"])
def test_long_questions_ask_the_same(tokenizer: Any, family: Family) -> None:
    seen = set()
    for seed in range(12):
        task = make_task(tokenizer, family, 1024, seed, wording="long")
        (question,) = task.questions
        key = question.text.rsplit(" for ", 1)[1].removesuffix(" is ")
        assert question.text.count(key) == 2
        assert question.text.endswith(f" The special magic number for {key} is ")
        assert f"The special magic number for {key} is {question.answer}\n" in task.context
        assert count(tokenizer, task.prompt() + question.answer) <= 1024
        seen.add(question.text.replace(key, ""))
    assert len(seen) > 8
    with pytest.raises(ValueError, match="no long questions"):
        make_task(tokenizer, "multiquery", 1024, 0, wording="long")


def test_missing_transformers_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "CHECKPOINT", Path(__file__).parent)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"\.\[hf\]"):
        model.load_tokenizer()


def test_missing_checkpoint_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "CHECKPOINT", tmp_path)
    with pytest.raises(FileNotFoundError, match="embedded model"):
        model.load_model()
