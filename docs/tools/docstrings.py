"""What the site does to docstrings: an extension of griffe, named in mkdocs.yml.

Our docstrings name a parameter at the start of a sentence (``scale: factor on q.k.``); here each becomes an item of a
list. Classes of attrs get the signature that attrs gives them. Nothing is imported: the site is built without PyTorch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

NAMED = re.compile(r"(?:^|(?<=[.;] ))(?P<names>\w+(?:, \w+)*): ")


def items(paragraph: str, known: set[str]) -> str:
    """The paragraph with a list item for each of the known names that its sentences begin with."""
    text = " ".join(line.strip() for line in paragraph.splitlines())
    found = [match for match in NAMED.finditer(text) if set(match["names"].split(", ")) <= known]
    if not found:
        return paragraph
    ends = [match.start() for match in found[1:]] + [len(text)]
    lead = text[: found[0].start()].strip()
    rows = [
        f"- **{', '.join(f'`{name}`' for name in match['names'].split(', '))}**: "
        + text[match.end() : end].strip().removesuffix(";")
        for match, end in zip(found, ends, strict=True)
    ]
    return "\n".join([*([lead, ""] if lead else []), *rows])


def arranged(docstring: str, known: set[str]) -> str:
    """The docstring, each paragraph with its items; paragraphs that are indented or lists stay as they are."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    return "\n\n".join(part if re.match(r"\s|[-*] |```|>>>", part) else items(part, known) for part in paragraphs)


class Docstrings(griffe.Extension):
    """Items for parameters and fields, and signatures of attrs classes."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Gives a class of attrs its signature, and its docstring the items. All files have been read by then."""
        if attrs_call(cls) is not None and "__init__" not in cls.members:
            cls.set_member("__init__", griffe.Function("__init__", parameters=parameters(cls)))
        if cls.docstring is not None:
            cls.docstring.value = arranged(cls.docstring.value, known(cls))

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Gives the docstring of a function its items."""
        if func.docstring is not None:
            func.docstring.value = arranged(func.docstring.value, {one.name for one in func.parameters})


def known(cls: griffe.Class) -> set[str]:
    """Names of which the docstring of a class may speak: members, and parameters to make it."""
    init = cls.members.get("__init__")
    own = {one.name for one in init.parameters} if isinstance(init, griffe.Function) else set()
    return own | set(cls.members)


def attrs_call(cls: griffe.Class) -> dict[str, str] | None:
    """The arguments of the class's ``frozen`` or ``define``; None where it has neither."""
    for decorator in cls.decorators:
        if str(decorator.value).partition("(")[0] in ("frozen", "define"):
            return arguments(decorator.value)
    return None


def arguments(value: str | griffe.Expr | None) -> dict[str, str]:
    """Keyword arguments of a call, as they are written."""
    if not isinstance(value, griffe.ExprCall):
        return {}
    return {one.name: str(one.value) for one in value.arguments if isinstance(one, griffe.ExprKeyword)}


def parameters(cls: griffe.Class) -> griffe.Parameters:
    """Those of ``__init__`` as attrs writes it: fields of the bases first, those given by name last."""
    found: dict[str, griffe.Parameter] = {}
    for one in [*reversed(cls.mro()), cls]:
        given = attrs_call(one)
        if given is not None:
            found |= {made.name: made for made in fields(one, given.get("kw_only") == "True")}
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    ordered = sorted(found.values(), key=lambda made: made.kind is griffe.ParameterKind.keyword_only)
    return griffe.Parameters(own, *ordered)


def fields(cls: griffe.Class, keywords: bool) -> Iterator[griffe.Parameter]:
    """The annotated names of an attrs class as parameters, in their order."""
    for name, member in cls.members.items():
        if not isinstance(member, griffe.Attribute) or member.annotation is None:
            continue
        if "property" in member.labels or "instance-attribute" not in member.labels:  # without the second, a ClassVar
            continue
        given = arguments(member.value)
        if given.get("init") == "False":
            continue
        plain = not str(member.value).startswith("field(")
        default = member.value if plain else given.get("default", "..." if "factory" in given else None)
        yield griffe.Parameter(
            given.get("alias", name.lstrip("_")).strip("\"'"),
            annotation=member.annotation,
            kind=griffe.ParameterKind.keyword_only
            if keywords or given.get("kw_only") == "True"
            else griffe.ParameterKind.positional_or_keyword,
            default=default,
        )
