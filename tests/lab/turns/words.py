"""What stands around the turns of a conversation: the tokenizer's chat template, or plain words where it has none."""

from __future__ import annotations

from typing import Any

from attrs import frozen

MARKS = ("@1@", "@2@", "@3@")
PLAIN = ("", "\n\nAnswer:\n", "\n\nQuestion:\n")
Ids = tuple[int, ...]


@frozen(eq=False)
class Words:
    """Turns as tokens.

    begin: in front of the first question. answer: between a question and its answer. again: between an answer and the
    next question. chat: whether these are those of the tokenizer's chat template.
    """

    tokenizer: Any
    begin: Ids
    answer: Ids
    again: Ids
    chat: bool

    @classmethod
    def of(cls, tokenizer: Any) -> Words:
        """As the tokenizer's chat template has it; plain where it has none, or one that does not take a conversation
        or writes its turns otherwise when more of them follow."""
        pieces = _pieces(tokenizer)
        chat = pieces is not None
        begin, answer, again = (
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in pieces or PLAIN
        )
        return cls(tokenizer, begin if chat else _start(tokenizer), answer, again, chat)

    def ids(self, text: str) -> Ids:
        """The tokens of a text in the middle of a turn."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def bare(self, ids: Ids) -> Ids:
        """A text's tokens without what begins every text."""
        start = _start(self.tokenizer)
        return ids[len(start) :] if start and ids[: len(start)] == start else ids


def _start(tokenizer: Any) -> Ids:
    return tuple(tokenizer("")["input_ids"])


def _pieces(tokenizer: Any) -> tuple[str, str, str] | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    roles = ("user", "assistant", "user")
    said = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
    try:
        text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        alone: str = tokenizer.apply_chat_template(said[:1], tokenize=False, add_generation_prompt=True)
    except Exception:  # templates are programs of others, and raise what they like
        return None
    if any(text.count(mark) != 1 for mark in MARKS) or alone.count(MARKS[0]) != 1:
        return None
    begin, answer = alone.split(MARKS[0])
    rest = text[text.index(MARKS[1]) + len(MARKS[1]) :]
    again, _, after = rest.partition(MARKS[2])
    return (begin, answer, again) if text.startswith(begin) and after == answer else None
