"""The prefill that a row of a batch belongs to, by the id of its request.

A chunk goes on with its request's prefill where it starts at the token at which that prefill's last chunk ended.
Anything else begins anew: a request that comes, whatever it finds in the prefix cache; one that was preempted and is
computed again; and every chunk whose request is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field, frozen

from sparseprefill.breakeven.before import Before

from ..session.session import Prefill


@frozen
class Row:
    """One request's chunk in one step.

    start, end: the tokens of its sequence that the chunk holds. name: the request's id, None where it is not known.
    prompt: tokens of its whole prompt, None where that is not known. asked: the profile that it asked for, None for
    none, `names.Unknown` where nobody tells. ends_alone: whether the server reads the model's output for the chunk's
    last token alone, if for any.
    """

    start: int
    end: int
    name: str | None = None
    prompt: int | None = None
    asked: object = None
    ends_alone: bool = False


@frozen(eq=False)
class _Entry:
    prefill: Prefill
    end: int


@define(eq=False)
class Requests:
    """Prefills in progress, by their requests. chunk: most tokens of a prompt that one step computes, 0 where that is
    unknown. finished: how many are over.

    A prefill is over, and its memory freed, once its request decodes, begins anew, or is gone. Steps that go by without
    it do not end it: other batches run in between, drafts of a speculator have metadata of their own, and a chunk may
    have to wait for its turn. But statistics of its keys are dropped then, and made again from the pages: a request
    that was preempted may find others of the same tokens in the prefix cache, and go on where it stood.
    """

    chunk: int = 0
    finished: int = field(default=0, init=False)
    _entries: dict[str, _Entry] = field(factory=dict, init=False)
    _nameless: int = field(default=0, init=False)

    def step(
        self,
        rows: Sequence[Row],
        decoding: Mapping[str | None, int],
        alive: Callable[[str], bool],
        before: Callable[[Row], Before | None] = lambda row: None,
    ) -> list[Prefill]:
        """The prefill of every row of one step, in order; drops those that are over.

        decoding: the first token of each of the step's other rows, by its request. alive: whether the host still has a
        request of this id. before: how was computed what a cache held before a row, the first of its request.
        """
        self.finished += self._nameless  # nothing can go on with them
        self._nameless = 0
        rows_of = Counter(row.name for row in rows)
        for name, entry in list(self._entries.items()):
            if decoding.get(name, -1) >= entry.end or not alive(name):
                self.end(name)
            elif name not in rows_of:
                entry.prefill.memory.prefix.clear()
        alone = {name for name, count in rows_of.items() if count == 1 and name not in decoding}
        return [self._next(row, row.name if row.name in alone else None, before) for row in rows]

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of those in progress."""
        return tuple(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _next(self, row: Row, name: str | None, before: Callable[[Row], Before | None]) -> Prefill:
        if name is None:
            self._nameless += 1
            return Prefill(chunk=self.chunk, begin=row.start)
        known = self._entries.get(name)
        if known is not None and not row.start == known.end > 0:
            self.end(name)
            known = None
        if known is None:
            found = before(row) if row.start else None
            prefill = Prefill(chunk=self.chunk, begin=row.start, before=found)
        else:
            prefill = known.prefill
        self._entries[name] = _Entry(prefill, row.end)
        return prefill

    def end(self, name: str) -> None:
        """The prefill of this request is over, if it is in progress."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            entry.prefill.memory.clear()
            self.finished += 1
