"""The prefixes in SGLang's radix cache, by how they were written, as far as this process has seen.

Which slots a prefix has is known on the device alone, and decoding does not come to this backend. But SGLang finds a
prefix by its tokens, its salt and its LoRA, and so is it remembered here: by a hash of every 16 tokens, or of
whole pages where they are longer, and what stands before them, as a store would name its pages. Where keys lie, and
where they are moved to, makes no difference then.

The radix cache lets go of the end of a prefix first, and finds as much of a prompt as there is. So where a request
begins, nothing was there, and what was written last on a prefix's way is what is there. Decoding wrote what follows the
end of a prompt. The last tokens of a prompt are computed again in any case, and where two requests compute the same,
the cache keeps what came first.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen

from sparseprefill.breakeven.before import Before

from ..serving.requests import Row
from ..serving.written import UNTOLD, Methods, Write, nowhere

PIECE, WIDTH = 16, 8
"""Tokens that are remembered together, at least, and bytes of one."""
FORGOTTEN = "too long ago, or within {tokens} tokens that others went on with otherwise"


def together(page: int) -> int:
    """Tokens that are remembered together: whole pages, since the radix cache shares no part of one."""
    return -(-PIECE // page) * page


@frozen(eq=False)
class _Chunk:
    """A chunk of a prompt that was computed. start: its first token. counts: of the tokens before it, those of each
    method's number. number: of its own. tick: when. over: it ends its prompt."""

    start: int
    counts: tuple[int, ...]
    number: int
    tick: int
    over: bool

    def upto(self, end: int) -> list[int]:
        """Tokens of each method's number, of the first `end`."""
        found = [*self.counts, *[0] * (self.number + 1 - len(self.counts))]
        found[self.number] += end - self.start
        return found


@define(eq=False)
class _Text:
    """hashes: of a request's first piece, of its first two, and so on. begun: when it found the prefix that it goes
    on behind. end: of its last chunk, which is `last` once it is computed."""

    request: weakref.ref[Any]
    hashes: list[int] = field(factory=list)
    begun: int = 0
    end: int = -1
    last: _Chunk | None = None


@define(eq=False)
class Texts:
    """Chunks by the hash of their tokens and of those before them.

    find: a request of an id; None where there is none. most: pieces, of `together` tokens, that are remembered. page:
    tokens of one of SGLang's pages.
    """

    find: Callable[[str], Any]
    most: int = 1 << 16
    page: int = 1
    _piece: int = field(init=False)
    _known: OrderedDict[int, _Chunk] = field(factory=OrderedDict, init=False)
    _texts: dict[str, _Text] = field(factory=dict, init=False)
    _methods: Methods = field(factory=Methods, init=False)
    _tick: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._piece = together(self.page)

    def before(self, row: Row) -> Before:
        """See `Written`."""
        request = self.find(row.name or "")
        if request is None:
            return Before(unknown=row.start, why=UNTOLD)
        return self._methods.before(self._counts(request, row.start), FORGOTTEN.format(tokens=self._piece))

    def writing(self, row: Row) -> Write:
        """See `Written`."""
        request = self.find(row.name or "")
        if request is None:
            return nowhere
        text, first = self._text(request), row.start // self._piece
        if text.end != row.start:
            text.begun, text.last = self._tick, None
        before = self._counts(request, row.start) if text.last is None else text.last.upto(row.start)
        text.end, text.last, begun, counts = row.end, None, text.begun, tuple(before)
        mine, tokens = self._pieces(request, row.end)[first:], len(request.full_untruncated_fill_ids)
        ahead = [one for one in self._pieces(request, row.start)[-1:] if one not in self._known]
        known = tuple(self._counts(request, first * self._piece)) if ahead else ()
        end, over, again = self._end(request, row.end), row.end == tokens, tokens - row.start <= self.page

        def write(method: str) -> None:
            self._tick += 1
            number = self._methods.number(method)
            for one in ahead:  # decoded, maybe
                self._known.setdefault(one, _Chunk(first * self._piece, known, Methods.DENSE, self._tick, True))
            made = _Chunk(row.start, counts, number, self._tick, over)
            for at, one in enumerate(mine, first + 1):
                there = self._known.get(one)
                if there is not None and (again or there.tick > begun):  # the radix cache keeps what came first
                    made = _Chunk(at * self._piece, tuple(there.upto(at * self._piece)), number, self._tick, over)
                else:
                    self._keep(one, made)
            self._keep(end, made)
            if text.end == row.end:
                text.last = made
            while len(self._known) > self.most:
                self._known.popitem(last=False)

        return write

    def forget(self, name: str) -> None:
        """The request of this id is gone; what it wrote may be there."""
        self._texts.pop(name, None)

    def _counts(self, request: Any, end: int) -> list[int]:
        """Of a request's first tokens those of each method's number."""
        best, at = None, 0
        for i, one in enumerate(self._pieces(request, end), 1):
            found = self._known.get(one)
            if found is not None:
                self._keep(one, found)
                if best is None or found.tick >= best.tick:
                    best, at = found, i * self._piece
        # From a prompt's end on it was decoded.
        rest = Methods.DENSE if best is not None and best.over and best.start == at else Methods.UNKNOWN
        for part in range(min(at + self._piece - 1, end), at - 1, -1):
            found = self._known.get(self._end(request, part))
            if found is not None and (best is None or found.tick >= best.tick):
                best, at, rest = found, part, Methods.DENSE if found.over else Methods.UNKNOWN
                break
        counts = [0, 0] if best is None else best.upto(at)
        counts[rest] += end - at
        return counts

    def _keep(self, one: int, chunk: _Chunk) -> None:
        """It is in use: it is let go last."""
        self._known[one] = chunk
        self._known.move_to_end(one)

    def _text(self, request: Any) -> _Text:
        text = self._texts.get(request.rid)
        if text is None or text.request() is not request:
            text = self._texts[request.rid] = _Text(weakref.ref(request))
        return text

    def _pieces(self, request: Any, end: int) -> list[int]:
        """The hashes of a request's whole pieces up to a token."""
        hashes, whole = self._text(request).hashes, end // self._piece
        if whole > len(hashes):
            last = hashes[-1] if hashes else _begin(request)
            told = _told(request, len(hashes) * self._piece, whole * self._piece)
            for at in range(0, len(told), WIDTH * self._piece):
                last = hash((last, told[at : at + WIDTH * self._piece]))
                hashes.append(last)
        return hashes[:whole]

    def _end(self, request: Any, end: int) -> int:
        """The hash of a request's tokens up to the last of a chunk."""
        pieces = self._pieces(request, end)
        return hash((pieces[-1] if pieces else _begin(request), _told(request, len(pieces) * self._piece, end), "end"))


def _begin(request: Any) -> int:
    """A number that keeps the prefixes of requests apart, whatever their tokens are."""
    return hash((request.extra_key, request.cache_salt))


def _told(request: Any, first: int, last: int) -> bytes:
    """Some tokens of a request, its answer until now among them."""
    return array("q", request.full_untruncated_fill_ids[first:last]).tobytes()
