"""How each prefix in SGLang's radix cache was written, as far as this process has seen.

Which slots a prefix has is known on the device alone, and decoding does not come to this backend. But SGLang finds a
prefix by its tokens, its salt and its LoRA, and so is it remembered here: by a hash of every 16 tokens and what stands
before them, as a store would name its pages. Where keys lie, and where they are moved to, makes no difference then.

The radix cache lets go of the end of a prefix first, so what was written last on a prefix's way is what is there: from
where it ends on, decoding wrote the rest.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen

from sparseprefill.breakeven.before import Before

from ..serving.requests import Row
from ..serving.written import UNTOLD, Methods, Write

PAGE, WIDTH = 16, 8
"""Tokens that are remembered together, and bytes of one."""
STORE = "{flag} may have brought them"
FORGOTTEN = "they were computed too long ago"


@frozen(eq=False)
class _Chunk:
    """A chunk of a prompt that was computed. start: its first token. counts: of the tokens before it, those of each
    method's number. number: of its own. tick: when. owner: its request."""

    start: int
    counts: tuple[int, ...]
    number: int
    tick: int
    owner: str

    def upto(self, end: int) -> list[int]:
        """Tokens of each method's number, of the first `end`."""
        found = [*self.counts, *[0] * (self.number + 1 - len(self.counts))]
        found[self.number] += end - self.start
        return found


@define(eq=False)
class _Text:
    """The hashes of a request's tokens: of its first 16, of its first 32, and so on."""

    request: weakref.ref[Any]
    hashes: list[int] = field(factory=list)


@define(eq=False)
class Texts:
    """Chunks by the hash of their tokens and of those before them.

    find, alive: a request of an id, None where there is none; whether it is still in progress. most: pages that are
    remembered. why: nothing is known of them, or empty.
    """

    find: Callable[[str], Any]
    alive: Callable[[str], bool]
    most: int = 1 << 16
    why: str = ""
    _known: dict[int, _Chunk] = field(factory=dict, init=False)
    _texts: dict[str, _Text] = field(factory=dict, init=False)
    _methods: Methods = field(factory=Methods, init=False)
    _tick: int = field(default=0, init=False)

    def before(self, row: Row) -> Before:
        """See `Written`."""
        request = self.find(row.name or "")
        if self.why or request is None:
            return Before(unknown=row.start, why=self.why or UNTOLD)
        return self._methods.before(self._counts(request, row.start), FORGOTTEN)

    def writing(self, row: Row) -> Write:
        """See `Written`."""
        name = row.name or ""
        request = self.find(name)
        if self.why or request is None:
            return _nothing
        counts = tuple(self._counts(request, row.start))
        mine = self._pages(request, row.end)[row.start // PAGE :]
        if row.end % PAGE:
            mine.append(self._part(request, row.end))

        def write(method: str) -> None:
            self._tick += 1
            made = _Chunk(row.start, counts, self._methods.number(method), self._tick, name)
            for one in mine:
                known = self._known.pop(one, made)
                # Of two requests that compute the same tokens at once the radix cache keeps the first one's.
                self._known[one] = known if known.owner != name and self.alive(known.owner) else made
            while len(self._known) > self.most:
                del self._known[next(iter(self._known))]

        return write

    def forget(self, name: str) -> None:
        """The request of this id is gone; what it wrote may be there."""
        self._texts.pop(name, None)

    def _counts(self, request: Any, end: int) -> list[int]:
        """Of a request's first tokens those of each method's number."""
        chunk, at = self._last(request, end)
        counts = [0, 0] if chunk is None else chunk.upto(at)
        # Decoding begins no prefix: where nothing of it is known, it was forgotten.
        counts[Methods.UNKNOWN if chunk is None else Methods.DENSE] += end - at
        return counts

    def _last(self, request: Any, end: int) -> tuple[_Chunk | None, int]:
        """The chunk that was written last of a request's first tokens, and how far it is the same."""
        best, at = None, 0
        for i, one in enumerate(self._pages(request, end), 1):
            found = self._known.pop(one, None)
            if found is None:
                continue
            self._known[one] = found  # it is in use: it is let go last
            if best is None or found.tick >= best.tick:
                best, at = found, i * PAGE
        for part in range(min(at + PAGE - 1, end), at, -1):  # a prompt may have ended within a page
            found = self._known.get(self._part(request, part))
            if found is not None and (best is None or found.tick >= best.tick):
                return found, part
        return best, at

    def _pages(self, request: Any, end: int) -> list[int]:
        """The hashes of a request's whole pages up to a token."""
        text = self._texts.get(request.rid)
        if text is None or text.request() is not request:
            text = self._texts[request.rid] = _Text(weakref.ref(request))
        hashes, whole = text.hashes, end // PAGE
        if whole > len(hashes):
            last = hashes[-1] if hashes else _begin(request)
            told = _told(request, len(hashes) * PAGE, whole * PAGE)
            for at in range(0, len(told), WIDTH * PAGE):
                last = hash((last, told[at : at + WIDTH * PAGE]))
                hashes.append(last)
        return hashes[:whole]

    def _part(self, request: Any, end: int) -> int:
        """The hash of a request's tokens up to one within a page."""
        pages = self._pages(request, end)
        return hash((pages[-1] if pages else _begin(request), _told(request, len(pages) * PAGE, end)))


def _begin(request: Any) -> int:
    """What keeps the prefixes of requests apart, whatever their tokens are."""
    return hash((request.extra_key, request.cache_salt))


def _told(request: Any, first: int, last: int) -> bytes:
    """Some tokens of a request, its answer until now among them."""
    return array("q", request.full_untruncated_fill_ids[first:last]).tobytes()


def _nothing(method: str) -> None:
    """Nobody knows whose."""
