"""Natural texts out of the Python at hand, with passages and facts in them that are restated far below.

A pretrained model goes on with a passage that it has read before, and with a fact that it was told: no training for a
task is needed, and what a prefill loses shows in the tokens that its rows can no longer look up. Nothing is downloaded.
Other versions of Python and of what is installed give slightly other texts for the same seed.

Four kinds of text: `code`, the standard library's sources; `docs`, what ``help()`` shows and docstrings; `notes`, the
descriptions of installed packages, which are mostly prose; and `records`, one JSON object for every function of the
standard library, as a tool of an agent would list them.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import frozen

from sparseprefill.errors import ParameterError

from .prompts import Prompt, Span, spans_of

LENGTH, CUE = 56, 8
"""Tokens of a passage that is restated, and the first of them, which do not count: nothing says yet which one it is."""
COPIES, FACTS = 16, 12
"""Passages and facts in a text, at most; shorter texts have fewer."""
EACH = 384
"""Tokens of a text for each passage."""
FAR = 1280
"""Tokens at least between a passage or a fact and where it stands again, so that no small window holds both."""
SHORTEST = 3072
"""Tokens of the shortest text that has room for both."""
END = 320
"""Tokens behind the last of them, so that it stands in no row that a dense tail serves."""
FORMS = (
    "The access code of the {key} is {value}.",
    "Note: the serial number of the {key} is {value}.",
    "{key} = {value}",
    "# {key}: {value}",
    '{{"name": "{key}", "id": {value}}}',
)
"""Wording of facts: prose, a setting, a comment, a record."""
Fact = tuple[tuple[int, ...], tuple[Span, ...]]
"""The tokens of a line, and which of them are its value."""
_SIZES = ("small", "large", "heavy", "light", "round", "narrow", "hollow", "folding")
_COLOURS = ("red", "green", "violet", "orange", "silver", "purple", "yellow", "brown")
_THINGS = ("lantern", "kettle", "compass", "ladder", "violin", "anchor", "basket", "hammer", "mirror", "saddle")
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


def built_in(
    tokenizer: Any,
    tokens: int,
    count: int,
    seed: int = 0,
    kinds: Sequence[str] = (),
    *,
    copies: int = COPIES,
    facts: int = FACTS,
) -> list[Prompt]:
    """`count` prompts of `tokens` tokens each, of all kinds in turn, or of some, with what is restated in them.

    seed: chooses the texts and everything in them. copies, facts: passages and facts that are restated in a text, at
    most; without passages there are no facts either. Raises ParameterError for a kind that there is not.
    """
    chosen = tuple(kinds) or tuple(KINDS)
    for kind in chosen:
        if kind not in KINDS:
            raise ParameterError(f"kinds holds {kind!r}: pass some of {', '.join(KINDS)}")
    found = []
    for index in range(count):
        kind, place = chosen[index % len(chosen)], seed + index // len(chosen)
        rng = random.Random(f"text/{kind}/{place}")
        natural = Prompt(f"{kind} {place}", tuple(_natural(kind, rng, tokenizer, tokens)))
        found.append(_restated(natural, _facts(rng, tokenizer, tokens, facts), rng, tokens, copies))
    return found


def with_copies(prompt: Prompt, most: int | None = None, seed: int = 0) -> Prompt:
    """A prompt in which passages of its own are restated; as it is where it is too short for that.

    most: tokens that it may have then; its text loses what is over just in front of its last `END`, where a question
    may stand.
    """
    return _restated(prompt, [], random.Random(f"copies/{prompt.name}/{seed}"), most)


def share_of(most: int, tokens: int) -> int:
    """Number of a text's passages or facts, of at most so many."""
    return 0 if tokens < SHORTEST else min(most, tokens // EACH * most // COPIES)


def _facts(rng: random.Random, tokenizer: Any, tokens: int, most: int) -> list[Fact]:
    keys = [f"{a} {b} {c}" for a in _SIZES for b in _COLOURS for c in _THINGS]
    made = []
    for index, key in enumerate(rng.sample(keys, share_of(most, tokens))):
        value = str(rng.randrange(10**6, 10**7))
        line = "\n" + FORMS[index % len(FORMS)].format(key=key, value=value) + "\n"
        first = line.rindex(value)
        made.append(spans_of(line, [("facts", first, first + len(value))], tokenizer, start=False))
    return made


def _restated(
    prompt: Prompt, facts: Sequence[Fact], rng: random.Random, most: int | None, copies: int = COPIES
) -> Prompt:
    """The prompt with facts, which stand in it twice, and with passages of its own again, each far below the first.

    most: tokens that it may have then. copies: passages, at most.
    """
    whole = len(prompt.ids)
    passages = share_of(copies, whole)
    added = passages * LENGTH + 2 * sum(len(line) for line, _ in facts)
    cut = whole - END - (0 if most is None else max(0, whole + added - most))
    if not passages or cut - FAR - LENGTH < (passages + 1) * LENGTH:
        return prompt
    ids = [*prompt.ids[:cut], *prompt.ids[whole - END :]]
    sources = [(first, first + LENGTH) for first in _apart(rng, passages, cut - FAR - LENGTH)]
    given = [one for one in prompt.inside if one.last <= cut]
    whole_ones = sorted([*sources, *((one.first, one.last) for one in given)])

    def place(least: int, before: int = cut) -> int:
        """Place where something is put in: behind so many tokens, outside of what must stay whole."""
        at = rng.randrange(least, before)
        for first, last in whole_ones:  # ascending, so that what is moved behind one is tried on the next
            at = last if first < at < last else at
        return at

    put: list[_Put] = []
    for first, last in sources:
        put.append(_Put(place(last + FAR), ids[first:last], Span("copies", CUE, LENGTH)))
    for line, (value,) in facts:
        first = place(1, cut - FAR - 2 * LENGTH)
        put += [_Put(first, line), _Put(place(first + FAR), line, value)]
    put.sort(key=lambda one: one.at)
    made: list[int] = []
    spans: list[Span] = []
    done = 0
    for one in put:
        made += ids[done : one.at]
        done = one.at
        if one.span is not None:
            spans.append(_moved(one.span, len(made)))
        made += one.ids
    made += ids[done:]
    inside = [_moved(one, sum(len(each.ids) for each in put if each.at <= one.first)) for one in given]
    inside += [one for one in spans if one.family != "copies"]
    restated = tuple(one for one in spans if one.family == "copies")
    return Prompt(prompt.name, tuple(made), tuple(inside), restated)


@frozen
class _Put:
    """Tokens to put in front of a token of the text, and which of them are an answer."""

    at: int
    ids: Sequence[int]
    span: Span | None = None


def _moved(span: Span, by: int) -> Span:
    return Span(span.family, span.first + by, span.last + by)


def _apart(rng: random.Random, count: int, room: int) -> list[int]:
    """Places from 1 on of passages that do not overlap, within some room."""
    spare = sorted(rng.randrange(max(1, room - count * LENGTH)) for _ in range(count))
    return [1 + place + index * LENGTH for index, place in enumerate(spare)]


def _natural(kind: str, rng: random.Random, tokenizer: Any, tokens: int) -> list[int]:
    """The first tokens of documents of a kind, in an order that is drawn."""
    documents = list(KINDS[kind]())
    rng.shuffle(documents)
    ids: list[int] = []
    while len(ids) < tokens:
        before = len(ids)
        for read in documents:  # a kind with fewer tokens begins again
            text = read()
            if text:
                ids += tokenizer(text, add_special_tokens=not ids)["input_ids"]
            if len(ids) >= tokens:
                break
        if len(ids) == before:
            raise ParameterError(f"kinds holds {kind!r}, of which this machine has no text: pass others")
    return ids[:tokens]


@cache
def sources() -> tuple[Path, ...]:
    """The files of the standard library, but its tests."""
    paths: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return tuple(sorted(paths))


@contextmanager
def uncollected() -> Iterator[None]:
    """Runs the block without the collector of cycles, which visits all objects again and again while many are made."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def definitions(path: Path) -> Iterator[Any]:
    """The syntax tree of a file, and its classes and functions, in the order of `ast.walk`, which also looks into
    expressions: most of a tree, and no definition. Nothing of a file that is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            level: list[ast.AST] = [ast.parse(_text(path))]
    except (SyntaxError, ValueError):
        return
    while level:
        yield from (node for node in level if isinstance(node, _DOCUMENTED))
        level = [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, _BLOCKS)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _code() -> list[Callable[[], str]]:
    return [lambda path=path: f"# {path.name}\n{_text(path)}\n" for path in sources()]  # type: ignore[misc]


def _docs() -> list[Callable[[], str]]:
    from pydoc_data.topics import topics

    made: list[Callable[[], str]] = [lambda key=key: f"{topics[key]}\n\n" for key in sorted(topics)]  # type: ignore[misc]
    return made + [lambda path=path: _docstrings(path) for path in sources()]


def _docstrings(path: Path) -> str:
    found = ((getattr(node, "name", path.stem), ast.get_docstring(node)) for node in definitions(path))
    return "".join(f"{name}\n{text}\n\n" for name, text in found if text)


def _notes() -> list[Callable[[], str]]:
    found = {one.metadata["Name"]: one for one in metadata.distributions() if one.metadata["Name"]}
    return [lambda one=one: _description(one) for _, one in sorted(found.items())]  # type: ignore[misc]


def _description(one: metadata.Distribution) -> str:
    found: Any = one.metadata  # an email.message.Message, whose body the types do not know
    text = found.get_payload() or found["Description"] or ""
    return f"{one.metadata['Name']}\n\n{text}\n\n" if isinstance(text, str) and len(text) > 400 else ""


def _records() -> list[Callable[[], str]]:
    return [lambda path=path: _listed(path) for path in sources()]  # type: ignore[misc]


def _listed(path: Path) -> str:
    lines = []
    for node in definitions(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        record = {
            **{"file": path.name, "line": node.lineno, "name": node.name},
            "parameters": [one.arg for one in node.args.args],
            **{"lines": (node.end_lineno or node.lineno) - node.lineno + 1},
            "calls": sorted(_called(node))[:6],
        }
        lines.append(json.dumps(record))
    return "".join(f"{line}\n" for line in lines)


def _called(node: ast.AST) -> set[str]:
    """Names of the functions that are called in a piece of code."""
    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return {one.id for one in calls if isinstance(one, ast.Name)}


KINDS: Mapping[str, Callable[[], list[Callable[[], str]]]] = {
    "code": _code,
    "docs": _docs,
    "notes": _notes,
    "records": _records,
}
"""Kinds of text: what gives the documents of each, which are read when they are needed."""
