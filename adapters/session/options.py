"""Options of every host, declared once: for `attach`, for a Session, and for a server's table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from attrs import field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.structure import join
from sparseprefill.validate import MOST_ROWS, fitting, flag, is_number, is_whole

from .defaults import MIN_QUERY, TAIL
from .watch import MOST_EVERY, RECALL_EVERY

MOST_LAYERS = 1 << 16
"""More indices than any model has layers are refused, before an endless iterator is read to no end."""
ROWS = fitting("", lambda value: is_whole(value, 0, MOST_ROWS), f"a number of query rows from 0 to {MOST_ROWS}")
PREFILL_ROWS = fitting(
    "",
    lambda value: is_whole(value, 2, MOST_ROWS),
    f"an integer from 2, so that decoding stays dense, to {MOST_ROWS}",
    "integer >= 2",
)
EVERY = fitting(
    "",
    lambda value: is_whole(value, 0, MOST_EVERY),
    f"N to measure one of N prefills, an integer from 0 (none) to {MOST_EVERY}",
)
STRICT = fitting("", lambda value: value is None or is_number(value, 0, 1), "a number from 0 to 1, or None")


def _indices(layers: Iterable[int] | None) -> tuple[int, ...] | None:
    if layers is None:
        return None
    remedy = "pass layer indices, such as [4, 5, 6], or None"
    try:
        chosen = list(itertools.islice(None if isinstance(layers, str | bytes | Mapping) else layers, MOST_LAYERS + 1))  # type: ignore[arg-type]
    except TypeError:
        raise ParameterError(f"layers is {printed(layers)}: {remedy}") from None
    if not chosen:
        raise ParameterError("layers is empty: pass the layers to run sparse, such as [4, 5, 6], or None for all")
    if len(chosen) > MOST_LAYERS:
        raise ParameterError(f"layers is {printed(layers)}, which has more than {MOST_LAYERS} indices: {remedy}")
    if any(not isinstance(layer, int) or isinstance(layer, bool) for layer in chosen):
        raise ParameterError(f"layers is {printed(chosen)}: pass integers")
    if min(chosen) < 0:
        raise ParameterError(f"layers is {printed(chosen)}: pass indices from 0, which is the first layer")
    return tuple(chosen)


@frozen(kw_only=True)
class HostOptions:
    """Options that mean the same in every host.

    min_query: query rows from which a call is prefill, 2 or more, so that decoding stays dense. layers: indices to run
    sparse, from 0; None for all. strict: refuse what would stay dense: a call in a session, a layer at the start of a
    server. measure: count every call's pairs at once (host sync); otherwise the masks of the last prefill wait for a
    report. tail: last query rows of a prompt that get every key, whatever the method selects (`Pipeline.with_tail`);
    where a call does not say how long its prompt is, the call's own last rows. 0 for none. recall_every: of how many
    prefills that run sparse the recall of one is measured, the first among them; 0 for none. strict_recall: the recall
    below which a measured call is counted, and the first is logged as a warning; None for neither. skip_unread: compute
    no rows of the last layer that nobody reads.
    """

    min_query: int = field(default=MIN_QUERY, validator=PREFILL_ROWS)
    layers: tuple[int, ...] | None = field(default=None, converter=_indices)
    strict: bool = field(default=False, validator=flag())
    measure: bool = field(default=False, validator=flag())
    tail: int = field(default=TAIL, validator=ROWS)
    recall_every: int = field(default=RECALL_EVERY, validator=EVERY)
    strict_recall: float | None = field(default=None, validator=STRICT)
    skip_unread: bool = field(default=False, validator=flag())

    def check(self, at: str = "") -> None:
        """ParameterError for options that do not go together. at: where they stand, for messages."""
        if self.strict_recall is not None and not self.recall_every:
            name, other = join(at, "strict_recall"), join(at, "recall_every")
            raise ParameterError(
                f"{name} is {printed(self.strict_recall)}, but {other} is 0, so nothing is measured: pass 1 or more"
            )
