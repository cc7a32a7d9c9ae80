"""Prompts to compare on, from files; `texts` has those that are made of text at hand."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from sparseprefill import structure
from sparseprefill.errors import ParameterError

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""Files that a folder of prompts may hold."""
MOST = 1 << 30
"""Bytes of one of them."""


@frozen
class Span:
    """An answer inside a prompt: the tokens from `first` to before `last`, of a family of tasks."""

    family: str
    first: int
    last: int


@frozen
class Prompt:
    """A prompt as the model reads it.

    name: where it comes from. ids: its tokens, at least one. inside: answers that stand in it, and that the rows before
    their tokens must find (teacher forcing). copies: tokens of passages that stand far above, too, word for word.
    """

    name: str
    ids: tuple[int, ...]
    inside: tuple[Span, ...] = ()
    copies: tuple[Span, ...] = ()


@frozen
class Text:
    """A prompt before it is tokens. name: where it comes from. prompt: its text; messages: of a chat, in its place.

    line: whether it is a line of JSONL, whose question is likely to stand at the end.
    """

    name: str
    prompt: str = ""
    messages: Any = None
    line: bool = False


def read(path: str | Path) -> list[Text]:
    """The prompts of a text file (one prompt), a JSONL file (one a line), or a folder of both, in order of name.

    A line of JSONL is an object with `prompt`, a text, or with `messages`, chat messages that go through the
    tokenizer's chat template. No tokenizer is needed yet. Raises ParameterError, which names file and line, for what is
    none of that.
    """
    if path == "":
        raise ParameterError("prompts is '': pass the path of a file or folder")
    path = Path(path)
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES)
        if not files:
            raise ParameterError(f"prompts: {path} holds no file that ends in {', '.join(SUFFIXES)}: add one")
    elif path.is_file():
        files = [path]
    else:
        raise ParameterError(f"prompts: there is no file or folder {path}")
    return [text for file in files for text in _of_file(file)]


def tokenized(texts: Iterable[Text], tokenizer: Any, tokens: int | None = None) -> list[Prompt]:
    """The prompts as a tokenizer cuts them up.

    tokens: the most of one prompt. A text is cut behind it; of a line of JSONL the middle is left out. ParameterError
    for messages where the tokenizer has no chat template, or one that refuses them.
    """
    return [Prompt(one.name, tuple(_cut(_ids_of(one, tokenizer), tokens, middle=one.line))) for one in texts]


def spans_of(
    text: str, places: Sequence[tuple[str, int, int]], tokenizer: Any, *, start: bool = True
) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """The tokens of a text, and which of them are the answers at some places: family, first character, one behind.

    A token that holds the space before an answer belongs to it. start: whether the tokens that begin and end a text
    come with it. Raises ParameterError where the tokenizer does not say
    which characters a token stands for, or joins an answer with other text.
    """
    if not places:
        return tuple(tokenizer(text)["input_ids"]), ()
    if not getattr(tokenizer, "is_fast", False):
        name = type(tokenizer).__name__
        raise ParameterError(f"tokenizer is {name}, which does not say where its tokens stand: pass a fast one")
    read = tokenizer(text, add_special_tokens=start, return_offsets_mapping=True)
    ends = [last for _, last in read["offset_mapping"]]
    spans = []
    for family, first, last in places:
        one = Span(family, bisect_right(ends, first), bisect_left(ends, last) + 1)
        begin, end = read["offset_mapping"][one.first][0], ends[one.last - 1]
        if text[begin:first].strip() or text[last:end].strip() or not one.first:
            joined = text[begin:end]
            raise ParameterError(
                f"tokenizer joins the answer {text[first:last]!r} with other text into {joined!r}: pass a model whose "
                "tokenizer splits numbers from what stands beside them"
            )
        spans.append(one)
    return tuple(read["input_ids"]), tuple(spans)


def _of_file(path: Path) -> Iterator[Text]:
    try:
        text = structure.read(path, MOST)
    except ParameterError as error:
        raise ParameterError(f"prompts: {path} {error}") from error
    if not text.strip():
        raise ParameterError(f"prompts: {path} holds no text: pass a file with a prompt")
    if path.suffix.lower() != ".jsonl":
        yield Text(path.name, text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _of_line(line, f"{path.name}:{number}")


def _of_line(line: str, where: str) -> Text:
    try:
        entry = structure.parsed(line, remedy="write one object a line")
    except ParameterError as error:
        raise ParameterError(f"prompts: {where} {error}") from error
    given = sorted({"prompt", "messages"} & set(entry)) if isinstance(entry, dict) else []
    if len(given) != 1:
        raise ParameterError(f"prompts: {where} is {line[:60]!r}: pass an object with either 'prompt' or 'messages'")
    if given == ["messages"]:
        return Text(where, messages=entry["messages"], line=True)
    if not isinstance(entry["prompt"], str) or not entry["prompt"]:
        raise ParameterError(f"prompts: {where}: prompt is {entry['prompt']!r}: pass a string")
    return Text(where, entry["prompt"], line=True)


def _ids_of(one: Text, tokenizer: Any) -> list[int]:
    if one.prompt:
        return _ids(tokenizer, one.prompt, start=True)
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError(f"prompts: {one.name} has messages, but the tokenizer has no chat template: pass 'prompt'")
    try:
        text = tokenizer.apply_chat_template(one.messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of others, and raise what they like
        raise ParameterError(
            f"prompts: {one.name}: the chat template refuses the messages: {error}; pass 'prompt'"
        ) from error
    return _ids(tokenizer, text, start=False)


def _ids(tokenizer: Any, text: str, *, start: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=start)["input_ids"])


def _cut(ids: list[int], tokens: int | None, *, middle: bool) -> list[int]:
    if tokens is None or len(ids) <= tokens:
        return ids
    first = tokens // 2 if middle else tokens
    return ids[:first] + ids[len(ids) - (tokens - first) :]
