"""The rows of a transformers cache, by how they were written, as far as the attached model's forwards tell.

The word stands on the cache itself, so that copies of it have it, too, such as those of a prompt that several others
begin with. Cropping leaves it true of the rows that are left: a forward writes behind those.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from attrs import frozen

from sparseprefill.breakeven.before import Before

from .state import Attachment, Forward, past_length

NAME = "sparseprefill_rows"
UNSEEN = "the attached model did not write them"


@frozen
class Rows:
    """Ranges of rows, each with its end and the method that wrote it: "" for every key, None for nobody knows."""

    ranges: tuple[tuple[int, str | None], ...] = ()

    def written(self, begin: int, end: int, method: str) -> Rows:
        """A forward wrote some rows; what was behind its first one is not there any more."""
        kept = list(self._until(begin))
        if kept and kept[-1][1] == method:
            kept.pop()
        return Rows((*kept, (end, method)))

    def before(self, end: int) -> Before:
        """The first rows."""
        found, begin = dict[str | None, int](), 0
        for last, method in self._until(end):
            found[method] = found.get(method, 0) + last - begin
            begin = last
        unknown = found.pop(None, 0)
        dense = found.pop("", 0)
        methods = tuple(str(one) for one in found)
        return Before(
            sparse=sum(found.values()), dense=dense, unknown=unknown, methods=methods, why=UNSEEN if unknown else ""
        )

    def _until(self, end: int) -> tuple[tuple[int, str | None], ...]:
        """The ranges of the first rows, all of which are in one."""
        kept, begin = list[tuple[int, str | None]](), 0
        for last, method in self.ranges:
            if begin < min(last, end):
                kept.append((min(last, end), method))
            begin = last
        return (*kept, (end, None)) if begin < end else tuple(kept)


def rows_of(cache: Any) -> Rows:
    """Everything that is known of a cache's rows."""
    found = getattr(cache, NAME, None)
    return found if isinstance(found, Rows) else Rows()


def write(cache: Any, begin: int, end: int, method: str) -> None:
    """A forward wrote some rows of a cache: by a method, or, where its name is empty, with every key."""
    if cache is not None and end > begin:
        with suppress(AttributeError, TypeError):  # a tuple, or an object that takes no attributes: nobody knows
            setattr(cache, NAME, rows_of(cache).written(begin, end, method))


def settle(attached: Attachment, forward: Forward, cache: Any) -> int:
    """Count the prompt of a forward that is through, if it is the first chunk, and write down what it wrote to a cache,
    if there is one. Tokens of the prompt in the cache; 0 without one."""
    if forward.seen and not forward.prefill.counted:
        forward.prefill.counted = True
        attached.session.prompts.count("sparse" if forward.sparse else "dense", forward.prefill.before)
    if cache is None:
        return 0
    end = past_length(cache) if forward.end is None else forward.end
    write(cache, forward.past, end, attached.session.route.name if forward.sparse else "")
    write(cache, end, end + forward.draft, "")
    return end


def forget(cache: Any, begin: int) -> None:
    """Nobody knows what the rows of a cache hold from one on."""
    with suppress(AttributeError, TypeError):
        setattr(cache, NAME, Rows(rows_of(cache)._until(begin)))


def write_short(cache: Any, rows: int) -> None:
    """A forward of few rows, such as a decoding step, will write behind those that are there.

    It comes once a token, so that no length is read from a device: of a cache whose length is there nothing is known.
    """
    try:
        past = cache.get_seq_length()
    except (AttributeError, ValueError, TypeError, RuntimeError):
        past = None
    if isinstance(past, int):
        write(cache, past, past + rows, "")
    else:
        forget(cache, 0)
