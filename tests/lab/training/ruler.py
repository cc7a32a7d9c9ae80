"""Five tasks of RULER in the wording of lm-evaluation-harness 0.4.13, made offline from own words.

The sentences are those of `lm_eval/tasks/ruler` (niah_utils, prepare_niah, vt_utils, fwe_utils; Apache-2.0, NVIDIA,
https://github.com/NVIDIA/RULER), typing errors included, as a model sees them without a chat template: the input, a
space and the answer's prefix. The harness picks keys from a list of its own and fills a prompt in larger steps.
"""

import math
import random
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

from attrs import frozen
from sparseprefill.adapters.demo.text import text_lines

from .lexicon import text_words

Name = Literal["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe"]
"""The names of the tasks, as the harness has them."""

NAMES: tuple[Name, ...] = get_args(Name)
"""All tasks, in the order of the tables."""

GENERATED: dict[Name, int] = {
    "niah_single_1": 128,
    "niah_multikey_2": 128,
    "niah_multikey_3": 128,
    "ruler_vt": 30,
    "ruler_fwe": 50,
}
"""The most tokens that the harness lets a model generate."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

NIAH_HEAD = (
    "A special magic {what} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {what} afterwards."
)
NIAH_NEEDLE = "One of the special magic {what}s for {key} is: {value}."
NIAH_QUESTION = (
    "What is the special magic {what} for {key} mentioned in the provided text? "
    "The special magic {what} for {key} mentioned in the provided text is"
)

VT_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text."
VT_START = "VAR {name} = {value}"
VT_LINK = "VAR {name} = VAR {before} "
VT_QUESTION = (
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assgined the value {value}, they are:"
)
VT_HOPS, VT_LETTERS, VT_SHOT_LETTERS = 4, 5, 3
_VT_SHOT_TOKENS = 500

FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words."
)
FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
FWE_DOTS, FWE_LETTERS = "...", 6


@frozen
class RulerTask:
    """One prompt of a task.

    Attributes:
        name: The task.
        length: The most tokens of the prompt and what is generated.
        seed: The seed that the task was made with.
        prompt: What the model reads.
        outputs: What the generated text must hold, in the order of the expected answer.
    """

    name: Name
    length: int
    seed: int
    prompt: str
    outputs: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The continuation that the embedded model is trained to give, its line break included."""
        return f" {' '.join(self.outputs)}" + (".\n" if self.name.startswith("niah") else "\n")


def make_ruler(tokenizer: Callable[..., Any], name: Name, length: int, seed: int) -> RulerTask:
    """Make the prompt of a task, length and seed.

    Args:
        tokenizer: Any tokenizer of transformers.
        name: One of `NAMES`.
        length: Tokens of the prompt together with the most that is generated (`GENERATED`).
        seed: Chooses keys, values and places. Words of keys are those that training leaves out.

    Raises:
        ValueError: The prompt without any filler is longer than ``length``.
    """
    rng = random.Random(f"{name}/{length}/{seed}")
    room = length - GENERATED[name] - 1
    if name == "ruler_vt":
        prompt, outputs = _chain(tokenizer, rng, room)
    elif name == "ruler_fwe":
        prompt, outputs = _frequent(tokenizer, rng, room)
    else:
        prompt, outputs = _niah(tokenizer, rng, room, name)
    return RulerTask(name, length, seed, prompt, outputs)


def score_ruler(task: RulerTask, generated: str) -> float:
    """Return the share of the outputs that stand in the generated text, whatever their case and order."""
    text = generated.lower()
    return sum(output.lower() in text for output in task.outputs) / len(task.outputs)


def vt_context(units: Sequence[str], noises: int, places: Sequence[int]) -> str:
    """Return a chain's assignments among lines of noise: `units[i]` stands before line ``places[i]`` (ascending)."""
    sentences = [f"{NOISE}\n"] * noises
    for index, (place, unit) in enumerate(zip(places, units, strict=True)):
        sentences.insert(place + index, unit)
    return " ".join(sentences)


def vt_units(names: Sequence[str], value: str) -> list[str]:
    """Return the assignments of a chain."""
    links = (VT_LINK.format(name=name, before=before) for before, name in pairwise(names))
    return [VT_START.format(name=names[0], value=value), *links]


def vt_prompt(context: str, value: str, count: int) -> str:
    """Return what a model reads around a context of assignments."""
    return f"{VT_HEAD}\n\n{context}\n{VT_QUESTION.format(value=value, count=count)}"


