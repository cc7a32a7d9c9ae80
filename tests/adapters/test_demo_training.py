"""The training of the embedded model: its rows, its schedule, and runs that go on where they stopped."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from sparseprefill.adapters.demo import formats, model
from sparseprefill.adapters.demo.text import text_lines

from lab.training import __main__ as train
from lab.training import ruler
from lab.training.batches import Batches
from lab.training.card import RECORD, compare
from lab.training.cells import answer_text, logits_gap
from lab.training.checkpoint import save_network, save_tokenizer
from lab.training.lexicon import text_words
from lab.training.loop import STATE, Budget, Trainer
from lab.training.network import Network, Shape
from lab.training.plan import FAMILIES, SIZES, Family, Mix, Stage
from lab.training.pools import Pools
from lab.training.schedule import LEAST, Schedule, Settings
from lab.training.templates import ANSWER, IGNORED, TEXT, Template
from lab.training.tokenizer import train_tokenizer

CPU = torch.device("cpu")
TINY = Shape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, inner=16)
NIAH_LEAD = " mentioned in the provided text? The special magic "


class Remembering:
    """A tokenizer that knows the tokens of long lists of strings again: encoding them is most of making a batch."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> Any:
        """Without special tokens alone, which is how batches are made."""
        assert not add_special_tokens
        key = tuple(texts)
        if key not in self._known:
            self._known[key] = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._known[key]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Remembering(Tokenizer.from_file(str(model.CHECKPOINT / "tokenizer.json")))


@pytest.fixture(scope="module")
def lines() -> tuple[str, ...]:
    return text_lines()[:3000]


def batches_of(tokenizer: Any, lines: tuple[str, ...], seed: int = 0) -> Batches:
    pools = Pools(tokenizer, lines, CPU, seed)
    return Batches(pools, pools.encode_all([f"{line}\n" for line in lines]), tokenizer.token_to_id("<s>"))


@pytest.fixture(scope="module")
def batches(tokenizer: Any, lines: tuple[str, ...]) -> Batches:
    return batches_of(tokenizer, lines)


def texts(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids.tolist()]


