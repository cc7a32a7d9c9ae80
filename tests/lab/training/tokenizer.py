"""The tokenizer of the embedded model: a small byte-level BPE.

A line break and a digit are always tokens of their own, so that lines can be
tokenized one by one and joined, and a value has one token for each digit. The
words of keys and of the task sentences are single tokens.
"""

import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from sparseprefill.adapters.demo import formats
from sparseprefill.adapters.demo.formats import ADJECTIVES, NOUNS

from . import ruler

START, END = "<s>", "</s>"
_REPEATS = 3000
_NAMES = 20_000


def train_tokenizer(lines: Sequence[str], vocabulary: int = 2048) -> Any:
    """Train a ``tokenizers.Tokenizer`` on filler text and the task sentences.

    Raises:
        RuntimeError: A word of a key did not become a single token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(lines), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A",
        pair=f"{START} $A $B",
        special_tokens=[(START, tokenizer.token_to_id(START))],
    )
    broken = [
        word for word in (*ADJECTIVES, *NOUNS) if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) != 1
    ]
    if broken:
        raise RuntimeError(f"these words are not single tokens: {broken}")
    return tokenizer


def _corpus(lines: Sequence[str]) -> Iterator[str]:
    yield from lines
    keys = list(zip(ADJECTIVES, NOUNS, strict=True))
    openings = formats.openings()
    for repeat in range(_REPEATS):
        for key in keys:
            yield f" {formats.name(key)}"
        key, other = keys[repeat % len(keys)], keys[(repeat + 1) % len(keys)]
        yield formats.needle(key, "1234567")
        yield formats.one_question(key)
        yield formats.values_question(key, 3)
        yield formats.keys_question([key, other])
        yield formats.answer([key, other], ["1234567", "7654321"])
        if repeat % 10 == 0:
            # Often enough for one token a word, and not so often that whole words of the text lose theirs.
            asked = formats.ASKED[repeat // 10 % len(formats.ASKED)]
            yield formats.long_question(key, openings[repeat // 10 % len(openings)], asked)
            for what in ("number", "uuid"):
                yield from _sentences(formats.name(key), what)
    # The first letter of a variable's name takes the space before it: five names fit into the harness's 30 tokens.
    rng = random.Random(0)
    for _ in range(_NAMES):
        yield f" {rng.choice(string.ascii_uppercase)}"


def _sentences(key: str, what: str) -> Iterator[str]:
    yield ruler.NIAH_HEAD.format(what=what)
    yield ruler.NIAH_NEEDLE.format(what=what, key=key, value=1)
    yield ruler.NIAH_QUESTION.format(what=what, key=key)
    yield f" {ruler.vt_prompt(' VAR =', '1', 5)}"
    yield ruler.NOISE
    yield f"{ruler.FWE_HEAD} {ruler.FWE_DOTS}"
    yield ruler.FWE_QUESTION
