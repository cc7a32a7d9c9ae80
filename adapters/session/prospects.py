"""Facts from before the first request: whether anything of a session can ever run sparse, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from sparseprefill.call import AttentionCall, resized
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.route import Route

LONGEST = 1 << 20
"""Tokens up to which calls are tried; a round guess that no prompt of today passes."""
SLIDING = "a sliding window: all of its keys are computed, without the method"
NOT_CHOSEN = "not among the chosen layers"


@frozen
class Prospects:
    """The prospects of a session's calls.

    never: why none of them can run sparse, whatever comes; empty where one can. doubts: why none may run sparse, as
    far as can be told. small: the one of these that is the gate's.
    """

    never: str = ""
    doubts: tuple[str, ...] = ()
    small: str = ""


def prospects(
    route: Route,
    layers: Mapping[int, AttentionCall | str],
    min_query: int,
    *,
    trained: int | None = None,
    windows: Iterable[int] = (),
    chosen: frozenset[int] | None = None,
) -> Prospects:
    """Look if any call can run sparse. By sizes alone: no value on a device is read, and no memory is needed.

    layers: every attention layer, as a call with its sizes, type, softcap and sinks (of any length), or as the reason
    why the host computes it, whatever comes. min_query: query rows from which a call is prefill. trained: tokens that
    the model was made for; they may be passed. windows: layers whose sliding window the session computes exactly.
    chosen: the layers asked for, None for all. Raises StageError where a stage or the gate fails to answer.
    """
    asked = [i for i in sorted({*layers, *windows}) if chosen is None or i in chosen]
    if not asked:
        return Prospects(never="the model has no attention layer" if not layers else f"no layer is left: {NOT_CHOSEN}")
    sliding, lengths = set(windows), _lengths(route, min_query, trained)
    reasons: dict[int, str] = {}
    opened: list[AttentionCall] = []
    for i in asked:
        given = SLIDING if i in sliding else layers[i]
        reason = given if isinstance(given, str) else _objection(route, given, lengths)
        if reason:
            reasons[i] = reason
        elif isinstance(given, AttentionCall):
            opened.append(given)
    if not opened:
        said = _listed(reasons)
        ranges = () if route.profile is None else route.profile.ranges
        measured = any(one.method is None or one.dense_layers for one in ranges)  # a profile that was made so
        return Prospects(doubts=(said,)) if measured or sliding & set(asked) else Prospects(never=said)
    doubts: list[str] = []
    if trained is not None and trained < min_query:
        doubts.append(f"min_query is {min_query}, but the model was trained for at most {trained} tokens")
    if small := _too_small(route, opened, lengths):
        doubts.append(small)
    return Prospects(doubts=tuple(doubts), small=small)


def _lengths(route: Route, min_query: int, trained: int | None) -> list[int]:
    """Lengths of prompts to try: powers of two from `min_query` on, the longest, and one of each range of a profile."""
    last = max(min_query, LONGEST if trained is None else min(trained, LONGEST))
    powers = [min_query << i for i in range(LONGEST.bit_length()) if min_query << i < last]
    ranges = () if route.profile is None else route.profile.ranges
    return sorted({*powers, last, *(one.least for one in ranges if min_query <= one.least <= last)})


def _objection(route: Route, like: AttentionCall, lengths: Iterable[int]) -> str:
    """The stages' objection to every length; empty where they take one."""
    reasons: dict[str, None] = {}
    for keys in lengths:
        call = resized(like, keys, keys, batch=1)
        if left := route.left_dense(call):
            reasons[left] = None
            continue
        try:
            found = route.unsupported(call)
        except UnsupportedCallError as error:
            found = error.reasons
        if not found:
            return ""
        reasons.update(dict.fromkeys(found))
    return "; ".join(list(reasons)[:3])


def _too_small(route: Route, layers: Iterable[AttentionCall], lengths: list[int]) -> str:
    """The gate's reason for letting no length pass; empty where it lets one."""
    seen, said = set(), ""
    for like in layers:
        sizes = (like.q.shape[1], like.kv_heads, like.q.shape[3], like.q.dtype, like.q.device)
        if sizes in seen:
            continue
        seen.add(sizes)
        if any(route.worth(resized(like, keys, keys, batch=1)) for keys in lengths):
            return ""
        longest = resized(like, lengths[-1], lengths[-1], batch=1)
        said = f"up to {lengths[-1]} tokens every call stays dense: {route.choose(longest).dense}"
    return said


def _listed(reasons: Mapping[int, str]) -> str:
    """``layers 0 to 3: reason; layer 4: reason``, layers of one reason together."""
    found: dict[str, list[int]] = {}
    for layer, reason in reasons.items():
        found.setdefault(reason, []).append(layer)
    match list(found):
        case [reason]:
            return f"every chosen layer stays dense: {reason}"
        case _:
            parts = (f"{'layer' if len(of) == 1 else 'layers'} {_ranges(of)}: {why}" for why, of in found.items())
            return "; ".join(parts)


def _ranges(layers: list[int]) -> str:
    whole = len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
