"""Texts of a replay: a prefix that all sessions share, and the turns of each session with questions at their ends.

Texts are cut in words, so that no tokenizer is needed; a server's `usage` says how many tokens a word has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from attrs import asdict, define, field, frozen

from sparseprefill.errors import ParameterError

from ..evaluation.prompts import Prompt, Span
from ..evaluation.texts import CUE, SHORTEST, built_in

KINDS = ("code", "docs", "records")
"""Kinds of text that every Python has: the prefix is of the first, sessions are of all in turn."""
STRETCHES, LEAST = 40, 8192
"""Of a text, on which its tokens are counted, and pieces that they are spread over at least."""
PIECE = re.compile(r"\s*(?:\w+|[^\w\s])|\s+$")


@define
class Pieces:
    """A tokenizer whose tokens are words and signs, each with the space before it; what is not ASCII is left out."""

    is_fast = True
    known: dict[str, int] = field(factory=dict, init=False)
    texts: list[str] = field(factory=list, init=False)

    def __call__(self, text: str, **_: Any) -> Mapping[str, Any]:
        """The pieces of a text, and where they stand in it."""
        found = [*PIECE.finditer(text.encode("ascii", "ignore").decode())]
        return {
            "input_ids": [self._number(one[0]) for one in found],
            "offset_mapping": [one.span() for one in found],
        }

    def text(self, ids: Sequence[int]) -> str:
        """The text of some pieces."""
        return "".join(self.texts[one] for one in ids)

    def _number(self, piece: str) -> int:
        if piece not in self.known:
            self.known[piece] = len(self.texts)
            self.texts.append(piece)
        return self.known[piece]


@frozen
class Question:
    """A cue behind a turn, and what the text says follows it. kind: copies, a passage; or facts, a value."""

    kind: str
    text: str
    answer: str

    @classmethod
    def of(cls, found: Any) -> Question:
        """A question in a record."""
        return cls(str(found["kind"]), str(found["text"]), str(found["answer"]))

    def right(self, found: str) -> bool:
        """True where a server's text answers it: the passage, as far as both go, or the value as the first word."""
        if self.kind == "copies":
            said, wanted = found.strip(), self.answer.strip()
            return bool(said) and (wanted.startswith(said) or said.startswith(wanted))
        words = re.findall(r"\w+", found)
        return bool(words) and words[0] == self.answer.strip()

    def clear(self, text: str) -> bool:
        """True where its cue stands in a text, and nothing but its answer behind it."""
        cue = self.text.strip()
        behind = [text.startswith(self.answer, one.end()) for one in re.finditer(re.escape(cue), text)]
        return bool(behind) and all(behind)


@frozen
class Turn:
    """A session's next text, and the questions behind it; the first question and its right answer stay in the
    session."""

    text: str
    questions: tuple[Question, ...] = ()


