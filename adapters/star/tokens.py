"""Token ids as they are given: rows of unequal length."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from torch import Tensor

from sparseprefill.errors import ParameterError

Rows = Tensor | Sequence[Sequence[int]] | Sequence[Tensor]
"""Token ids: a tensor ``[B, N]``, or for each batch row a sequence or a tensor ``[N]``, without padding."""


def rows_of(name: str, given: Rows, vocabulary: int | None = None) -> list[list[int]]:
    """The rows as lists; ParameterError where there is none, or one is empty or holds anything but token ids.

    vocabulary: number of tokens that the model embeds; None where nobody knows.
    """
    if isinstance(given, Tensor):
        given = list(given) if given.dim() == 2 else [given]
    if isinstance(given, str) or any(not isinstance(row, Tensor | Sequence) for row in given):
        raise ParameterError(f"{name}: pass rows of token ids, [B, N] or one list for each batch row")
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in given]
    if not rows or any(not row for row in rows):
        raise ParameterError(f"{name}: pass at least one row, and at least one token in each")
    kinds = {kind for row in rows for kind in set(map(type, row))}  # a million tokens are a matter of milliseconds
    if any(not issubclass(kind, int) or issubclass(kind, bool) for kind in kinds):
        raise ParameterError(f"{name}: token ids are integers; pass [B, N] or one list of ids for each batch row")
    if vocabulary is not None:
        for number, row in enumerate(rows):
            for token in (min(row), max(row)):
                if not 0 <= token < vocabulary:
                    remedy = f"the model embeds 0 to {vocabulary - 1}; pass ids of its own tokenizer"
                    raise ParameterError(f"{name}: token id {token} in row {number}: {remedy}")
    return rows


def digest(rows: Sequence[Sequence[int]]) -> str:
    """A short text that differs where any token does."""
    found = hashlib.sha256()
    for row in rows:
        found.update(len(row).to_bytes(8, "little"))
        found.update(array("q", row).tobytes())
    return f"{len(rows)} rows of {', '.join(str(len(row)) for row in rows[:4])} tokens, {found.hexdigest()[:12]}"
