"""Which prefill a row of a batch belongs to, told without the host's request ids, which metadata do not carry.

A chunk goes on with a prefill where it starts at the token at which that prefill's last chunk ended, in the same
place: the same slot of the host's request table, or the same KV blocks. Rows that cannot be told apart by this share
nothing: each begins anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from attrs import define, field, frozen

from ..session.session import Prefill


@frozen
class Row:
    """One request's chunk in one step.

    start, end: the tokens of its sequence that the chunk holds. before: where the keys ahead of the chunk stand, None
    where the host does not say. after: the same for the chunk's last key.
    """

    start: int
    end: int
    before: Hashable = None
    after: Hashable = None


@define(eq=False)
class _Entry:
    prefill: Prefill
    steps: int = 0


@define(eq=False)
class Requests:
    """Prefills in progress. A prefill is forgotten, its memory freed, once a step goes by without its next chunk.

    patience: steps that may go by; more than one where other batches run in between (pipeline parallelism, batches
    cut in two).
    """

    patience: int = 1
    finished: int = 0
    _entries: dict[Hashable, _Entry] = field(factory=dict, init=False)

    def step(self, rows: Sequence[Row], decoding: Sequence[Row] = ()) -> list[Prefill]:
        """The prefill of every row of one step, in order; drops those that ended.

        decoding: the step's other rows. One that stands where a prefill ended has that prefill behind it; a request
        that starts there on cached blocks must not take it over.
        """
        asked = Counter(_key(row.start, row.before) for row in (*rows, *decoding))
        found: dict[Hashable, _Entry] = {}
        prefills = []
        for row in rows:
            key = _key(row.start, row.before)
            known = self._entries.pop(key, None) if key is not None and asked[key] == 1 else None
            prefill = Prefill() if known is None else known.prefill
            prefills.append(prefill)
            after = _key(row.end, row.after)
            found[object() if after is None else after] = _Entry(prefill)  # kept for its end, if never found again
        for key, entry in self._entries.items():
            entry.steps += 1
            if entry.steps < self.patience:
                found.setdefault(key, entry)
            else:
                entry.prefill.memory.clear()
                self.finished += 1
        self._entries = found
        return prefills

    def __len__(self) -> int:
        return len(self._entries)


def _key(token: int, place: Hashable) -> Hashable:
    return None if place is None or token == 0 else (token, place)