@frozen
class Script:
    """All that a replay sends. prefix: of every session. sessions: their turns. tokens: about so many in the longest
    session. settings: how it was made."""

    prefix: str
    sessions: tuple[tuple[Turn, ...], ...]
    tokens: int
    settings: Mapping[str, Any] = field(factory=dict)

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON holds it; `of` reads it."""
        return asdict(self)

    @classmethod
    def of(cls, found: Any) -> Script:
        """The script in a record; ParameterError where it is none."""
        try:
            sessions = tuple(
                tuple(Turn(str(turn["text"]), tuple(map(Question.of, turn["questions"]))) for turn in session)
                for session in found["sessions"]
            )
            return cls(str(found["prefix"]), sessions, int(found["tokens"]), dict(found["settings"]))
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ParameterError(f"script is not what a replay records ({error!r}): record it anew") from error


def sample(kind: str, pieces: int, seed: int, tokens: int) -> str:
    """Stretches of the first text of a kind in a script, together so many pieces, to count their tokens on.

    tokens: of that text, as told to `script_of`; shorter ones are counted alike, so that the prefix that an error names
    suffices. Stretches of other texts would not do: of code and documentation one has twice as many tokens a piece as
    another.
    """
    cutter, size = Pieces(), max(tokens, pieces, LEAST)
    (made,) = built_in(cutter, size, 1, _seed_of(seed, KINDS.index(kind)), (kind,), copies=0, facts=0)
    length, step = pieces // STRETCHES, (size - pieces) // STRETCHES
    starts = [i * (length + step) for i in range(STRETCHES)]
    return "".join(cutter.text(made.ids[start : start + length]) for start in starts)


def _seed_of(seed: int, text: int) -> int:
    """Seed of the prefix, 0, or a session's text. The first session, whose kind is the prefix's, is numbered 1, so that
    those of the other kinds begin with 2 and 3."""
    return 1000 * seed + (text + 1 if text else 0)


def least_prefix(rate: float) -> int:
    """Fewest tokens of a prefix that has room for passages and facts. rate: tokens of a piece of its text."""
    least = ceil((SHORTEST - 0.5) * rate)
    return least if round(least / rate) >= SHORTEST else least + 1


def script_of(
    prefix: int, turn: tuple[int, int], turns: int, sessions: int, questions: int, seed: int, rates: Mapping[str, float]
) -> Script:
    """Make the texts.

    prefix: tokens of the text that all share. turn: fewest and most tokens of a turn; how many is drawn. questions: at
    the end of each turn, copies and facts alternating, about what stands at least a turn above. rates: tokens of a
    piece, by kind of text. Raises ParameterError where the prefix has no room for anything to ask about.
    """
    cutter = Pieces()
    (shared,) = built_in(cutter, round(prefix / rates[KINDS[0]]), 1, _seed_of(seed, 0), KINDS[:1])
    known = _questions(cutter, shared, 0, len(shared.ids))
    if not known:
        least = max(prefix + 1, least_prefix(rates[KINDS[0]]))
        raise ParameterError(f"prefix is {prefix}: it has no room for passages and facts; pass {least} or more")
    made, most = [], 0
    for index in range(sessions):
        kind = KINDS[index % len(KINDS)]
        rng = random.Random(f"replay/{seed}/{index}")
        lengths = [rng.randint(*turn) for _ in range(turns)]
        most = max(most, prefix + sum(lengths))
        sizes = [max(1, round(one / rates[kind])) for one in lengths]
        (own,) = built_in(cutter, sum(sizes), 1, 1000 * seed + index + 1, (kind,))
        made.append(_session(cutter, cutter.text(shared.ids), own, sizes, known, questions, rng))
    settings: dict[str, Any] = {
        "prefix": prefix,
        "turn": [*turn],
        "turns": turns,
        "sessions": sessions,
        "questions": questions,
    }
    return Script(
        cutter.text(shared.ids), tuple(made), most, {**settings, "seed": seed, "tokens_per_word": dict(rates)}
    )


def _session(
    cutter: Pieces,
    text: str,
    own: Prompt,
    sizes: Sequence[int],
    known: Sequence[Question],
    questions: int,
    rng: random.Random,
) -> tuple[Turn, ...]:
    """The turns of a session. text, known: the prefix, and what can be asked about it."""
    pool, turns, first, asked = list(known), [], 0, rng.randrange(2)
    for size in sizes:
        last = first + size
        text += (added := "\n" + cutter.text(own.ids[first:last]))
        pool = [one for one in pool if one.clear(text)]
        chosen: list[Question] = []
        for _ in range(questions):
            kind = ("copies", "facts")[asked % 2]
            asked += 1
            left = [one for one in pool if one not in chosen]
            if left:
                chosen.append(rng.choice([one for one in left if one.kind == kind] or left))
        turns.append(Turn(added, tuple(chosen)))
        pool += _questions(cutter, own, first, last)
        first = last
    return tuple(turns)


def _questions(cutter: Pieces, prompt: Prompt, first: int, last: int) -> list[Question]:
    """Questions about the stretch between two pieces of a text."""
    spans = [(one, _start(cutter, prompt, one)) for one in (*prompt.copies, *prompt.inside)]
    return [
        Question(
            one.family,
            "\n" + cutter.text(prompt.ids[start : one.first]).lstrip(),
            cutter.text(prompt.ids[one.first : one.last]),
        )
        for one, start in spans
        if first <= start and one.last <= last
    ]


def _start(cutter: Pieces, prompt: Prompt, span: Span) -> int:
    """Beginning of an answer's cue: its first words, or its line."""
    if span.family == "copies":
        return span.first - CUE
    at = span.first - 1
    while at and "\n" not in cutter.texts[prompt.ids[at]]:
        at -= 1
    return at
