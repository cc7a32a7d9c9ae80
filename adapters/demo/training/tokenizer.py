"""The tokenizer of the embedded model: a small byte-level BPE.

A line break and a digit are always tokens of their own, so that lines can be
tokenized one by one and joined, and a value has one token for each digit. The
words of keys and of the task sentences are single tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from .. import formats
from ..words import ADJECTIVES, NOUNS

START, END = "<s>", "</s>"
_REPEATS = 3000


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
    for repeat in range(_REPEATS):
        for key in keys:
            yield f" {formats.name(key)}"
        key, other = keys[repeat % len(keys)], keys[(repeat + 1) % len(keys)]
        yield formats.needle(key, "1234567")
        yield formats.one_question(key)
        yield formats.values_question(key, 3)
        yield formats.keys_question([key, other])
        yield formats.answer([key, other], ["1234567", "7654321"])