@pytest.mark.parametrize("length", [256, 512, 2048, pytest.param(8192, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "echo"])
def test_rows_encode_to_the_same_tokens(batches: Batches, tokenizer: Any, family: Family, length: int) -> None:
    for seed in range(4):
        batch = batches.make([family], random.Random(seed), 3, length)
        assert batch.ids.shape == batch.kinds.shape == (3, length)
        assert batch.families == (family,) * 3
        for row, kinds, text in zip(batch.ids, batch.kinds, texts(tokenizer, batch.ids), strict=True):
            assert tokenizer.encode(text).ids == row.tolist()
            assert set(kinds.unique().tolist()) <= {IGNORED, TEXT, ANSWER}


def test_a_batch_shares_its_rows_among_families(batches: Batches) -> None:
    batch = batches.make(["keys", "chain", "lists"], random.Random(0), 8, 512)
    assert batch.families == ("keys",) * 3 + ("chain",) * 3 + ("lists",) * 2


def test_needles_and_their_questions(batches: Batches, tokenizer: Any) -> None:
    for seed in range(12):
        length = random.Random(seed).choice((256, 512, 2048, 8192))
        batch = batches.make(["needles"], random.Random(seed), 2, length)
        for row, kind, text in zip(batch.ids, batch.kinds, texts(tokenizer, batch.ids), strict=True):
            answered = tokenizer.decode(row[kind == ANSWER].tolist())
            said = [line.split(" The special magic number for ")[-1] for line in text.splitlines() if "? " in line]
            said = [part for part in said if " is " in part]
            wanted = "".join(part.split(" is ", 1)[1] for part in said)
            long = [line for line in text.splitlines() if line.count("special magic number") > 1 and "? " not in line]
            wanted_long = sum(len(line.rsplit(" is ", 1)[1]) for line in long)
            assert len(answered) == len(wanted) + wanted_long
            check_needles(text)


def check_needles(text: str) -> None:
    known: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("The special magic number for "):
            key, value = line.removeprefix("The special magic number for ").rstrip(".").split(" is ")
            known.setdefault(key, set()).add(value)
        elif " The special magic number for " in line:
            said = line.rsplit(" The special magic number for ", 1)[1].rstrip(".").split(", for ")
            pairs = [part.split(" is ") for part in said]
            for key in dict(pairs):
                assert {value for name, value in pairs if name == key} == known[key]


def test_long_questions_are_asked_in_20_to_60_tokens(batches: Batches, tokenizer: Any) -> None:
    mix = Mix(6, 4, 0, 2, 0, 2, 0.0, long=True)
    ids, kinds = batches.lay(batches._sheets.needles(random.Random(0), 4, mix), 1024)
    for text, row, kind in zip(texts(tokenizer, ids), ids, kinds, strict=True):
        asked = [line for line in text.splitlines() if line.startswith(formats.OPENINGS)]
        assert len(asked) == 6
        check_needles(text)
        answers = tokenizer.decode(row[kind == ANSWER].tolist())
        assert answers == "".join(line.rsplit(" is ", 1)[1] for line in asked)
    new = train_tokenizer(text_lines())
    for opening in formats.openings():
        for form in formats.ASKED:
            question = formats.long_question(("quiet", "harbor"), opening, form)
            assert 20 <= len(new.encode(question, add_special_tokens=False).ids) <= 62


@pytest.mark.parametrize("family", ["noise", "keys", "uuids"])
def test_niah_rows(batches: Batches, tokenizer: Any, family: Family) -> None:
    what = "uuid" if family == "uuids" else "number"
    for length in (512, 2048):
        batch = batches.make([family], random.Random(length), 4, length)
        for text, row, kind in zip(texts(tokenizer, batch.ids), batch.ids, batch.kinds, strict=True):
            head, body = text.split("\n", 1)
            assert head == (
                f"A special magic {what} is hidden within the following text. Make sure to memorize it. "
                f"I will quiz you about the {what} afterwards."
            )
            known, answers, noise = {}, [], 0
            for line in body.splitlines():
                if line.startswith(f"One of the special magic {what}s for "):
                    key, value = line.removeprefix(f"One of the special magic {what}s for ").rstrip(".").split(" is: ")
                    known[key] = value
                elif NIAH_LEAD in line:
                    key = line.split(NIAH_LEAD)[0].removeprefix(f"What is the special magic {what} for ")
                    start = f"{what} for {key} mentioned in the provided text is "
                    assert line.split(NIAH_LEAD)[1] == f"{start}{known[key]}."
                    answers.append(f" {known[key]}.")
                elif not answers:
                    assert line == ruler.NOISE
                    noise += 1
            assert answers
            assert tokenizer.decode(row[kind == ANSWER].tolist()) == "".join(answers)
            assert (noise > 0) == (family == "noise") or family != "noise"


def test_chains(batches: Batches, tokenizer: Any) -> None:
    asked = 0
    for seed in range(12):
        batch = batches.make(["chain"], random.Random(seed), 2, 1024)
        for text, row, kind in zip(texts(tokenizer, batch.ids), batch.ids, batch.kinds, strict=True):
            context, *questions = text[text.rindex(ruler.VT_HEAD) :].split("\n\nQuestion: ")
            assert context.startswith(f"{ruler.VT_HEAD}\n\n{ruler.NOISE}\n ")
            assert context.endswith(ruler.NOISE)
            chains: dict[str, list[str]] = {}
            last: dict[str, list[str]] = {}
            for name, before, value in re.findall(r" VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5}) |(\d{5}))(?= )", context):
                chain = chains.setdefault(value, []) if value else last.pop(before)
                chain.append(name)
                last[name] = chain
            answers = []
            for question in questions:
                value = question.split("assigned the value ")[1][:5]
                answer = question.split("they are:")[1].split("\n")[0]
                assert answer.split() == chains[value]
                assert f" {len(chains[value])} variables are assgined the value {value}," in question
                answers.append(answer)
            asked += len(questions)
            assert len(questions) == len(chains) > 0
            assert tokenizer.decode(row[kind == ANSWER].tolist()) == "".join(answers)
    assert asked > 24


def test_the_worked_example_is_that_of_the_harness(batches: Batches, tokenizer: Any) -> None:
    seen = 0
    for seed in range(12):
        (text,) = texts(tokenizer, batches.make(["chain"], random.Random(seed), 1, 2048).ids)
        if text.count(ruler.VT_HEAD) == 1:
            continue
        shot, rest = text.split("\n\n\n\n")
        assert shot.startswith(f"{ruler.VT_HEAD}\n\n")
        assert rest.startswith(f"{ruler.VT_HEAD}\n\n{ruler.NOISE}\n ")
        assert shot.count(ruler.NOISE) == 10
        names = re.findall(r"VAR ([A-Z]{3}) =", shot)
        assert len(names) == 5
        value = re.findall(r"= (\d{5}) ", shot)[0]
        assert shot.endswith(f"5 variables are assgined the value {value}, they are:  {' '.join(names)}")
        seen += 1
    assert seen > 4


def test_an_echo_says_everything_again(batches: Batches) -> None:
    for seed in range(6):
        batch = batches.make(["echo"], random.Random(seed), 2, 512)
        for row, kind in zip(batch.ids.tolist(), batch.kinds.tolist(), strict=True):
            answers = [index for index, one in enumerate(kind) if one == ANSWER]
            first = answers[0] - 1
            seen = {tuple(row[index : index + 2]) for index in range(1, first - 1)}
            assert len(answers) > 100
            assert all((row[index - 1], row[index]) in seen for index in answers)


def test_the_most_frequent_words(batches: Batches, tokenizer: Any) -> None:
    batch = batches.make(["frequent"], random.Random(0), 4, 1024)
    for text, row, kind in zip(texts(tokenizer, batch.ids), batch.ids, batch.kinds, strict=True):
        assert text.startswith(f"{ruler.FWE_HEAD} ")
        words = text.removeprefix(ruler.FWE_HEAD).split("\n")[0].split()
        counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
        assert counts[0][1] == ruler.FWE_DOTS
        assert counts[3][0] > counts[4][0]
        wanted = "".join(f" {word}" for _, word in counts[1:4])
        assert tokenizer.decode(row[kind == ANSWER].tolist()) == wanted
        assert f"{ruler.FWE_QUESTION}{wanted}\n" in text


def test_lists_say_everything_twice(batches: Batches, tokenizer: Any) -> None:
    for seed in range(8):
        batch = batches.make(["lists"], random.Random(seed), 2, 512)
        for row, kind, text in zip(batch.ids, batch.kinds, texts(tokenizer, batch.ids), strict=True):
            answers = tokenizer.decode(row[kind == ANSWER].tolist())
            assert answers
            starts = ("The code for ", "item ", "Note: ", "One of the special")
            said = [line for line in text.splitlines() if line.startswith(starts) and text.count(f"{line}\n") == 2]
            assert len(said) >= 2
            assert len(set(said)) * 2 == len(said)


@pytest.mark.thorough
def test_the_same_seed_makes_the_same_rows(tokenizer: Any, lines: tuple[str, ...]) -> None:
    one, two, other = (batches_of(tokenizer, lines, seed) for seed in (3, 3, 4))
    made = [one_of.make(["keys"], random.Random(0), 2, 512).ids for one_of in (one, two, other)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_words_of_the_evaluation_are_not_trained_on(batches: Batches, lines: tuple[str, ...]) -> None:
    trained, held = text_words(lines)
    assert not set(trained) & set(held)
    assert 0.05 < len(held) / len(trained) < 0.2


def test_a_place_needs_the_space_that_fills_it(batches: Batches) -> None:
    with pytest.raises(ValueError, match="no space stands before"):
        Template(batches._pools, "x{name}")


STAGES = (Stage(0.25, {64: 1.0}), Stage(0.25, {64: 0.5, 128: 0.5}), Stage(0.5, {256: 1.0}))
RIGHT: dict[str, float] = {"needles": 0.99, "noise": 0.99, "keys": 0.99}


def test_a_stage_ends_when_its_answers_are_right() -> None:
    schedule = Schedule(STAGES)
    assert schedule.bounds() == (0.25 * LEAST, 0.5)
    assert not schedule.advance(1, 0.01, RIGHT)
    assert not schedule.advance(2, 0.2, {**RIGHT, "keys": 0.9})
    assert not schedule.advance(3, 0.2, {"lists": 0.99})
    assert not schedule.advance(4, 0.2, None)
    assert schedule.advance(5, 0.2, RIGHT)
    assert (schedule.stage, schedule.began, schedule.changes[0].why) == (1, 0.2, "answers")


def test_a_stage_ends_at_its_limit_and_the_rest_is_shared() -> None:
    schedule = Schedule(STAGES)
    assert not schedule.advance(1, 0.49, None)
    assert schedule.advance(2, 0.5, {"lists": 0.4})
    assert schedule.changes[0].why == "limit"
    least, limit = schedule.bounds()
    assert least == pytest.approx(0.5 + 0.5 * LEAST / 3)
    assert limit == pytest.approx(0.5 + 0.5 * 0.6)
    assert schedule.advance(3, 0.8, None)
    assert schedule.bounds() == (1.0, 1.0)
    assert not schedule.advance(4, 0.99, RIGHT)


def test_the_rate_rises_holds_and_falls() -> None:
    schedule, settings = Schedule(STAGES), Settings(warmup=100, peak=1.0, hold=0.5, floor=0.01)
    rates = [schedule.rate(settings, step, progress) for step, progress in ((0, 0), (49, 0.1), (99, 0.1), (500, 0.5))]
    assert rates == [0.01, 0.5, 1.0, 1.0]
    assert schedule.rate(settings, 500, 0.75) == pytest.approx(0.505)
    assert schedule.rate(settings, 500, 1.0) == pytest.approx(0.01)
    slower = Schedule((Stage(1.0, {64: 1.0}, rate=0.3),))
    assert slower.rate(settings, 500, 0.1) == 0.3


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes(name: str) -> None:
    size = SIZES[name]
    parameters = sum(weight.numel() for weight in Network(size.shape).parameters())
    assert parameters * 2 <= (11.8e6 if name != "long" else 80e6)
    assert sum(stage.share for stage in size.stages) == pytest.approx(1)
    lengths = [stage.length for stage in size.stages]
    assert lengths == sorted(lengths)
    assert max(size.lengths) <= size.positions
    assert lengths[-1] == size.positions or name == "smoke"
    if name == "long":
        assert (size.shape.head_dim, size.shape.heads, size.shape.kv_heads) == (128, 8, 2)
        assert size.positions == 131_072


TWO = (Stage(0.5, {64: 1.0}, 0.0, {"lists": 1.0}, 1.0, 256), Stage(0.5, {128: 1.0}, 0.98, {"keys": 1.0}, 0.5, 256))


def trained(tokenizer: Any, lines: tuple[str, ...], folder: Path, cuts: tuple[int, ...], seed: int = 0) -> Trainer:
    """A run of 24 steps, cut after some of them: each part with objects of its own."""
    torch.manual_seed(seed)
    settings = Settings(seed=seed, check=5, warmup=4, counted=200)
    trainer = Trainer(Network(TINY), batches_of(tokenizer, lines, seed), TWO, settings)
    for cut in cuts:
        budget = Budget(1e9, time.monotonic() + 600, 24)
        trainer._step = stopping(trainer, budget, cut - trainer.course.step)  # type: ignore[method-assign]
        assert not trainer.train(budget, folder)
        assert trainer.course.step == cut
        trainer = Trainer(Network(TINY), batches_of(tokenizer, lines, seed), TWO, settings)
        trainer.load(folder)
    assert trainer.train(Budget(1e9, time.monotonic() + 600, 24), folder)
    return trainer


def stopping(trainer: Trainer, budget: Budget, steps: int) -> Any:
    """A step that lets the deadline pass after some steps."""
    step, left = trainer._step, [steps]

    def stop(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            object.__setattr__(budget, "deadline", 0.0)
        return step(*arguments)

    return stop


def weights(trainer: Trainer) -> Mapping[str, torch.Tensor]:
    return trainer._network.state_dict()


@pytest.mark.thorough
def test_a_resumed_run_is_the_run(tokenizer: Any, lines: tuple[str, ...], tmp_path: Path) -> None:
    whole = trained(tokenizer, lines, tmp_path, ())
    again = trained(tokenizer, lines, tmp_path, (7, 15))
    other = trained(tokenizer, lines, tmp_path, (), seed=1)
    assert whole.course.step == again.course.step == 24
    assert whole.course.schedule.stage == 1
    assert len(whole.course.schedule.changes) == len(again.course.schedule.changes) == 1
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(again)[name]), name
    assert not torch.equal(weights(whole)["model.norm.weight"], weights(other)["model.norm.weight"])
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.thorough
def test_a_state_of_other_settings_is_refused(tokenizer: Any, lines: tuple[str, ...], tmp_path: Path) -> None:
    trained(tokenizer, lines, tmp_path, ())
    trainer = Trainer(Network(TINY), batches_of(tokenizer, lines), TWO, Settings(seed=0, peak=1.0))
    with pytest.raises(ValueError, match=r"other settings: .*peak"):
        trainer.load(tmp_path)


def test_losses_of_a_sample_are_those_of_all(tokenizer: Any, lines: tuple[str, ...], batches: Batches) -> None:
    """With room for every answer, the loss on answers does not depend on how much text is looked at."""
    torch.manual_seed(0)
    batch = batches.make(["keys", "noise"], random.Random(0), 4, 256)
    network = Network(TINY)
    found = []
    for counted in (4 * 256, 600, 300):
        trainer = Trainer(network, batches, TWO, Settings(counted=counted))
        found.append(trainer._losses(batch))
    assert int((batch.kinds[:, 1:] == ANSWER).sum()) == int(found[0].total.sum()) < 300
    for losses in found[1:]:
        assert torch.equal(losses.total, found[0].total)
        assert losses.answer.item() == pytest.approx(found[0].answer.item(), rel=1e-5)


def test_the_checkpoint_of_the_long_shape_loads(tokenizer: Any, tmp_path: Path) -> None:
    shape = Shape(hidden=32, layers=2, heads=8, kv_heads=2, head_dim=128, inner=32, theta=5e6)
    network = Network(shape)
    save_tokenizer(tokenizer, tmp_path, 131_072)
    save_network(network, tokenizer, tmp_path, 131_072)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 131_072
    assert logits_gap(network, tmp_path, list(range(100, 164))) < 1e-4


def record(folder: Path, seed: int, results: Mapping[tuple[str, int], float]) -> Path:
    folder.mkdir()
    cells = [{"family": f, "length": n, "tasks": 50, "exact": 50 * share} for (f, n), share in results.items()]
    (folder / RECORD).write_text(json.dumps({"seed": seed, "evaluation": cells}))
    return folder


def test_records_are_compared(tmp_path: Path) -> None:
    one = record(tmp_path / "a", 0, {("single", 1024): 1.0, ("single", 2048): 0.9, ("ruler_vt", 1024): 0.5})
    two = record(tmp_path / "b", 1, {("single", 1024): 0.98, ("single", 2048): 0.96})
    found = compare([one, two]).splitlines()
    assert found[0] == "| Task | Tokens | a (seed 0) | b (seed 1) | Spread |"
    assert found[2:5] == [
        "| single | 1,024 | 100.0 | 98.0 | 2.0 |",
        "| single | 2,048 | 90.0 | 96.0 | 6.0 |",
        "| single | mean | 95.0 | 97.0 | 2.0 |",
    ]
    assert found[-2:] == [
        "Largest spread of a task's mean: 2.0 points.",
        "1 results that some runs lack are left out.",
    ]
    with pytest.raises(ValueError, match="no results"):
        compare([one, record(tmp_path / "c", 2, {})])
    with pytest.raises(ValueError, match="in common"):
        compare([one, record(tmp_path / "d", 2, {("other", 1024): 1.0})])


def test_the_command_compares_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = record(tmp_path / "a", 0, {("single", 1024): 1.0})
    train.main(["--compare", str(one), str(one)])
    assert "Largest spread of a task's mean: 0.0 points." in capsys.readouterr().out
    for arguments, words in (
        ([], "--out DIR is missing"),
        (["--out", str(tmp_path), "--resume"], f"no {tmp_path / STATE}"),
        (["--compare", str(tmp_path / "none")], "--compare"),
        (["--out", str(tmp_path), "--steps", "0"], "--steps"),
        (["--out", str(tmp_path), "--seconds", "-1"], "--seconds"),
        (["--out", str(tmp_path), "--size", "huge"], "--size"),
    ):
        with pytest.raises(SystemExit) as raised:
            train.main(arguments)
        assert raised.value.code == 2
        assert words in capsys.readouterr().err


def test_the_record_names_no_folder() -> None:
    assert train._command(["--out", "/somewhere/x", "--seed", "1"]).endswith("training --out DIR --seed 1")
    assert train._command(["--out=/somewhere/x"]).endswith("training --out=DIR")


class Canned:
    """A model that says what it is told, one token after the other."""

    def __init__(self, prompt: list[int], says: list[int]) -> None:
        self.device, self.config = CPU, None
        self._prompt, self._says, self._seen = prompt, says, 0

    def __call__(self, ids: torch.Tensor, past_key_values: Any, logits_to_keep: int) -> Any:
        """Logits that choose the next tokens."""
        past_key_values.length += ids.shape[1]
        end = past_key_values.length - len(self._prompt) + 1
        logits = torch.zeros(1, logits_to_keep, 4096)
        for index in range(logits_to_keep):
            at = end - logits_to_keep + index
            logits[0, index, self._says[at] if 0 <= at < len(self._says) else 0] = 1.0
        return type("Output", (), {"logits": logits})()


class CannedCache:
    """A cache that knows its length alone."""

    def __init__(self, config: object = None) -> None:
        self.length = 0

    def get_seq_length(self) -> int:
        """Tokens read."""
        return self.length

    def crop(self, tokens: int) -> None:
        """Forget tokens."""
        self.length += tokens


def test_generated_text_ends_at_a_line_break_or_the_most_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "DynamicCache", CannedCache)
    tokenizer = model.load_tokenizer()
    task = ruler.RulerTask("ruler_vt", 1024, 0, "a prompt", ("ABCDE", "FGHIJ"))
    prompt = tokenizer(task.prompt)["input_ids"]

    def said(text: str) -> str:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return answer_text(Canned(prompt, tokens), tokenizer, task)

    assert said(" ABCDE FGHIJ\n more") == " ABCDE FGHIJ"
    assert said(" ABCDX, and FGHIJ\nFGHIJ") == " ABCDX, and FGHIJ"
    long = said(" no" * 100)
    assert len(tokenizer(long, add_special_tokens=False)["input_ids"]) == ruler.GENERATED["ruler_vt"]