def vt_shot(context: str, value: str, names: Sequence[str]) -> str:
    """Return the worked example that the harness puts before the task, with its two spaces and four line breaks."""
    return f"{vt_prompt(context, value, len(names))}  {' '.join(names)}\n\n\n\n"


def fwe_counts(words: int, vocabulary: int) -> list[int]:
    """Return how often each coded word appears, the dots first: a zeta distribution with exponent 2."""
    scale = words / (math.pi**2 / 6)
    return [int(scale / rank**2) for rank in range(1, vocabulary + 1)]


def _niah(tokenizer: Callable[..., Any], rng: random.Random, room: int, name: Name) -> tuple[str, tuple[str, ...]]:
    what = "uuid" if name == "niah_multikey_3" else "number"

    def needle() -> tuple[str, str, str]:
        key = _uuid(rng) if what == "uuid" else "-".join(rng.sample(_words(), 2))
        value = _uuid(rng) if what == "uuid" else str(rng.randint(10**6, 10**7 - 1))
        return key, value, NIAH_NEEDLE.format(what=what, key=key, value=value)

    key, value, line = needle()
    head, question = NIAH_HEAD.format(what=what), NIAH_QUESTION.format(what=what, key=key)
    left = room - _count(tokenizer, f"{head}\n{line}\n\n{question}")
    _check(left)
    if name == "niah_single_1":
        lines = [NOISE] * (left // _count(tokenizer, f"{NOISE}\n"))
    else:
        lines = _lines(tokenizer, lambda: needle()[2], left)
    lines.insert(rng.randrange(max(len(lines), 1)), line)
    text = "\n".join([head, *lines, question])
    return text, (value,)


def _chain(tokenizer: Callable[..., Any], rng: random.Random, room: int) -> tuple[str, tuple[str, ...]]:
    per_line = _count(tokenizer, f" {NOISE}\n")

    def made(letters: int, tokens: int, most: int | None) -> tuple[str, str, list[str]]:
        names = _distinct(rng, VT_HOPS + 1, letters, string.ascii_uppercase)
        value = str(rng.randrange(10000, 99999))
        units = vt_units(names, value)
        left = tokens - _count(tokenizer, vt_prompt(" ".join(units), value, len(names)))
        noises = left // per_line if most is None else min(left // per_line, most)
        _check(noises - len(units))
        places = sorted(rng.sample(range(noises), len(units)))
        return vt_context(units, noises, places), value, names

    shot = made(VT_SHOT_LETTERS, _VT_SHOT_TOKENS, 10)
    before = vt_shot(*shot)
    context, value, names = made(VT_LETTERS, room - _count(tokenizer, before), None)
    return before + vt_prompt(context, value, len(names)), tuple(names)


def _frequent(tokenizer: Callable[..., Any], rng: random.Random, room: int) -> tuple[str, tuple[str, ...]]:
    vocabulary = _distinct(rng, max(room // 50, 1), FWE_LETTERS, string.ascii_lowercase)
    vocabulary[0] = FWE_DOTS
    sizes = [_count(tokenizer, f" {word}") for word in vocabulary]
    left = room - _count(tokenizer, f"{FWE_HEAD}\n{FWE_QUESTION}")

    def tokens(words: int) -> int:
        return sum(map(int.__mul__, sizes, fwe_counts(words, len(sizes))))

    counts = fwe_counts(bisect_right(range(max(left, 0)), left, key=tokens) - 1, len(sizes))
    if len(counts) < 5 or counts[3] <= counts[4]:
        raise ValueError(f"{room} tokens are too few to count words in")
    drawn = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(drawn)
    return f"{FWE_HEAD} {' '.join(drawn)}\n{FWE_QUESTION}", tuple(vocabulary[1:4])


def _lines(tokenizer: Callable[..., Any], made: Callable[[], str], room: int) -> list[str]:
    """As many lines as fit, each with its line break."""
    lines: list[str] = []
    while True:
        more = [made() for _ in range(64)]
        for line, ids in zip(more, tokenizer(more, add_special_tokens=False)["input_ids"], strict=True):
            room -= len(ids) + 1
            if room < 0:
                return lines
            lines.append(line)


@lru_cache(maxsize=1)
def _words() -> tuple[str, ...]:
    return text_words(text_lines())[1]


def _distinct(rng: random.Random, count: int, letters: int, alphabet: str) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(alphabet, k=letters))] = None
    return list(found)


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _count(tokenizer: Callable[..., Any], text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check(left: int) -> None:
    if left < 0:
        raise ValueError(f"the prompt without filler needs {-left} more tokens")
